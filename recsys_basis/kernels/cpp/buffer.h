// Uninitialised memory that frees itself: scratch is written before it is read.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace recsys {

template <class T>
struct Buffer {
    // A row that starts with a cache line touches one line less.
    static constexpr std::align_val_t kLine{64};
    struct Free {
        void operator()(T* memory) const { operator delete(memory, kLine); }
    };

    int64_t size = 0;
    std::unique_ptr<T[], Free> memory;

    Buffer() = default;
    explicit Buffer(int64_t count)
        : size(count), memory(static_cast<T*>(operator new(count * sizeof(T), kLine))) {}

    T* data() { return memory.get(); }
    const T* data() const { return memory.get(); }
    T& operator[](int64_t index) { return memory[index]; }
    const T& operator[](int64_t index) const { return memory[index]; }
};

}  // namespace recsys
