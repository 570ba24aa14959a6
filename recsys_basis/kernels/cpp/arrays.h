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

// How numbers are kept: recsys_basis/row_optimizers/storage.py.
enum class Storage { float32, bfloat16, float16, log8 };

// A tensor that is read and written as float32, by the keys of its first dimension.
struct Stored {
    void* data;  // [n, width]
    Storage storage;
    int64_t width;
    const int64_t* starts;         // [num_partitions], first key of each
    const int64_t* seeds;          // [num_partitions], of its random bits
    const int64_t* first_columns;  // [num_partitions], where the columns begin in the whole table
    int64_t num_partitions;
};

// Some rows of such a tensor.
struct KeyedRows {
    const int64_t* keys;  // [count], distinct
    float* values;        // [count, width]
    int64_t count;
    int threads;
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
    void* weights;  // [R, D]
    Storage storage;
    float* pooled;  // [B, F * D]
    int64_t width;
    int threads;
};

// Gradients of per-sample weights: result[l] = weight * <gradient[position], weights[key]> of entry l.
struct ItemDots {
    const float* gradient;  // [B * F, D]
    const Entry* entries;   // [L]
    void* weights;          // [R, D]
    Storage storage;
    float* result;  // [L]
    int64_t num_items, width;
    int threads;
};

// Sums of duplicates: rows[u] = sum over entries e in starts[u]..starts[u + 1] of weight * gradient[position], or
// where that is a single one of weight 1, its address.
struct RowSums {
    const float* gradient;  // [B * F, D]
    const Entry* entries;   // [L], sorted by row
    const int64_t* starts;  // [U + 1]
    const float* const* rows;  // [U]: each [D], into gradient or memory for its sum
    int64_t num_rows;       // U
    int64_t width;
    int threads;
};

// One update of U distinct rows.
struct Update {
    float* weights;              // [R, D], or [U, D] of the touched rows alone
    const int64_t* weight_rows;  // [U], where in weights each row's are; null: in their order
    const int64_t* rows;         // [U], ascending
    const float* const* gradients;  // [U], each [D]
    int64_t num_rows;            // U
    int64_t width;               // D
    float learning_rate;         // eta
    float keep;                  // 1 - eta * lambda
    int threads;
};

// Limits of each row's gradient, and the gradients; letters of recsys_basis/row_optimizers/clipping.py.
struct Clip {
    const float* weights;   // [R, D]
    const int64_t* rows;    // [U]
    float* gradients;       // [U, D]
    const int64_t* counts;  // n [U], or null: no CowClip
    int64_t num_rows;       // U
    int64_t width;          // D
    float max_norm, cowclip_ratio, cowclip_min_norm;
    int threads;
};

