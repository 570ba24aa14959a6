// Forward: pooled vectors of all features in one pass, written where they belong in [B, F * D].
#pragma once

#include <cstring>

#include "arrays.h"
#include "rows.h"
#include "stored.h"

namespace recsys::RECSYS_VARIANT {

template <class Index, class Element, class WidthType>
void lookup_in(const Element* weights, const Lookup<Index>& job, WidthType width) {
    constexpr int64_t kAhead = 20;   // items between a prefetch and its use
    constexpr int64_t kBlock = 256;  // bags
    const Bags<Index>& bags = job.bags;
    const int64_t blocks_per_feature = (bags.batch_size + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < bags.num_features * blocks_per_feature; ++block) {
        const int64_t feature = block / blocks_per_feature;
        const int64_t first = block % blocks_per_feature * kBlock;
        const int64_t last = first + kBlock < bags.batch_size ? first + kBlock : bags.batch_size;
        const int64_t* offsets = bags.offsets + feature * bags.batch_size;
        const Element* table = weights + bags.feature_starts[feature] * width;
        const int64_t end_of_block = offsets[last];
        for (int64_t item = offsets[first]; item < end_of_block && item < offsets[first] + kAhead; ++item)
            prefetch_row(table + bags.indices[item] * width, width);
        for (int64_t sample = first; sample < last; ++sample) {
            const int64_t begin = offsets[sample], end = offsets[sample + 1];
            const float factor = bags.mean && end > begin ? 1.0f / static_cast<float>(end - begin) : 1.0f;
            float* pooled = job.pooled + (sample * bags.num_features + feature) * width;
            if (begin == end) std::memset(pooled, 0, width * sizeof(float));
            for (int64_t item = begin; item < end; ++item) {
                if (item + kAhead < end_of_block)
                    prefetch_row(table + bags.indices[item + kAhead] * width, width);
                const Element* row = table + bags.indices[item] * width;
                const float scale = bags.per_sample_weights ? bags.per_sample_weights[item] * factor : factor;
                if (item == begin)
                    set_scaled(pooled, row, scale, width);
                else
                    add_scaled(pooled, row, scale, width);
            }
        }
    }
}

template <class Index>
void lookup(const Lookup<Index>& job) {
    with_elements(job.weights, job.storage, [&](const auto* weights) {
        with_width(job.width, [&](auto width) { lookup_in(weights, job, width); });
    });
}

void per_sample_gradient(const ItemDots& job) {
    const int64_t width = job.width;
    with_elements(job.weights, job.storage, [&](const auto* weights) {
#pragma omp parallel for num_threads(job.threads) schedule(static)
        for (int64_t item = 0; item < job.num_items; ++item) {
            const float* left = job.gradient + job.entries[item].position * width;
            const auto* right = weights + static_cast<int64_t>(job.entries[item].key) * width;
            float sum = 0;
            for (int64_t d = 0; d < width; ++d) sum += left[d] * widen(right[d]);
            job.result[item] = job.entries[item].weight * sum;
        }
    });
}

}  // namespace recsys::RECSYS_VARIANT
