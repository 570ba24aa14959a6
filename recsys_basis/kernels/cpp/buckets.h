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

// Which bucket rows a row's moments live in by recsys_basis/row_optimizers/count_sketch_adam.py, bit for bit.
struct SketchMap {
    const int64_t *row_start, *start, *width;  // [partitions]
    const int64_t* seeds;                      // [kSketchDepth, partitions]
    int64_t num_partitions;
};

// Places of `rows`, which lie in partitions as `runs` says.
Buffer<SketchRow> sketch_of(const SketchMap& map, const int64_t* rows, const Runs& runs, int threads);

}  // namespace recsys
