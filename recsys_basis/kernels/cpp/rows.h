// Loops over one row of D numbers, and the prefetch of rows to come. Included by variant.cpp only.
#pragma once

#include <cstdint>

#include "arrays.h"

namespace recsys::RECSYS_VARIANT {

// A width known when the kernels are compiled, or 0 and a number: loops over a known one are unrolled whole.
template <int64_t kKnown>
struct Width {
    int64_t number;
    constexpr operator int64_t() const { return kKnown ? kKnown : number; }
};

// Call body with the width, known where it is a usual one.
template <class Body>
void with_width(int64_t width, const Body& body) {
    switch (width) {
        case 16: return body(Width<16>{width});
        case 32: return body(Width<32>{width});
        case 64: return body(Width<64>{width});
        case 128: return body(Width<128>{width});
        default: return body(Width<0>{width});
    }
}

// For functions that only prefetch: where GCC does not inline one, it drops the call as having no effect.
#define RECSYS_PREFETCH [[gnu::always_inline]] inline

// Fetch the cache line of a number before it is needed: a random one costs a trip to memory, and many trips fit in
// one. Into the second cache: more trips at once are under way to it than to the first.
RECSYS_PREFETCH void prefetch_line(const void* number) {
    constexpr int kSecondCache = 2;  // GCC's number for it
    __builtin_prefetch(number, 0, kSecondCache);
}

RECSYS_PREFETCH void prefetch_row(const float* row, int64_t width) {
    for (int64_t d = 0; d < width; d += 16) prefetch_line(row + d);
    // Rows need not start with a cache line.
    if (reinterpret_cast<uintptr_t>(row) % 64) prefetch_line(row + width - 1);
}

// Numbers first..last - 1 of a loop.
struct Bunch {
    int64_t first, last;
};

// What to prefetch before `item` of a loop that ends at `end`: at every kBunch-th one the kBunch that lie `ahead`,
// else none. A row of a large table costs a walk of page tables, too, which holds up the arithmetic behind it; of
// rows that are touched one right after another these overlap.
inline Bunch bunch_ahead(int64_t item, int64_t ahead, int64_t end) {
    constexpr int64_t kBunch = 16;
    if (item % kBunch) return {end, end};
    const int64_t last = item + ahead + kBunch;
    return {item + ahead, last < end ? last : end};
}

// The weights [D] of row number u of a batch.
inline float* weights_of(const Update& update, int64_t u) {
    return update.weights + (update.weight_rows ? update.weight_rows[u] : u) * update.width;
}

// 16 numbers side by side: sums over a row add in the same order on every instruction set and at every address.
using Lanes = float __attribute__((vector_size(64)));

inline Lanes load_lanes(const float* row) {
    Lanes lanes;
    __builtin_memcpy(&lanes, row, sizeof lanes);
    return lanes;
}

// The last, incomplete lanes of a row; zero beyond it.
inline Lanes load_some_lanes(const float* row, int64_t count) {
    Lanes lanes{};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = row[lane];
    return lanes;
}

inline float sum_lanes(Lanes lanes) {
    using Eight = float __attribute__((vector_size(32)));
    using Four = float __attribute__((vector_size(16)));
    Eight eights[2];
    __builtin_memcpy(eights, &lanes, sizeof lanes);
    const Eight eight = eights[0] + eights[1];
    Four fours[2];
    __builtin_memcpy(fours, &eight, sizeof eight);
    const Four four = fours[0] + fours[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float dot(const float* left, const float* right, int64_t width) {
    Lanes sum{};
    int64_t d = 0;
    for (; d + 16 <= width; d += 16) sum += load_lanes(left + d) * load_lanes(right + d);
    if (d < width) sum += load_some_lanes(left + d, width - d) * load_some_lanes(right + d, width - d);
    return sum_lanes(sum);
}

inline float sum(const float* row, int64_t width) {
    Lanes sum{};
    int64_t d = 0;
    for (; d + 16 <= width; d += 16) sum += load_lanes(row + d);
    if (d < width) sum += load_some_lanes(row + d, width - d);
    return sum_lanes(sum);
}

inline float sum_of_squares(const float* row, int64_t width) { return dot(row, row, width); }

inline float mean_of_squares(const float* row, int64_t width) {
    return sum_of_squares(row, width) / static_cast<float>(width);
}

inline void add_scaled(float* __restrict target, const float* __restrict row, float scale, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) target[d] += scale * row[d];
}

inline void set_scaled(float* __restrict target, const float* __restrict row, float scale, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) target[d] = scale * row[d];
}

inline float lerp(float start, float end, float amount) { return start + amount * (end - start); }

}  // namespace recsys::RECSYS_VARIANT
