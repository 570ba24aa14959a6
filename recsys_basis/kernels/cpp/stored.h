// Numbers in fewer bits, to float32 and back: recsys_basis/row_optimizers/storage.py, bit for bit.
//
// widen(kept) is the float32 that a kept number stands for; round(value, random, kept) keeps one of value's two
// neighbours, by 24 random bits.
#pragma once

#include <cmath>

#include "arrays.h"
#include "hash.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct Log8 {
    uint8_t code;
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widen(float kept) { return kept; }

inline float widen(BFloat16 kept) { return float_of(static_cast<uint32_t>(kept.bits) << 16); }

inline float widen(Float16 kept) {
    // The exponent's bias is 15, float32's is 127; infinity and NaN have an exponent of all ones in both.
    const uint32_t magnitude = (kept.bits & 0x7FFFu) << 13;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t widened = magnitude < 0x0F800000u ? finite : magnitude | 0x7F800000u;
    return float_of(widened | (kept.bits & 0x8000u) << 16);
}

inline float widen(Log8 kept) {
    constexpr float kRoots[] = {1, 1.2599210498948732f, 1.5874010519681994f};  // 2^(1/3), 2^(2/3)
    return kept.code == 0 ? 0 : kRoots[kept.code % 3] * float_of((127u - 64 + kept.code / 3) << 23);
}

inline void round(float value, uint32_t, float& kept) { kept = value; }

inline void round(float value, uint32_t random, BFloat16& kept) {
    kept.bits = static_cast<uint16_t>((bits_of(value) + (random & 0xFFFFu)) >> 16);
}

inline void round(float value, uint32_t random, Float16& kept) {
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u, magnitude = bits_of(value) & 0x7FFFFFFFu;
    constexpr uint32_t kLargest = 0x477FE000;  // 65504
    uint32_t rounded = magnitude + (random & 0x1FFFu);
    rounded = rounded < kLargest ? rounded : kLargest;
    const uint32_t normal = sign | ((rounded >> 13) - (112u << 10));
    // Numbers below 2^-14 lie 2^-24 apart.
    const bool is_small = magnitude < 0x38800000u;
    const double in_steps = static_cast<double>(is_small ? value : 0) * 0x1p24 + random * 0x1p-24;
    const auto steps = static_cast<int32_t>(std::floor(in_steps));
    const uint32_t small = steps < 0 ? 0x8000u | static_cast<uint32_t>(-steps) : static_cast<uint32_t>(steps);
    kept.bits = static_cast<uint16_t>(is_small ? small : normal);
}

inline void round(float value, uint32_t random, Log8& kept) {
    const auto value_of = [](int code) { return widen(Log8{static_cast<uint8_t>(code)}); };
    int lower = 0, upper = 255;  // what upper stands for is above value, unless upper is the last
    while (upper - lower > 1) {
        const int middle = (lower + upper) / 2;
        (value_of(middle) <= value ? lower : upper) = middle;
    }
    const double below = value_of(lower), share = (value - below) / (value_of(upper) - below);
    kept.code = static_cast<uint8_t>(random * 0x1p-24 < share ? upper : lower);
}

// Call body with a pointer of the type that `storage` says.
template <class Body>
void with_elements(void* data, Storage storage, const Body& body) {
    switch (storage) {
        case Storage::float32: return body(static_cast<float*>(data));
        case Storage::bfloat16: return body(static_cast<BFloat16*>(data));
        case Storage::float16: return body(static_cast<Float16*>(data));
        case Storage::log8: return body(static_cast<Log8*>(data));
    }
}

// As those of rows.h, for rows that are kept in fewer bits.
template <class Element>
RECSYS_PREFETCH void prefetch_row(const Element* row, int64_t width) {
    constexpr int64_t kPerLine = 64 / sizeof(Element);
    for (int64_t d = 0; d < width; d += kPerLine) __builtin_prefetch(row + d);
    if (reinterpret_cast<uintptr_t>(row) % 64) __builtin_prefetch(row + width - 1);
}

template <class Element>
void add_scaled(float* __restrict target, const Element* __restrict row, float scale, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) target[d] += scale * widen(row[d]);
}

template <class Element>
void set_scaled(float* __restrict target, const Element* __restrict row, float scale, int64_t width) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) target[d] = scale * widen(row[d]);
}

void read_rows(const Stored& stored, const KeyedRows& rows) {
    const int64_t width = stored.width;
    with_elements(stored.data, stored.storage, [&](const auto* data) {
#pragma omp parallel for num_threads(rows.threads) schedule(static)
        for (int64_t u = 0; u < rows.count; ++u) {
            const auto* __restrict row = data + rows.keys[u] * width;
            float* __restrict values = rows.values + u * width;
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) values[d] = widen(row[d]);
        }
    });
}

// The partition of a key: the last one that starts at or before it.
inline int64_t partition_of(const Stored& stored, int64_t key) {
    int64_t partition = 0, beyond = stored.num_partitions;
    while (beyond - partition > 1) {
        const int64_t middle = (partition + beyond) / 2;
        (stored.starts[middle] <= key ? partition : beyond) = middle;
    }
    return partition;
}

void write_rows(const Stored& stored, const KeyedRows& rows, const int64_t* updates) {
    const int64_t width = stored.width;
    with_elements(stored.data, stored.storage, [&](auto* data) {
#pragma omp parallel for num_threads(rows.threads) schedule(static)
        for (int64_t u = 0; u < rows.count; ++u) {
            const int64_t key = rows.keys[u], partition = partition_of(stored, key);
            const auto place = static_cast<uint64_t>(key - stored.starts[partition]);
            const uint64_t of_place = mix64(place ^ stored.seeds[partition]) ^ updates[u];
            const uint64_t of_key = mix64(of_place) + stored.first_columns[partition];
            auto* __restrict row = data + key * width;
            const float* __restrict values = rows.values + u * width;
#pragma omp simd
            for (int64_t d = 0; d < width; ++d)
                round(values[d], static_cast<uint32_t>(mix64(of_key + d) & 0xFFFFFF), row[d]);
        }
    });
}

}  // namespace recsys::RECSYS_VARIANT
