// Group entries by key: a stable radix sort whose result does not depend on the number of threads.
#pragma once

#include "arrays.h"
#include "buffer.h"

namespace recsys {

struct Groups {
    Buffer<int64_t> starts;  // [count + 1] into the sorted entries
    int64_t count = 0;
};

// Sort by key, all < key_limit; entries of one key keep their order.
void sort_by_key(Buffer<Entry>& entries, uint64_t key_limit, int threads);

// The runs of equal keys in sorted entries.
Groups group_by_key(const Buffer<Entry>& sorted, int threads);

}  // namespace recsys
