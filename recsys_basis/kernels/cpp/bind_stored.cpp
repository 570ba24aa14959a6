// Bindings of what reads and writes some rows of a tensor as float32.
#include <algorithm>

#include "module.h"

namespace recsys {
namespace {

using Numbers = Array<const int64_t, 1>;

KeyedRows make_rows(const StoredTensor& stored, const Numbers& keys, const Array<float, 2>& values, int threads) {
    const auto count = static_cast<int64_t>(keys.size());
    require(static_cast<int64_t>(values.shape(0)) == count && static_cast<int64_t>(values.shape(1)) == stored.width(),
            "values: must be [keys, width of the tensor]");
    require(std::all_of(keys.data(), keys.data() + count, [&](int64_t key) { return key >= 0 && key < stored.size(); }),
            "keys: out of range");
    return {keys.data(), values.data(), count, threads};
}

void read_rows(const nb::object& stored, const Numbers& keys, const Array<float, 2>& values, int threads) {
    const StoredTensor tensor(stored);
    const KeyedRows rows = make_rows(tensor, keys, values, threads);
    const Stored source = tensor.stored();
    const nb::gil_scoped_release released;
    kernels().read_rows(source, rows);
}

// The keys must be distinct.
void write_rows(const nb::object& stored, const Numbers& keys, const Array<float, 2>& values, const Numbers& updates,
                int threads) {
    const StoredTensor tensor(stored);
    const KeyedRows rows = make_rows(tensor, keys, values, threads);
    require(updates.size() == keys.size(), "updates: needs one number a key");
    const Stored target = tensor.stored();
    const nb::gil_scoped_release released;
    kernels().write_rows(target, rows, updates.data());
}

}  // namespace

void bind_stored(nb::module_& module) {
    using namespace nb::literals;
    module.def("read_rows", read_rows, "stored"_a, "keys"_a, "values"_out, "threads"_a);
    module.def("write_rows", write_rows, "stored"_a, "keys"_a, "values"_out, "updates"_a, "threads"_a);
}

}  // namespace recsys
