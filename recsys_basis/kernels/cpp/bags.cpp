// Passes over indices and offsets; nothing here touches a weight.
#include "bags.h"

#include <algorithm>

namespace recsys {

bool offsets_are_sound(const int64_t* offsets, int64_t num_bags, int64_t num_items) {
    bool descends = false;
    for (int64_t bag = 0; bag < num_bags; ++bag) descends |= offsets[bag + 1] < offsets[bag];
    return offsets[0] == 0 && !descends && offsets[num_bags] == num_items;
}

template <class Index>
int64_t first_out_of_range(const Bags<Index>& bags) {
    for (int64_t feature = 0; feature < bags.num_features; ++feature) {
        const int64_t begin = bags.offsets[feature * bags.batch_size];
        const int64_t end = bags.offsets[(feature + 1) * bags.batch_size];
        const uint64_t size = bags.feature_sizes[feature];
        // As unsigned numbers, negative rows are too large as well.
        const auto is_wrong = [&](int64_t item) {
            return static_cast<uint64_t>(int64_t{bags.indices[item]}) >= size;
        };
        bool any = false;
        for (int64_t item = begin; item < end; ++item) any |= is_wrong(item);
        if (!any) continue;
        for (int64_t item = begin; item < end; ++item)
            if (is_wrong(item)) return item;
    }
    return -1;
}

template <class Index>
Buffer<Entry> entries_of(const Bags<Index>& bags, int threads) {
    constexpr int64_t kBlock = 1024;  // bags
    Buffer<Entry> entries(bags.num_items);
    const int64_t blocks_per_feature = (bags.batch_size + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < bags.num_features * blocks_per_feature; ++block) {
        const int64_t feature = block / blocks_per_feature;
        const int64_t first = block % blocks_per_feature * kBlock;
        const int64_t* offsets = bags.offsets + feature * bags.batch_size;
        for (int64_t sample = first; sample < std::min(first + kBlock, bags.batch_size); ++sample) {
            const int64_t begin = offsets[sample], end = offsets[sample + 1];
            const float factor = bags.mean && end > begin ? 1.0f / static_cast<float>(end - begin) : 1.0f;
            const auto position = static_cast<uint32_t>(sample * bags.num_features + feature);
            for (int64_t item = begin; item < end; ++item) {
                const float weight = bags.per_sample_weights ? bags.per_sample_weights[item] : 1.0f;
                const uint64_t row = bags.feature_starts[feature] + int64_t{bags.indices[item]};
                entries[item] = {row, position, weight * factor};
            }
        }
    }
    return entries;
}

template int64_t first_out_of_range(const Bags<int32_t>&);
template int64_t first_out_of_range(const Bags<int64_t>&);
template Buffer<Entry> entries_of(const Bags<int32_t>&, int);
template Buffer<Entry> entries_of(const Bags<int64_t>&, int);

}  // namespace recsys
