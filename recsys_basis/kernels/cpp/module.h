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

// Names an array that is written, or too large to copy. It is taken as it is or refused by a TypeError: nanobind
// would convert another type or layout into a copy, and what is written there would be lost.
inline auto operator""_out(const char* name, size_t) { return nb::arg(name).noconvert(); }

// Raises ValueError with `message` unless `holds`.
inline void require(bool holds, const char* message) {
    if (!holds) throw nb::value_error(message);
}

// Of any type that storage_of knows.
using AnyMatrix = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// How a tensor of this type keeps its numbers. Raises TypeError for a type that nothing is kept in.
inline Storage storage_of(nb::dlpack::dtype type) {
    const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
    if (code == nb::dlpack::dtype_code::Float && type.bits == 32) return Storage::float32;
    if (code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return Storage::bfloat16;
    if (code == nb::dlpack::dtype_code::Float && type.bits == 16) return Storage::float16;
    if (code == nb::dlpack::dtype_code::UInt && type.bits == 8) return Storage::log8;
    throw nb::type_error("a tensor must be float32, bfloat16, float16, or uint8 for log8");
}

// A ``Stored`` of storage.py, and the arrays that keep its memory.
class StoredTensor {
public:
    explicit StoredTensor(const nb::object& stored)
        : tensor_(attribute<AnyArray>(stored, "tensor")),
          starts_(attribute<Numbers>(stored, "starts")),
          seeds_(attribute<Numbers>(stored, "seeds")),
          first_columns_(attribute<Numbers>(stored, "first_columns")) {
        require(tensor_.ndim() == 1 || tensor_.ndim() == 2, "tensor: must be [n] or [n, width]");
        require(starts_.size() > 0 && seeds_.size() == starts_.size() && first_columns_.size() == starts_.size(),
                "starts, seeds, first_columns: need one number a partition");
    }

    int64_t size() const { return static_cast<int64_t>(tensor_.shape(0)); }
    int64_t width() const { return tensor_.ndim() == 2 ? static_cast<int64_t>(tensor_.shape(1)) : 1; }
    Stored stored() const {
        return {tensor_.data(), storage_of(tensor_.dtype()), width(), starts_.data(), seeds_.data(),
                first_columns_.data(), static_cast<int64_t>(starts_.size())};
    }

private:
    using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
    using Numbers = Array<const int64_t, 1>;

    template <class T>
    static T attribute(const nb::object& stored, const char* name) {
        return nb::cast<T>(stored.attr(name), false);  // not converted: a copy would be written in vain
    }

    AnyArray tensor_;
    Numbers starts_, seeds_, first_columns_;
};

// The kernels compiled for the best instruction set that this machine has, and that set's name.
const Kernels& kernels();
const char* instruction_set();

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
void bind_basis(nb::module_& module);
void bind_dense(nb::module_& module);
void bind_stored(nb::module_& module);

}  // namespace recsys
