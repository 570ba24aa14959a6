// BASIS: the steps of recsys_basis/row_optimizers/basis/spec.py in their order, with their numbers.
//
// A touched bucket and its rows are one thread's alone. With two buckets a row (hash=double) the steps become
// three passes, over rows, buckets, rows.
#pragma once

#include <cmath>

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

inline float correction(const Corrections& corrections, int32_t updates) {
    if (updates < corrections.size) return corrections.table[updates];
    if (corrections.table[corrections.size - 1] == 1) return 1;
    return static_cast<float>(1 - std::pow(corrections.beta, updates));
}

template <class WidthType>
class BasisPass {
public:
    BasisPass(const Update& update, const Basis& basis, WidthType width, int thread)
        : update_(update), basis_(basis), width_(width) {
        inverse_root_ = basis.scratch + thread * 3 * width_;
        mean_ = inverse_root_ + width_;
        direction_ = mean_ + width_;
    }

    // Steps 1 to 6 for one bucket row and its rows; no row has a second bucket.
    void bucket(int64_t group) const {
        const Entry* begin = basis_.entries + basis_.starts[group];
        const Entry* end = basis_.entries + basis_.starts[group + 1];
        const bool is_plain = basis_.direction == Direction::gradient && !basis_.first_of_all;
        if (is_plain && end == begin + 1) return lone_row(*begin);
        if (basis_.scalar == Scalar::hypergradient) step_1_of_bucket(begin, end);
        steps_2_and_3(begin, end);
        const float mean_second = root_of_second(begin->key, begin->key);
        for (const Entry* entry = begin; entry < end; ++entry) steps_4_to_6(entry->position, mean_second);
    }

    RECSYS_PREFETCH void prefetch(const Bunch& bunch) const {
        const Entry* entries = basis_.entries;
        for (int64_t i = bunch.first; i < bunch.last; ++i) prefetch_line(weights_of(update_, entries[i].position));
        for (int64_t i = bunch.first; i < bunch.last; ++i) prefetch(entries[i]);
    }

    RECSYS_PREFETCH void prefetch(const Entry& entry) const {
        const int64_t row = update_.rows[entry.position];
        prefetch_row(update_.gradients[entry.position], width_);
        prefetch_row(weights_of(update_, entry.position), width_);
        prefetch_row(basis_.second + entry.key * width_, width_);
        prefetch_line(basis_.updates + entry.key);
        if (basis_.row_scalar) prefetch_line(basis_.row_scalar + row);
        if (basis_.first_of_all) prefetch_row(basis_.first + entry.key * width_, width_);
    }

