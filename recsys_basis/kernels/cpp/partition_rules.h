// Rules that keep state for a virtual partition: the step numbers are those of recsys_basis/row_optimizers.
//
// apply(partition, begin, end, thread) is one update of all rows of the batch that lie in the partition, numbers
// begin..end. They are one thread's alone, so what their sums come to does not depend on the threads.
#pragma once

#include <cmath>

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

template <class Rule>
void update_partitions(const Update& update, const Runs& runs, const Rule& rule) {
#pragma omp parallel for num_threads(update.threads) schedule(dynamic, 1)
    for (int64_t run = 0; run < runs.count; ++run)
        rule.apply(runs.partitions[run], runs.starts[run], runs.starts[run + 1], thread_number());
}

// Fetch the weights of a row to come.
RECSYS_PREFETCH void prefetch_weights(const Update& update, int64_t u) {
    constexpr int64_t kAhead = 16;  // rows between a prefetch and its use
    if (u + kAhead < update.num_rows)
        prefetch_row(weights_of(update, u + kAhead), update.width);
}

struct Sm3RowsAndColumns {
    const Update& update;
    Sm3State state;

    void apply(int64_t partition, int64_t begin, int64_t end, int thread) const {
        const int64_t width = update.width;
        const float eta = update.learning_rate, keep = update.keep, eps = state.eps;
        float* __restrict columns = state.columns + partition * width;
        float* __restrict before = state.scratch + thread * width;
        for (int64_t d = 0; d < width; ++d) before[d] = columns[d];
        for (int64_t u = begin; u < end; ++u) {
            prefetch_weights(update, u);
            const float* __restrict g = update.gradients[u];
            float* __restrict w = weights_of(update, u);
            float& maximum = state.rows[update.rows[u]];
            const float bound = maximum;
            float largest = 0;
#pragma omp simd reduction(max : largest)
            for (int64_t d = 0; d < width; ++d) {
                const float sum = (bound < before[d] ? bound : before[d]) + g[d] * g[d];  // 1
                largest = sum > largest ? sum : largest;                                  // 2
                columns[d] = sum > columns[d] ? sum : columns[d];
                w[d] = keep * w[d] - eta * g[d] / (std::sqrt(sum) + eps);  // 3
            }
            maximum = largest;
        }
    }
};

struct Adafactor {
    const Update& update;
    AdafactorState state;

    void apply(int64_t partition, int64_t begin, int64_t end, int thread) const {
        const int64_t width = update.width;
        float* __restrict shape = state.scratch + thread * 2 * width;
        float* __restrict direction = shape + width;
        for (int64_t d = 0; d < width; ++d) shape[d] = 0;
        for (int64_t u = begin; u < end; ++u) {
            const float* __restrict g = update.gradients[u];
            const float average = move(state.rows, state.row_updates, update.rows[u], mean_of_squares(g, width));
            state.inverse_roots[u] = 1 / std::sqrt(average);
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) shape[d] += g[d] * g[d];
        }
        steps_3_and_4(partition, 1 / static_cast<float>(end - begin), shape);
        double squares = 0;
        for (int64_t u = begin; u < end; ++u) {
            set_to_update(direction, u, state.inverse_roots[u], shape);
            squares += mean_of_squares(direction, width);
        }
        const auto size = static_cast<float>(std::sqrt(squares / static_cast<double>(end - begin)));
        const float excess = size / state.update_clip;
        const float rate = excess > 1 ? update.learning_rate / excess : update.learning_rate;  // 5
        for (int64_t u = begin; u < end; ++u) {
            prefetch_weights(update, u);
            float* __restrict w = weights_of(update, u);
            set_to_update(direction, u, state.inverse_roots[u], shape);
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) w[d] = update.keep * w[d] - rate * direction[d];  // 6
        }
    }

