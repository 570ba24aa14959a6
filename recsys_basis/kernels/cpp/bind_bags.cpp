// Bindings of lookup and of its backward's sums. Indices and offsets are checked here, before anything is read.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "bags.h"
#include "gradients.h"
#include "module.h"
#include "sort.h"

namespace recsys {
namespace {

template <class Index>
Bags<Index> make_bags(const Array<const Index, 1>& indices, const Array<const int64_t, 1>& offsets,
                      const std::optional<Array<const float, 1>>& per_sample_weights,
                      const Array<const int64_t, 1>& feature_starts, const Array<const int64_t, 1>& feature_sizes,
                      bool mean) {
    const auto num_features = static_cast<int64_t>(feature_starts.size());
    const auto num_bags = static_cast<int64_t>(offsets.size()) - 1;
    require(num_features > 0 && feature_sizes.size() == feature_starts.size(), "features: starts and sizes differ");
    require(num_bags >= 0 && num_bags % num_features == 0, "offsets: needs features * batch_size + 1 of them");
    require(offsets_are_sound(offsets.data(), num_bags, indices.size()),
            "offsets: must start at 0, never descend, and end at the number of indices");
    require(!per_sample_weights || per_sample_weights->size() == indices.size(),
            "per_sample_weights: needs one for each index");
    return {indices.data(),
            offsets.data(),
            per_sample_weights ? per_sample_weights->data() : nullptr,
            feature_starts.data(),
            feature_sizes.data(),
            static_cast<int64_t>(indices.size()),
            num_features,
            num_bags / num_features,
            mean};
}

// Fills pooled; returns -1, or the first item whose row is out of range, with nothing written.
template <class Index>
int64_t lookup(const AnyMatrix& weights, const Array<const Index, 1>& indices,
               const Array<const int64_t, 1>& offsets, const std::optional<Array<const float, 1>>& psw,
               const Array<const int64_t, 1>& feature_starts, const Array<const int64_t, 1>& feature_sizes,
               bool mean, const Array<float, 2>& pooled, int threads) {
    const Bags<Index> bags = make_bags(indices, offsets, psw, feature_starts, feature_sizes, mean);
    const auto width = static_cast<int64_t>(weights.shape(1));
    require(static_cast<int64_t>(pooled.shape(0)) == bags.batch_size &&
                static_cast<int64_t>(pooled.shape(1)) == bags.num_features * width,
            "pooled: must be [batch_size, features * width]");
    const Storage storage = storage_of(weights.dtype());
    const nb::gil_scoped_release released;
    const int64_t wrong = first_out_of_range(bags);
    if (wrong >= 0) return wrong;
    const Lookup<Index> job{bags, weights.data(), storage, pooled.data(), width, threads};
    if constexpr (sizeof(Index) == 4)
        kernels().lookup32(job);
    else
        kernels().lookup64(job);
    return -1;
}

// (rows [U], their gradients, whether the sum of all squares of those is finite in float32, counts [U] if wanted).
// Indices are those of lookup.
template <class Index>
auto sum_by_row(const Array<const float, 2>& gradient, const Array<const Index, 1>& indices,
                const Array<const int64_t, 1>& offsets, const std::optional<Array<const float, 1>>& psw,
                const Array<const int64_t, 1>& feature_starts, const Array<const int64_t, 1>& feature_sizes,
                bool mean, bool with_counts, int threads) {
    const Bags<Index> bags = make_bags(indices, offsets, psw, feature_starts, feature_sizes, mean);
    const int64_t width = gradient.shape(1) / bags.num_features;
    require(static_cast<int64_t>(gradient.shape(0)) == bags.batch_size &&
                static_cast<int64_t>(gradient.shape(1)) == bags.num_features * width && width > 0,
            "gradient: must be [batch_size, features * width]");
    const int64_t most = std::numeric_limits<uint32_t>::max();
    require(bags.batch_size * bags.num_features <= most, "batch: more than 2^32 - 1 bags");
    Buffer<int64_t> rows, counts;
    Buffer<const float*> summed;
    Buffer<float> sums;
    Groups groups;
    double squares;
    {
        const nb::gil_scoped_release released;
        int64_t num_rows = 0;
        for (int64_t f = 0; f < bags.num_features; ++f)
            num_rows = std::max(num_rows, bags.feature_starts[f] + bags.feature_sizes[f]);
        Buffer<Entry> entries = entries_of(bags, threads);
        sort_by_key(entries, num_rows, threads);
        groups = group_by_key(entries, threads);
        rows = Buffer<int64_t>(groups.count);
        summed = Buffer<const float*>(groups.count);
        sums = Buffer<float>(groups.count * width);  // memory beyond what is needed is never touched
        const float* next = sums.data();
        for (int64_t u = 0; u < groups.count; ++u) {
            const Entry& first = entries[groups.starts[u]];
            const bool lone = groups.starts[u + 1] == groups.starts[u] + 1 && first.weight == 1;
            rows[u] = first.key;
            summed[u] = lone ? gradient.data() + first.position * width : next;
            next += lone ? 0 : width;
        }
        if (with_counts) {
            counts = Buffer<int64_t>(groups.count);
            for (int64_t u = 0; u < groups.count; ++u) counts[u] = groups.starts[u + 1] - groups.starts[u];
        }
        squares = kernels().sum_rows({gradient.data(), entries.data(), groups.starts.data(), summed.data(),
                                      groups.count, width, threads});
    }
    const bool finite = squares <= std::numeric_limits<float>::max();
    std::optional<nb::ndarray<nb::pytorch, int64_t>> maybe_counts;
    if (with_counts) maybe_counts = as_tensor(std::move(counts), groups.count, 0);
    return std::make_tuple(as_tensor(std::move(rows), groups.count, 0),
                           Gradients(std::move(summed), std::move(sums), width, gradient), finite, maybe_counts);
}

// Gradient of each per-sample weight, [L]: <gradient of its bag, its row>, over the bag's size for means.
template <class Index>
void per_sample_gradient(const Array<const float, 2>& gradient, const AnyMatrix& weights,
                         const Array<const Index, 1>& indices, const Array<const int64_t, 1>& offsets,
                         const Array<const float, 1>& psw, const Array<const int64_t, 1>& feature_starts,
                         const Array<const int64_t, 1>& feature_sizes, bool mean, const Array<float, 1>& result,
                         int threads) {
    Bags<Index> bags = make_bags<Index>(indices, offsets, psw, feature_starts, feature_sizes, mean);
    bags.per_sample_weights = nullptr;  // the derivative by a weight no longer has it
    const auto width = static_cast<int64_t>(weights.shape(1));
    require(static_cast<int64_t>(gradient.shape(0)) == bags.batch_size &&
                static_cast<int64_t>(gradient.shape(1)) == bags.num_features * width &&
                result.size() == indices.size(),
            "gradient: must be [batch_size, features * width], and the result one number an index");
    const Storage storage = storage_of(weights.dtype());
    const nb::gil_scoped_release released;
    const Buffer<Entry> entries = entries_of(bags, threads);
    kernels().per_sample_gradient({gradient.data(), entries.data(), weights.data(), storage, result.data(),
                                   entries.size, width, threads});
}

template <class Index>
void bind_index_type(nb::module_& module) {
    using namespace nb::literals;
    module.def("lookup", lookup<Index>, "weights"_out, "indices"_a, "offsets"_a, "per_sample_weights"_a.none(),
               "feature_starts"_a, "feature_sizes"_a, "mean"_a, "pooled"_out, "threads"_a);
    module.def("sum_by_row", sum_by_row<Index>, "gradient"_a, "indices"_a, "offsets"_a,
               "per_sample_weights"_a.none(), "feature_starts"_a, "feature_sizes"_a, "mean"_a, "with_counts"_a,
               "threads"_a);
    module.def("per_sample_gradient", per_sample_gradient<Index>, "gradient"_a, "weights"_out, "indices"_a,
               "offsets"_a, "per_sample_weights"_a, "feature_starts"_a, "feature_sizes"_a, "mean"_a, "result"_out, "threads"_a);
}

}  // namespace

void bind_bags(nb::module_& module) {
    bind_index_type<int64_t>(module);
    bind_index_type<int32_t>(module);
}

}  // namespace recsys
