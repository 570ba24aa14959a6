// Which bucket a row's moments live in: recsys_basis/row_optimizers/basis/buckets.py, bit for bit.
#pragma once

#include "arrays.h"
#include "buffer.h"

namespace recsys {

enum class Hash { balanced, murmur3, twice, modulo };

// One entry for each partition of the group's shards, as in BucketMap; all arrays [partitions] but keys.
struct BucketMap {
    Hash hash;
    const int64_t *row_start, *private_rows, *shared, *shared_buckets, *bucket_start, *private_start;
    const int64_t* keys;        // [uses of seeds, partitions]
    const int64_t* sign_seeds;  // or null: all signs are 1
    int64_t num_partitions;
};

// Buckets of `rows` [U], ascending.
Buffer<RowBucket> buckets_of(const BucketMap& map, const int64_t* rows, int64_t num_rows, int threads);

}  // namespace recsys