    // Steps 2 to 6 without M for a bucket row that one row touches, the commonest case: the mean is that row's.
    void lone_row(const Entry& entry) const {
        const int64_t u = entry.position, row = update_.rows[u];
        const auto bucket = static_cast<int64_t>(entry.key);
        const float* __restrict g = gradient(u);
        float* __restrict v = basis_.second + bucket * width_;
        float* __restrict w = weights_of(update_, u);
        float* __restrict corrected = mean_;
        ++basis_.updates[bucket];
        const float scale = 1 / correction2(bucket), amount = basis_.amount2;
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) {
            v[d] = lerp(v[d], g[d] * g[d], amount);  // 2, 3
            corrected[d] = scale * v[d];
        }
        const float scalar = step_4(u, row, sum(corrected, width_) / static_cast<float>(width_));
        const float rate = update_.learning_rate * scalar, keep = update_.keep, eps = basis_.eps;
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) w[d] = keep * w[d] - rate * g[d] / (std::sqrt(corrected[d]) + eps);  // 6
    }

    // 1. Hypergradient of row u: s.
    void step_1(int64_t u) const {
        const RowBucket& where = basis_.buckets[u];
        root_of_second(where.first, where.second);
        step_1_with_root(u);
    }

    // 2 and 3. Means over the rows of one bucket, then its moments; direction_ is scratch.
    void steps_2_and_3(const Entry* begin, const Entry* end) const {
        const auto bucket = static_cast<int64_t>(begin->key);
        const float share = 1.0f / static_cast<float>(end - begin);
        float* __restrict mean = mean_;
        const float* __restrict g = gradient(begin->position);
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) mean[d] = g[d] * g[d];
        for (const Entry* entry = begin + 1; entry < end; ++entry) {
            const float* __restrict g = gradient(entry->position);
#pragma omp simd
            for (int64_t d = 0; d < width_; ++d) mean[d] += g[d] * g[d];
        }
        move_average(basis_.second + bucket * width_, mean, share, basis_.amount2);
        if (basis_.first_of_all) {
            set_to_zero(mean);
            for (const Entry* entry = begin; entry < end; ++entry)
                add_scaled(mean, gradient(entry->position), basis_.buckets[entry->position].sign, width_);
            move_average(basis_.first + bucket * width_, mean, share, basis_.amount1);
        }
        ++basis_.updates[bucket];
    }

    // 1 / (sqrt(V^) + eps) of a row with these two bucket rows (or one, twice) to inverse_root_; returns mean_d V^.
    float root_of_second(int64_t left, int64_t right) const {
        const float* __restrict a = basis_.second + left * width_;
        const float* __restrict b = basis_.second + right * width_;
        const float scale_a = 1 / correction2(left), eps = basis_.eps;
        float* __restrict corrected = mean_;
        float* __restrict inverse = inverse_root_;
        if (left == right) {
            set_scaled(corrected, a, scale_a, width_);
        } else {
            const float scale_b = 1 / correction2(right);
#pragma omp simd
            for (int64_t d = 0; d < width_; ++d) {
                const float one = scale_a * a[d], other = scale_b * b[d];
                corrected[d] = one < other ? one : other;
            }
        }
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) inverse[d] = 1.0f / (std::sqrt(corrected[d]) + eps);
        return sum(corrected, width_) / static_cast<float>(width_);
    }

    // 4 to 6 for row u, with its inverse_root_ and mean_d V^.
    void steps_4_to_6(int64_t u, float mean_second) const {
        const int64_t row = update_.rows[u];
        const float scalar = step_4(u, row, mean_second);
        const float* __restrict direction = step_5(u);
        const float rate = update_.learning_rate * scalar, keep = update_.keep;
        const float* __restrict inverse = inverse_root_;
        float* __restrict w = weights_of(update_, u);
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) w[d] = keep * w[d] - rate * direction[d] * inverse[d];  // 6
    }

private:
    const float* gradient(int64_t u) const { return update_.gradients[u]; }

    float correction1(int64_t bucket) const {
        return correction(basis_.corrections1, basis_.updates[bucket]);
    }

    float correction2(int64_t bucket) const {
        return correction(basis_.corrections2, basis_.updates[bucket]);
    }

    void set_to_zero(float* row) const {
        for (int64_t d = 0; d < width_; ++d) row[d] = 0;
    }

    // average <- average + amount * (share * sum - average)
    void move_average(float* __restrict average, const float* __restrict sum, float share, float amount) const {
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) average[d] = lerp(average[d], share * sum[d], amount);
    }

    void step_1_of_bucket(const Entry* begin, const Entry* end) const {
        root_of_second(begin->key, begin->key);
        for (const Entry* entry = begin; entry < end; ++entry) step_1_with_root(entry->position);
    }

    void step_1_with_root(int64_t u) const {
        const RowBucket& where = basis_.buckets[u];
        const float* g = gradient(u);
        float inner = 0;  // <u, g>
        if (basis_.updates[where.first] > 0 && basis_.updates[where.second] > 0) {
            float* __restrict unit = direction_;
            first_of_row(where, unit);
            for (int64_t d = 0; d < width_; ++d) unit[d] *= inverse_root_[d];
            inner = dot(unit, g, width_);
            if (basis_.normalized) {
                const float norms = std::sqrt(sum_of_squares(unit, width_)) * std::sqrt(sum_of_squares(g, width_));
                inner = norms > 0 ? inner / norms : 0;
            }
        }
        const int64_t updates = basis_.by_updates ? basis_.updates[where.first] : 1;
        const int64_t frequency = basis_.row_counts ? basis_.row_counts[u] : updates;
        if (frequency > 1) inner /= static_cast<float>(frequency);
        const float change = basis_.hypergradient_rate * update_.learning_rate * update_.learning_rate * inner;
        float& s = basis_.row_scalar[update_.rows[u]];
        s = basis_.log_form ? s * std::exp(change) : s + change;
        if (s < basis_.scalar_min) s = basis_.scalar_min;
        if (s > basis_.scalar_max) s = basis_.scalar_max;
    }

    // sign(i) M^ of a row; of two buckets the mean.
    void first_of_row(const RowBucket& where, float* __restrict target) const {
        const float scale = where.sign / correction1(where.first);
        set_scaled(target, basis_.first + where.first * width_, scale, width_);
        if (where.second == where.first) return;
        const float other = where.sign / correction1(where.second);
        const float* __restrict second = basis_.first + where.second * width_;
#pragma omp simd
        for (int64_t d = 0; d < width_; ++d) target[d] = (target[d] + other * second[d]) * 0.5f;
    }

    // 4. The row's scalar.
    float step_4(int64_t u, int64_t row, float mean_second) const {
        if (basis_.scalar == Scalar::none) return 1;
        if (basis_.scalar == Scalar::hypergradient) return basis_.row_scalar[row];
        const float now = mean_of_squares(gradient(u), width_), decay = basis_.energy_decay;
        float& energy = basis_.row_scalar[row];
        const bool is_new = energy == 0;
        if (is_new && !basis_.energy_start_first) energy = basis_.energy_prior * mean_second;
        if (is_new && basis_.energy_start_first)
            energy = now;
        else
            energy = decay == 1 ? energy + now : decay * energy + basis_.energy_amount * now;
        const float corrected = basis_.energy_correction ? energy / basis_.energy_correction[u] : energy;
        // Two roots, not the root of a quotient: that may leave float32's range where s itself is sound.
        return energy > 0 ? std::sqrt(mean_second) / std::sqrt(corrected) : 0;
    }

    // 5. The row's direction.
    const float* step_5(int64_t u) const {
        const RowBucket& where = basis_.buckets[u];
        const bool is_private = where.private_row >= 0;
        if (basis_.direction == Direction::gradient) return gradient(u);
        if (basis_.direction == Direction::head_momentum && !is_private) return gradient(u);
        if (basis_.first_of_all) {
            first_of_row(where, direction_);
            return direction_;
        }
        // Steps 2 and 3 for M: a private bucket has one row, whose gradient is the mean.
        float* m = basis_.first + where.private_row * width_;
        move_average(m, gradient(u), 1.0f, basis_.amount1);
        set_scaled(direction_, m, 1.0f / correction1(where.first), width_);
        return direction_;
    }

    const Update& update_;
    const Basis& basis_;
    const WidthType width_;
    float *inverse_root_, *mean_, *direction_;
};