// The rows of a batch by virtual partition: numbers starts[r]..starts[r + 1] lie in partition partitions[r].
struct Runs {
    const int64_t* starts;      // [count + 1]
    const int64_t* partitions;  // [count]
    int64_t count;
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

// Settings and state of SM3 with rows and columns.
struct Sm3State {
    float* rows;     // mu [R]
    float* columns;  // c [partitions, D]
    float eps;
    float* scratch;  // [threads, D]
};

// Settings and state of Adafactor.
struct AdafactorState {
    float* rows;              // R [R]
    float* columns;           // C [partitions, D]
    int32_t* row_updates;     // t [R], or null: the decay is constant
    int32_t* column_updates;  // t [partitions], or null
    double decay_power;
    float constant_amount, eps, update_clip;  // 1 - beta2, eps, d
    float* scratch;                           // [threads, 2, D]
    float* inverse_roots;                     // [U], 1 / sqrt(R)
};

constexpr int kSketchDepth = 3;

// Where one row's moments are in the sketches.
struct SketchRow {
    int64_t bucket[kSketchDepth];
    float sign[kSketchDepth];
};

// Settings and state of count-sketch Adam.
struct CountSketchState {
    float* first;             // M [K, D], or null: beta1 = 0
    float* second;            // V [K, D]
    const SketchRow* places;  // [U]
    float amount1, amount2, eps;  // 1 - beta1, 1 - beta2
    const float* correction1;     // [U], 1 - beta1^t of each row's table
    const float* correction2;     // [U]
    float* moments;               // [U, 2, D], scratch
};

enum class Direction { gradient, momentum, head_momentum };
enum class Scalar { none, hypergradient, energy };

// Settings and state of BASIS; names and letters of recsys_basis/row_optimizers/basis/spec.py.
struct Basis {
    Direction direction;
    Scalar scalar;
    bool first_of_all;  // M [K, D]; otherwise, where it exists, of private bucket rows only
    bool energy_start_first, log_form, normalized, by_updates;
    float amount1, amount2;  // 1 - beta1, 1 - beta2
    float eps, energy_decay, energy_amount, energy_prior, hypergradient_rate, scalar_min, scalar_max;
    float* first;        // M, or null
    float* second;       // V [K, D]
    int32_t* updates;    // t [K]
    float* row_scalar;   // s or e [R], or null
    const int64_t* row_counts;       // c [U] of a frequency by row, or null
    const float* energy_correction;  // [U], 1 - decay^T of each row's table, or null
    Corrections corrections1, corrections2;
    const RowBucket* buckets;  // [U]
    const Entry* entries;      // (bucket row, position of row), sorted by bucket row
    const int64_t* starts;     // [C + 1]
    int64_t num_touched;       // C
    float* scratch;            // [threads, 3, D]
};

// The measured scales of Balanced Adam's step 4 for one tensor [num_rows, width], its output channels the rows.
struct BalancedScales {
    const float* gradient;
    float cluster_scale, limit;
    float* scales;  // [num_rows]
    int64_t num_rows, width;
    int threads;
};

// Steps 3 and 5 of Balanced Adam for one tensor [num_rows, width], its output channels the rows.
struct BalancedMove {
    float* weights;
    const float *gradient, *first, *second;  // g, M, V
    const float* factors;                    // on V, of rebalancing, or null
    int8_t *last_sign, *num_flips;           // or null: nobody counts
    const float* scales;                     // on V, measured, [num_rows], or null
    float scale;                             // on V, beside the measured: group_scale / (1 - beta2^t)
    float rate, eps;                         // eta / (1 - beta1^t)
    float threshold;                         // V below this share of its mean is masked; 0: none
    int most_flips;                          // M of entries that flipped more often is read as 0
    bool holds;                              // a masked V holds the entry still, else it is read as the bound
    int64_t num_rows, width;
    int threads;
    double* row_sums;  // [num_rows], scratch
};

// Every function that is compiled once for each instruction set.
struct Kernels {
    void (*lookup32)(const Lookup<int32_t>&);
    void (*lookup64)(const Lookup<int64_t>&);
    void (*per_sample_gradient)(const ItemDots&);
    void (*read_rows)(const Stored&, const KeyedRows&);
    void (*write_rows)(const Stored&, const KeyedRows&, const int64_t* updates);
    // The sum of all squares of the sums; not finite where one of them is not.
    double (*sum_rows)(const RowSums&);
    void (*clip_rows)(const Clip&);
    void (*sgd)(const Update&);
    void (*rowwise_adagrad)(const Update&, float* squares, float eps);
    void (*adagrad)(const Update&, float* squares, float eps);
    void (*adam)(const Update&, const AdamState&);
    void (*partial_rowwise_adam)(const Update&, const AdamState&);
    void (*sm3_rows)(const Update&, float* maxima, float eps);
    void (*sm3_rows_and_columns)(const Update&, const Runs&, const Sm3State&);
    void (*adafactor)(const Update&, const Runs&, const AdafactorState&);
    void (*count_sketch_adam)(const Update&, const Runs&, const CountSketchState&);
    void (*basis)(const Update&, const Basis&);
    void (*basis_two_buckets)(const Update&, const Basis&);
    float (*centred_norm)(const float* row, int64_t width);
    void (*balanced_adam_scales)(const BalancedScales&);
    void (*balanced_adam_move)(const BalancedMove&);
};

}  // namespace recsys