private:
    // 1 and 2 for one average of R.
    float move(float* averages, int32_t* updates, int64_t index, float square) const {
        float& average = averages[index];
        average += amount(updates, index, average) * (square + state.eps - average);
        return average;
    }

    float amount(int32_t* updates, int64_t index, float average) const {
        if (!updates) return average == 0 ? 1 : state.constant_amount;
        return static_cast<float>(std::pow(static_cast<double>(++updates[index]), -state.decay_power));
    }

    // The averages C of the partition; then, over the sums of squares, sqrt(mean_d C) / sqrt(C).
    void steps_3_and_4(int64_t partition, float share, float* __restrict shape) const {
        const int64_t width = update.width;
        float* __restrict columns = state.columns + partition * width;
        const float moved = amount(state.column_updates, partition, columns[0]), eps = state.eps;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) columns[d] += moved * (share * shape[d] + eps - columns[d]);
        const float root = std::sqrt(sum(columns, width) / static_cast<float>(width));
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) shape[d] = root / std::sqrt(columns[d]);
    }

    // In this order, since the product of the last two may leave float32's range.
    void set_to_update(float* __restrict target, int64_t u, float inverse_root, const float* __restrict shape) const {
        const float* __restrict g = update.gradients[u];
#pragma omp simd
        for (int64_t d = 0; d < update.width; ++d) target[d] = g[d] * inverse_root * shape[d];
    }
};

struct CountSketchAdam {
    const Update& update;
    CountSketchState state;  // step 1 is the caller's

    void apply(int64_t, int64_t begin, int64_t end, int) const {
        for (int64_t u = begin; u < end; ++u) step_2(u);
        for (int64_t u = begin; u < end; ++u) step_3(u);
        for (int64_t u = begin; u < end; ++u) step_4(u);
    }

private:
    // m_i and v_i of row u, in place of its moments.
    void step_2(int64_t u) const {
        const int64_t width = update.width;
        const float* __restrict g = update.gradients[u];
        float* __restrict v = second_of(u);
        read_second(u, v);
        const float amount2 = state.amount2;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) v[d] = amount2 * (g[d] * g[d] - v[d]);
        if (!state.first) return;
        float* __restrict m = first_of(u);
        read_first(u, m);
        const float amount1 = state.amount1;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) m[d] = amount1 * (g[d] - m[d]);
    }

    void step_3(int64_t u) const {
        const SketchRow& where = state.places[u];
        for (int block = 0; block < kSketchDepth; ++block) {
            const int64_t start = where.bucket[block] * update.width;
            add_scaled(state.second + start, second_of(u), 1, update.width);
            if (state.first) add_scaled(state.first + start, first_of(u), where.sign[block], update.width);
        }
    }

    void step_4(int64_t u) const {
        prefetch_weights(update, u);
        const int64_t width = update.width;
        float* __restrict w = weights_of(update, u);
        float* __restrict v = second_of(u);
        read_second(u, v);
        if (state.first) read_first(u, first_of(u));
        const float* __restrict m = state.first ? first_of(u) : update.gradients[u];
        const float rate = update.learning_rate / state.correction1[u], keep = update.keep, eps = state.eps;
        const float correction2 = state.correction2[u];
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) w[d] = keep * w[d] - rate * m[d] / (std::sqrt(v[d] / correction2) + eps);
    }

    float* second_of(int64_t u) const { return state.moments + u * 2 * update.width; }
    float* first_of(int64_t u) const { return second_of(u) + update.width; }

    // V(i): the smallest of three, at least 0.
    void read_second(int64_t u, float* __restrict target) const {
        const int64_t* bucket = state.places[u].bucket;
        const float* __restrict a = state.second + bucket[0] * update.width;
        const float* __restrict b = state.second + bucket[1] * update.width;
        const float* __restrict c = state.second + bucket[2] * update.width;
#pragma omp simd
        for (int64_t d = 0; d < update.width; ++d) target[d] = larger(0, smaller(smaller(a[d], b[d]), c[d]));
    }

    // M(i): the median of three with their signs.
    void read_first(int64_t u, float* __restrict target) const {
        const SketchRow& where = state.places[u];
        const float* __restrict a = state.first + where.bucket[0] * update.width;
        const float* __restrict b = state.first + where.bucket[1] * update.width;
        const float* __restrict c = state.first + where.bucket[2] * update.width;
#pragma omp simd
        for (int64_t d = 0; d < update.width; ++d) {
            const float x = where.sign[0] * a[d], y = where.sign[1] * b[d], z = where.sign[2] * c[d];
            target[d] = larger(smaller(x, y), smaller(larger(x, y), z));
        }
    }

    static float smaller(float left, float right) { return left < right ? left : right; }
    static float larger(float left, float right) { return left > right ? left : right; }
};

}  // namespace recsys::RECSYS_VARIANT
