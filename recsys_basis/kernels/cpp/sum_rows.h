// Backward, first half: the gradients of each distinct row, summed in the order of the batch's items.
#pragma once

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

// The sum of all squares. Its rounding may depend on the threads; whether it is finite does not.
template <class WidthType>
double sum_rows_of(const RowSums& job, WidthType width) {
    constexpr int64_t kAhead = 20;   // items between a prefetch and its use
    constexpr int64_t kBlock = 512;  // rows
    const Entry* all = job.entries + job.starts[job.num_rows];
    double squares = 0;
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 1) reduction(+ : squares)
    for (int64_t block = 0; block < job.num_rows; block += kBlock) {
        const int64_t last = block + kBlock < job.num_rows ? block + kBlock : job.num_rows;
        for (int64_t u = block; u < last; ++u) {
            const Entry* first = job.entries + job.starts[u];
            const Entry* end = job.entries + job.starts[u + 1];
            for (const Entry* entry = first; entry < end; ++entry)
                if (all - entry > kAhead) prefetch_row(job.gradient + entry[kAhead].position * width, width);
            const float* row = job.gradient + first->position * width;
            if (job.rows[u] != row) {
                auto* sum = const_cast<float*>(job.rows[u]);  // memory for it, then
                set_scaled(sum, row, first->weight, width);
                for (const Entry* entry = first + 1; entry < end; ++entry)
                    add_scaled(sum, job.gradient + entry->position * width, entry->weight, width);
            }
            squares += sum_of_squares(job.rows[u], width);
        }
    }
    return squares;
}

double sum_rows(const RowSums& job) {
    double squares = 0;
    with_width(job.width, [&](auto width) { squares = sum_rows_of(job, width); });
    return squares;
}

}  // namespace recsys::RECSYS_VARIANT
