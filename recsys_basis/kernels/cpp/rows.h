// Loops over one row of D numbers, and the prefetch of rows to come. Included by variant.cpp only.
#pragma once

#include <cstdint>

namespace recsys::RECSYS_VARIANT {

// Fetch a row before it is needed: a random row costs a trip to memory, and many trips fit in one.
template <bool for_write = false>
inline void prefetch_row(const float* row, int64_t width) {
    for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(row + d, for_write);
    __builtin_prefetch(row + width - 1, for_write);  // rows need not start with a cache line
}

inline float sum_of_squares(const float* row, int64_t width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) sum += row[d] * row[d];
    return sum;
}

inline float mean_of_squares(const float* row, int64_t width) {
    return sum_of_squares(row, width) / static_cast<float>(width);
}

inline float dot(const float* left, const float* right, int64_t width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) sum += left[d] * right[d];
    return sum;
}

inline void add_scaled(float* __restrict target, const float* __restrict row, float scale, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) target[d] += scale * row[d];
}

inline void set_scaled(float* __restrict target, const float* __restrict row, float scale, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) target[d] = scale * row[d];
}

// Start + amount * (end - start), as torch.lerp for amounts below a half; the other formula from there on.
inline float lerp(float start, float end, float amount) {
    return amount < 0.5f ? start + amount * (end - start) : end - (end - start) * (1.0f - amount);
}

}  // namespace recsys::RECSYS_VARIANT
