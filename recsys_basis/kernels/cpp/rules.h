// Rules whose rows share no state: one struct each, with the step numbers of its file in recsys_basis/row_optimizers.
//
// prefetch(row) fetches the state of a row to come. apply(u, row, g, w) is one update of row number u of the
// batch: g [D] its summed gradient, w [D] its weights.
#pragma once

#include <cmath>

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

// Each row is one thread's alone, so the result does not depend on the threads.
template <class Rule>
void update_rows(const Update& update, const Rule& rule) {
    constexpr int64_t kAhead = 16;   // rows between a prefetch and its use
    constexpr int64_t kBlock = 256;  // rows
    const int64_t width = update.width;
#pragma omp parallel for num_threads(update.threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < update.num_rows; block += kBlock) {
        const int64_t last = block + kBlock < update.num_rows ? block + kBlock : update.num_rows;
        for (int64_t u = block; u < last; ++u) {
            const Bunch bunch = bunch_ahead(u, kAhead, update.num_rows);
            for (int64_t next = bunch.first; next < bunch.last; ++next) prefetch_line(weights_of(update, next));
            for (int64_t next = bunch.first; next < bunch.last; ++next) {
                prefetch_row(update.gradients[next], width);
                prefetch_row(weights_of(update, next), width);
                rule.prefetch(update.rows[next]);
            }
            rule.apply(u, update.rows[u], update.gradients[u], weights_of(update, u));
        }
    }
}

// w <- (1 - eta lambda) w - scale g
inline void step(float* __restrict w, const float* __restrict g, float scale, float keep, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) w[d] = keep * w[d] - scale * g[d];
}

struct Sgd {
    int64_t width;
    float eta, keep;

    RECSYS_PREFETCH void prefetch(int64_t) const {}
    void apply(int64_t, int64_t, const float* g, float* w) const { step(w, g, eta, keep, width); }  // 1
};

struct RowwiseAdagrad {
    int64_t width;
    float eta, keep;
    float* squares;  // G [R]
    float eps;

    RECSYS_PREFETCH void prefetch(int64_t row) const { prefetch_line(squares + row); }
    void apply(int64_t, int64_t row, const float* g, float* w) const {
        const float sum = squares[row] += mean_of_squares(g, width);  // 1
        step(w, g, eta / (std::sqrt(sum) + eps), keep, width);        // 2
    }
};

struct Adagrad {
    int64_t width;
    float eta, keep;
    float* squares;  // G [R, D]
    float eps;

    RECSYS_PREFETCH void prefetch(int64_t row) const { prefetch_row(squares + row * width, width); }
    void apply(int64_t, int64_t row, const float* __restrict g, float* __restrict w) const {
        float* __restrict sums = squares + row * width;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) {
            const float sum = sums[d] + g[d] * g[d];
            sums[d] = sum;                                                  // 1
            w[d] = keep * w[d] - eta * g[d] / (std::sqrt(sum) + eps);       // 2
        }
    }
};

struct Sm3Rows {
    int64_t width;
    float eta, keep;
    float* maxima;  // mu [R]
    float eps;

    RECSYS_PREFETCH void prefetch(int64_t row) const { prefetch_line(maxima + row); }
    void apply(int64_t, int64_t row, const float* __restrict g, float* __restrict w) const {
        const float bound = maxima[row];
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t d = 0; d < width; ++d) {
            const float sum = bound + g[d] * g[d];                     // 1
            largest = sum > largest ? sum : largest;                   // 2
            w[d] = keep * w[d] - eta * g[d] / (std::sqrt(sum) + eps);  // 3
        }
        maxima[row] = largest;
    }
};

struct Adam {
    int64_t width;
    float eta, keep;
    AdamState state;  // step 1 is the caller's

    RECSYS_PREFETCH void prefetch(int64_t row) const {
        prefetch_row(state.first + row * width, width);
        prefetch_row(state.second + row * width, width);
    }
    void apply(int64_t u, int64_t row, const float* __restrict g, float* __restrict w) const {
        float* __restrict m = state.first + row * width;
        float* __restrict v = state.second + row * width;
        const float amount1 = state.amount1, amount2 = state.amount2, eps = state.eps;
        const float rate = eta * (std::sqrt(state.correction2[u]) / state.correction1[u]);
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) {
            m[d] = lerp(m[d], g[d], amount1);                            // 2
            v[d] = lerp(v[d], g[d] * g[d], amount2);                     // 3
            w[d] = keep * w[d] - rate * m[d] / (std::sqrt(v[d]) + eps);  // 4
        }
    }
};

struct PartialRowwiseAdam {
    int64_t width;
    float eta, keep;
    AdamState state;  // step 1 is the caller's

    RECSYS_PREFETCH void prefetch(int64_t row) const {
        prefetch_row(state.first + row * width, width);
        prefetch_line(state.second + row);
    }
    void apply(int64_t u, int64_t row, const float* __restrict g, float* __restrict w) const {
        float* __restrict m = state.first + row * width;
        float& v = state.second[row];
        v = lerp(v, mean_of_squares(g, width), state.amount2);  // 3
        const float rate = eta / state.correction1[u] / (std::sqrt(v / state.correction2[u]) + state.eps);
        const float amount1 = state.amount1;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) {
            m[d] = lerp(m[d], g[d], amount1);  // 2
            w[d] = keep * w[d] - rate * m[d];  // 4
        }
    }
};

}  // namespace recsys::RECSYS_VARIANT
