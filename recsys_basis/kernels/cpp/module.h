// What the binding files share: array types, checks, and the kernels of this machine.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>

#include "arrays.h"
#include "buffer.h"

namespace recsys {

namespace nb = nanobind;

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

// The kernels compiled for the best instruction set that this machine has, and that set's name.
const Kernels& kernels();
const char* instruction_set();

// Raises ValueError with `message` unless `holds`.
inline void require(bool holds, const char* message) {
    if (!holds) throw nb::value_error(message);
}

// A buffer as a tensor [rows, width], or [rows] for width 0, that owns it.
template <class T>
nb::ndarray<nb::pytorch, T> as_tensor(Buffer<T> buffer, size_t rows, size_t width) {
    auto* kept = new Buffer<T>(std::move(buffer));
    nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<Buffer<T>*>(pointer); });
    const size_t shape[] = {rows, width};
    return nb::ndarray<nb::pytorch, T>(kept->data(), width ? 2 : 1, shape, owner);
}

// Ask for huge pages under memory [start, start + num_bytes): a random row then costs no walk of page tables.
// A hint: where the system has none, nothing changes.
void advise_huge_pages(void* start, size_t num_bytes);

void bind_bags(nb::module_& module);
void bind_rules(nb::module_& module);
void bind_dense(nb::module_& module);

}  // namespace recsys
