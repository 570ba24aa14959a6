// What the kernels work on: plain structs of pointers and sizes into memory that PyTorch owns.
//
// Letters as in recsys_basis/shapes.py: B samples, F features, L items, R rows, U distinct rows, D width.
#pragma once

#include <cstdint>

namespace recsys {

// One item to be grouped: by row, or by bucket row.
struct Entry {
    uint64_t key;
    uint32_t position;  // where its source vector is, counted in vectors
    float weight;       // what that vector is multiplied by
};

// The bags of a batch, feature-major.
template <class Index>
struct Bags {
    const Index* indices;             // [L], rows within each feature's table shard
    const int64_t* offsets;           // [F * B + 1]
    const float* per_sample_weights;  // [L], or null
    const int64_t* feature_starts;    // [F], first group row of each feature's shard
    const int64_t* feature_sizes;     // [F], rows of each feature's shard
    int64_t num_items, num_features, batch_size;
    bool mean;
};

template <class Index>
struct Lookup {
    Bags<Index> bags;
    const float* weights;  // [R, D]
    float* pooled;         // [B, F * D]
    int64_t width;
    int threads;
};

// Sums of duplicates: sums[u] = sum over entries e in starts[u]..starts[u + 1] of weight * gradient[position].
struct RowSums {
    const float* gradient;  // [B * F, D]
    const Entry* entries;   // [L], sorted by row
    const int64_t* starts;  // [U + 1]
    float* sums;            // [U, D]
    int64_t num_rows;       // U
    int64_t width;
    int threads;
};

// One update of U distinct rows.
struct Update {
    float* weights;          // [R, D]
    const int64_t* rows;     // [U], ascending
    const float* gradients;  // [U, D]
    int64_t num_rows;        // U
    int64_t width;           // D
    float learning_rate;     // eta
    float keep;              // 1 - eta * lambda
    int threads;
};

// 1 - beta^t of bias correction by t, from recsys_basis/row_optimizers/bias.py; t = 0 counts as t = 1.
struct Corrections {
    const float* table;  // [size]
    int64_t size;
    double beta;  // for t beyond the table
};

// Where one row's moments live (recsys_basis/row_optimizers/basis/buckets.py).
struct RowBucket {
    int64_t first, second;  // bucket rows; equal but for hash=double
    int64_t private_row;    // number among private bucket rows, or -1
    float sign;
};

// Settings and state of both Adams.
struct AdamState {
    float* first;          // M [R, D]
    float* second;         // V [R, D], or v [R]
    float amount1, amount2, eps;  // 1 - beta1, 1 - beta2
    const float* correction1;     // [U], 1 - beta1^t of each row's table
    const float* correction2;     // [U]
};

enum class Direction { gradient, momentum, head_momentum };
enum class Scalar { none, hypergradient, energy };

// Settings and state of BASIS; names and letters of recsys_basis/row_optimizers/basis/spec.py.
struct Basis {
    Direction direction;
    Scalar scalar;
    bool first_of_all;  // M [K, D]; otherwise, where it exists, of private bucket rows only
    bool energy_start_first, log_form, normalized, by_frequency;
    float amount1, amount2;  // 1 - beta1, 1 - beta2
    float eps, energy_decay, energy_amount, hypergradient_rate, scalar_min, scalar_max;
    float* first;        // M, or null
    float* second;       // V [K, D]
    int32_t* updates;    // t [K]
    float* row_scalar;   // s or e [R], or null
    Corrections corrections1, corrections2;
    const RowBucket* buckets;  // [U]
    const Entry* entries;      // (bucket row, position of row), sorted by bucket row
    const int64_t* starts;     // [C + 1]
    int64_t num_touched;       // C
    float* scratch;            // [threads, 3, D]
};

// Every function that is compiled once for each instruction set.
struct Kernels {
    void (*lookup32)(const Lookup<int32_t>&);
    void (*lookup64)(const Lookup<int64_t>&);
    // The sum of all squares of the sums; not finite where one of them is not.
    double (*sum_rows)(const RowSums&);
    void (*sgd)(const Update&);
    void (*rowwise_adagrad)(const Update&, float* squares, float eps);
    void (*adagrad)(const Update&, float* squares, float eps);
    void (*adam)(const Update&, const AdamState&);
    void (*partial_rowwise_adam)(const Update&, const AdamState&);
    void (*basis)(const Update&, const Basis&);
    void (*basis_two_buckets)(const Update&, const Basis&);
};

}  // namespace recsys
