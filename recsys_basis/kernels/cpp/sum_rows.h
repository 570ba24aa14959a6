// Backward, first half: the gradients of each distinct row, summed in the order of the batch's items.
#pragma once

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

double sum_rows(const RowSums& job) {
    constexpr int64_t kAhead = 12;   // items between a prefetch and its use
    constexpr int64_t kBlock = 512;  // rows
    const int64_t width = job.width, num_items = job.starts[job.num_rows];
    double squares = 0;  // its rounding may depend on the threads; whether it is finite does not
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 1) reduction(+ : squares)
    for (int64_t block = 0; block < job.num_rows; block += kBlock) {
        const int64_t last = block + kBlock < job.num_rows ? block + kBlock : job.num_rows;
        for (int64_t u = block; u < last; ++u) {
            float* sum = job.sums + u * width;
            for (int64_t item = job.starts[u]; item < job.starts[u + 1]; ++item) {
                if (item + kAhead < num_items)
                    prefetch_row(job.gradient + job.entries[item + kAhead].position * width, width);
                const Entry& entry = job.entries[item];
                if (item == job.starts[u])
                    set_scaled(sum, job.gradient + entry.position * width, entry.weight, width);
                else
                    add_scaled(sum, job.gradient + entry.position * width, entry.weight, width);
            }
            squares += sum_of_squares(sum, width);
        }
    }
    return squares;
}

}  // namespace recsys::RECSYS_VARIANT
