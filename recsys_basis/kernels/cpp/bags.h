// The bags of a batch: checked, and turned into entries to be grouped by row.
#pragma once

#include "arrays.h"
#include "buffer.h"

namespace recsys {

// Whether offsets start at 0, never descend, and end at num_items.
bool offsets_are_sound(const int64_t* offsets, int64_t num_bags, int64_t num_items);

// The first item whose row is not one of its feature's, or -1.
template <class Index>
int64_t first_out_of_range(const Bags<Index>& bags);

// One entry an item: its group row, where its bag's gradient is in [B * F, D], and its factor in the pooling.
template <class Index>
Buffer<Entry> entries_of(const Bags<Index>& bags, int threads);

}  // namespace recsys
