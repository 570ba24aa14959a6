// Balanced Adam's passes over memory; the step numbers are those of recsys_basis/dense_optimizers/balanced_adam.py.
//
// A tensor is rows one after the other. Each row is one thread's alone, and sums of rows add up in their order, so
// the result does not depend on the threads.
#pragma once

#include <cmath>

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

constexpr int64_t kPiece = 1024;  // floats whose sum may be a float; sums of pieces are double

// The sum of term(start, count) over the pieces of a row.
template <class Term>
double sum_pieces(int64_t width, const Term& term) {
    double sum = 0;
    for (int64_t d = 0; d < width; d += kPiece) sum += term(d, width - d < kPiece ? width - d : kPiece);
    return sum;
}

inline double long_sum(const float* row, int64_t width) {
    return sum_pieces(width, [&](int64_t start, int64_t count) { return sum(row + start, count); });
}

// The norm of a row less its mean.
float centred_norm(const float* row, int64_t width) {
    const auto mean = static_cast<float>(long_sum(row, width) / static_cast<double>(width));
    return static_cast<float>(std::sqrt(sum_pieces(width, [&](int64_t start, int64_t count) {
        float centred[kPiece];
#pragma omp simd
        for (int64_t d = 0; d < count; ++d) centred[d] = row[start + d] - mean;
        return sum_of_squares(centred, count);
    })));
}

// 4, what is measured.
void balanced_adam_scales(const BalancedScales& job) {
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t row = 0; row < job.num_rows; ++row)
        job.scales[row] = centred_norm(job.gradient + row * job.width, job.width);
    double sum = 0;
    for (int64_t row = 0; row < job.num_rows; ++row) sum += job.scales[row];
    const auto mean = static_cast<float>(sum / static_cast<double>(job.num_rows));
    for (int64_t row = 0; row < job.num_rows; ++row) {
        float scale = job.scales[row] / mean;
        if (std::isnan(scale)) scale = 1;  // 0 / 0 where nothing deviates
        scale *= job.cluster_scale;
        scale = scale < 1 / job.limit ? 1 / job.limit : scale;
        job.scales[row] = scale > job.limit ? job.limit : scale;
    }
}

// 3 and 5 for one row. Where flips are counted, this gradient's are entered first.
template <bool kCounts, bool kFactors>
void move_row(const BalancedMove& move, int64_t row, float bound) {
    const int64_t width = move.width, start = row * width;
    const float* __restrict g = move.gradient + start;
    const float* __restrict first = move.first + start;
    const float* __restrict second = move.second + start;
    const float* __restrict factors = kFactors ? move.factors + start : nullptr;
    int8_t* __restrict last_sign = kCounts ? move.last_sign + start : nullptr;
    int8_t* __restrict num_flips = kCounts ? move.num_flips + start : nullptr;
    float* __restrict w = move.weights + start;
    const float least_root = move.holds ? 0 : std::sqrt(bound), least_second = move.holds ? bound : 0;
    const float root_of_scale = std::sqrt(move.scales ? move.scale * move.scales[row] : move.scale);
    const float rate = move.rate, eps = move.eps;
    const int most_flips = move.most_flips;
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) {
        const float v = kFactors ? second[d] * factors[d] : second[d];
        float root = std::sqrt(v);
        root = root < least_root ? least_root : root;                   // 3; a NaN stays one
        float m = first[d] * static_cast<float>(v >= least_second);
        if (kCounts) {
            const int sign = (g[d] > 0) - (g[d] < 0), last = last_sign[d];
            const int flips = num_flips[d] + (sign * last < 0);
            last_sign[d] = static_cast<int8_t>(sign ? sign : last);
            num_flips[d] = static_cast<int8_t>(flips);
            m *= static_cast<float>(flips <= most_flips);
        }
        w[d] -= rate * m / (root * root_of_scale + eps);                // 5
    }
}

// 3 and 5.
void balanced_adam_move(const BalancedMove& move) {
    float bound = 0;
    if (move.threshold > 0) {
#pragma omp parallel for num_threads(move.threads) schedule(static)
        for (int64_t row = 0; row < move.num_rows; ++row)
            move.row_sums[row] = long_sum(move.second + row * move.width, move.width);
        double sum = 0;
        for (int64_t row = 0; row < move.num_rows; ++row) sum += move.row_sums[row];
        bound = move.threshold * static_cast<float>(sum / static_cast<double>(move.num_rows * move.width));
    }
    const auto move_this = !move.num_flips ? move_row<false, false>
                           : move.factors  ? move_row<true, true>
                                           : move_row<true, false>;
#pragma omp parallel for num_threads(move.threads) schedule(static)
    for (int64_t row = 0; row < move.num_rows; ++row) move_this(move, row, bound);
}

}  // namespace recsys::RECSYS_VARIANT