constexpr int64_t kBasisBlock = 128;  // buckets or rows that a thread takes at a time

template <class WidthType>
void update_buckets(const Update& update, const Basis& job, WidthType width) {
    constexpr int64_t kAhead = 12;  // rows between a prefetch and its use
    const int64_t num_entries = job.starts[job.num_touched];
#pragma omp parallel for num_threads(update.threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < job.num_touched; block += kBasisBlock) {
        const BasisPass<WidthType> pass(update, job, width, thread_number());
        const int64_t last = block + kBasisBlock < job.num_touched ? block + kBasisBlock : job.num_touched;
        for (int64_t group = block; group < last; ++group) {
            for (int64_t entry = job.starts[group]; entry < job.starts[group + 1]; ++entry)
                pass.prefetch(bunch_ahead(entry, kAhead, num_entries));
            pass.bucket(group);
        }
    }
}

void basis(const Update& update, const Basis& job) {
    with_width(update.width, [&](auto width) { update_buckets(update, job, width); });
}

void basis_two_buckets(const Update& update, const Basis& job) {
    if (job.scalar == Scalar::hypergradient) {
#pragma omp parallel for num_threads(update.threads) schedule(static, kBasisBlock)
        for (int64_t u = 0; u < update.num_rows; ++u) BasisPass<Width<0>>(update, job, {update.width}, thread_number()).step_1(u);
    }
#pragma omp parallel for num_threads(update.threads) schedule(static, kBasisBlock)
    for (int64_t group = 0; group < job.num_touched; ++group) {
        const BasisPass<Width<0>> pass(update, job, {update.width}, thread_number());
        pass.steps_2_and_3(job.entries + job.starts[group], job.entries + job.starts[group + 1]);
    }
#pragma omp parallel for num_threads(update.threads) schedule(static, kBasisBlock)
    for (int64_t u = 0; u < update.num_rows; ++u) {
        const BasisPass<Width<0>> pass(update, job, {update.width}, thread_number());
        pass.steps_4_to_6(u, pass.root_of_second(job.buckets[u].first, job.buckets[u].second));
    }
}

}  // namespace recsys::RECSYS_VARIANT
