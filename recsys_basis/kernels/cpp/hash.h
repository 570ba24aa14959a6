// The hash of all maps and random bits. Static: each instruction set that includes it has a copy of its own.
#pragma once

#include <cstdint>

namespace recsys {

// MurmurHash3's 64-bit finaliser.
static inline uint64_t mix64(uint64_t value) {
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD;
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53;
    return value ^ value >> 33;
}

}  // namespace recsys
