// Bindings of BASIS: its settings, a batch's bucket rows, and state that is kept in fewer bits.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "buckets.h"
#include "sort.h"
#include "update.h"

namespace recsys {
namespace {

// 1 - beta^t, up to where it is 1 in float32 or the table gets long; kept for the life of the process.
Corrections corrections_of(double beta) {
    constexpr size_t kMost = 1 << 20;
    static std::mutex mutex;
    static std::map<double, std::vector<float>> tables;
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<float>& table = tables[beta];
    if (table.empty()) table.push_back(static_cast<float>(1 - beta));  // t = 0 counts as t = 1
    while (table.back() < 1 && table.size() < kMost)
        table.push_back(static_cast<float>(1 - std::pow(beta, static_cast<double>(table.size()))));
    return {table.data(), static_cast<int64_t>(table.size()), beta};
}

// Items (bucket row, row): one for each bucket that a row has.
Buffer<Entry> entries_of(const Buffer<RowBucket>& buckets) {
    int64_t count = buckets.size;
    for (int64_t u = 0; u < buckets.size; ++u) count += buckets[u].second != buckets[u].first;
    Buffer<Entry> entries(count);
    int64_t next = 0;
    for (int64_t u = 0; u < buckets.size; ++u) {
        const auto position = static_cast<uint32_t>(u);
        entries[next++] = {static_cast<uint64_t>(buckets[u].first), position, 1};
        if (buckets[u].second != buckets[u].first)
            entries[next++] = {static_cast<uint64_t>(buckets[u].second), position, 1};
    }
    return entries;
}

template <class Choice>
Choice choose(const std::string& name, std::initializer_list<std::pair<const char*, Choice>> choices) {
    for (const auto& [known, choice] : choices)
        if (name == known) return choice;
    throw nb::value_error(("unknown choice " + name).c_str());
}

// The row's bucket for each of `rows`, from the tensors of BucketMap in buckets.py (sign_seeds only if signed).
Buffer<RowBucket> buckets_of_rows(const Update& update, const std::string& hash, const Numbers& row_start,
                                  const Numbers& private_rows, const Numbers& shared,
                                  const Numbers& shared_buckets, const Numbers& bucket_start,
                                  const Numbers& private_start, const Numbers& keys,
                                  const std::optional<Numbers>& sign_seeds) {
    const auto choice = choose<Hash>(hash, {{"balanced", Hash::balanced},
                                            {"murmur3", Hash::murmur3},
                                            {"double", Hash::twice},
                                            {"modulo", Hash::modulo}});
    const BucketMap map{choice,
                        row_start.data(),
                        private_rows.data(),
                        shared.data(),
                        shared_buckets.data(),
                        bucket_start.data(),
                        private_start.data(),
                        keys.data(),
                        sign_seeds ? sign_seeds->data() : nullptr,
                        static_cast<int64_t>(row_start.size())};
    return buckets_of(map, update.rows, update.num_rows, update.threads);
}

// The settings of BasisConfig in spec.py, by its names.
Basis make_basis(const nb::dict& config) {
    const auto number = [&](const char* name) { return nb::cast<double>(config[name]); };
    const auto text = [&](const char* name) { return nb::cast<std::string>(config[name]); };
    const auto flag = [&](const char* name) { return nb::cast<bool>(config[name]); };
    Basis basis{};
    basis.direction = choose<Direction>(text("direction"), {{"gradient", Direction::gradient},
                                                            {"momentum", Direction::momentum},
                                                            {"head_momentum", Direction::head_momentum}});
    basis.scalar = choose<Scalar>(text("scalar"), {{"none", Scalar::none},
                                                   {"hypergradient", Scalar::hypergradient},
                                                   {"energy", Scalar::energy}});
    basis.first_of_all = basis.direction == Direction::momentum || basis.scalar == Scalar::hypergradient;
    basis.energy_start_first = text("energy_start") == "first";
    basis.log_form = text("hypergradient_form") == "log";
    basis.normalized = flag("hypergradient_normalized");
    basis.by_updates = text("hypergradient_by_frequency") == "bucket";
    basis.amount1 = static_cast<float>(1 - number("beta1"));
    basis.amount2 = static_cast<float>(1 - number("beta2"));
    basis.eps = static_cast<float>(number("eps"));
    basis.energy_decay = static_cast<float>(number("energy_decay"));
    basis.energy_amount = static_cast<float>(1 - number("energy_decay"));
    basis.energy_prior = static_cast<float>(number("energy_prior"));
    basis.hypergradient_rate = static_cast<float>(number("hypergradient_rate"));
    basis.scalar_min = static_cast<float>(number("scalar_min"));
    basis.scalar_max = static_cast<float>(number("scalar_max"));
    basis.corrections1 = corrections_of(number("beta1"));
    basis.corrections2 = corrections_of(number("beta2"));
    return basis;
}

// Entries of a tensor in float32, until `write` rounds them back.
class Widened {
public:
    Widened(const Stored& stored, const int64_t* keys, int64_t count, int threads)
        : stored_(stored), values_(count * stored.width), rows_{keys, values_.data(), count, threads} {
        kernels().read_rows(stored_, rows_);
    }

    float* data() { return values_.data(); }
    // updates: a number for each entry that it was never written with.
    void write(const Buffer<int64_t>& updates) { kernels().write_rows(stored_, rows_, updates.data()); }

private:
    Stored stored_;
    Buffer<float> values_;
    KeyedRows rows_;
};

// Where BASIS keeps its numbers, and how.
struct BasisTensors {
    std::optional<StoredTensor> first, row_scalar;
    StoredTensor second;

    bool all_float32() const { return is_float32(first) && is_float32(second) && is_float32(row_scalar); }

private:
    static bool is_float32(const std::optional<StoredTensor>& tensor) {
        return !tensor || tensor->stored().storage == Storage::float32;
    }
};

void run_basis(const Update& update, Basis& job, bool two_buckets, const Buffer<RowBucket>& buckets,
               const Buffer<Entry>& entries, const Groups& groups) {
    job.buckets = buckets.data();
    job.entries = entries.data();
    job.starts = groups.starts.data();
    job.num_touched = groups.count;
    (two_buckets ? kernels().basis_two_buckets : kernels().basis)(update, job);
}

// The same on state that is kept in fewer bits: the rule sees what it touches in float32, bucket rows numbered
// 0..C-1 and rows 0..U-1, and after it all is rounded with t, the updates of the bucket row, for its number.
void run_basis_widened(Update update, Basis& job, bool two_buckets, const Buffer<RowBucket>& buckets,
                       Buffer<Entry>& entries, const Groups& groups, const BasisTensors& tensors) {
    const int64_t num_rows = update.num_rows;
    Buffer<RowBucket> renumbered(num_rows);
    Buffer<int64_t> bucket_rows(groups.count), private_rows(num_rows), order(num_rows);
    Buffer<int32_t> updates(groups.count);
    int64_t num_private = 0;
    for (int64_t u = 0; u < num_rows; ++u) {
        order[u] = u;
        const bool is_private = buckets[u].private_row >= 0;
        renumbered[u] = {0, 0, is_private ? num_private : -1, buckets[u].sign};
        if (is_private) private_rows[num_private++] = buckets[u].private_row;
    }
    for (int64_t c = 0; c < groups.count; ++c) {
        const auto bucket = static_cast<int64_t>(entries[groups.starts[c]].key);
        bucket_rows[c] = bucket;
        updates[c] = job.updates[bucket];
        for (int64_t i = groups.starts[c]; i < groups.starts[c + 1]; ++i) {
            const int64_t u = entries[i].position;
            entries[i].key = c;
            if (buckets[u].first == bucket) renumbered[u].first = c;
            if (buckets[u].second == bucket) renumbered[u].second = c;
        }
    }
    Widened second(tensors.second.stored(), bucket_rows.data(), groups.count, update.threads);
    std::optional<Widened> first, row_scalar;
    if (tensors.first)
        first.emplace(tensors.first->stored(), job.first_of_all ? bucket_rows.data() : private_rows.data(),
                      job.first_of_all ? groups.count : num_private, update.threads);
    if (tensors.row_scalar) row_scalar.emplace(tensors.row_scalar->stored(), update.rows, num_rows, update.threads);

    int32_t* group_updates = std::exchange(job.updates, updates.data());
    job.second = second.data();
    job.first = first ? first->data() : nullptr;
    job.row_scalar = row_scalar ? row_scalar->data() : nullptr;
    update.rows = order.data();
    run_basis(update, job, two_buckets, renumbered, entries, groups);

    Buffer<int64_t> of_buckets(groups.count), of_rows(num_rows), of_private(num_private);
    for (int64_t c = 0; c < groups.count; ++c) of_buckets[c] = group_updates[bucket_rows[c]] = updates[c];
    for (int64_t u = 0; u < num_rows; ++u) {
        of_rows[u] = updates[renumbered[u].first];
        if (renumbered[u].private_row >= 0) of_private[renumbered[u].private_row] = of_rows[u];
    }
    second.write(of_buckets);
    if (first) first->write(job.first_of_all ? of_buckets : of_private);
    if (row_scalar) row_scalar->write(of_rows);
}

void basis(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
           double learning_rate, double weight_decay, int threads, const nb::dict& config, const nb::object& first,
           const nb::object& second, const Array<int32_t, 1>& updates, const nb::object& row_scalar,
           const std::optional<Numbers>& row_counts, const std::optional<Array<int64_t, 1>>& table_updates,
           const std::optional<Numbers>& table_starts, const Numbers& row_start, const Numbers& private_rows,
           const Numbers& shared, const Numbers& shared_buckets, const Numbers& bucket_start,
           const Numbers& private_start, const Numbers& keys, const Numbers& sign_seeds) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    Basis job = make_basis(config);
    const auto tensor_of = [](const nb::object& stored) {
        return stored.is_none() ? std::nullopt : std::optional<StoredTensor>(stored);
    };
    const BasisTensors tensors{tensor_of(first), tensor_of(row_scalar), StoredTensor(second)};
    const auto num_buckets = static_cast<int64_t>(updates.size());
    require(tensors.second.size() == num_buckets && tensors.second.width() == update.width,
            "second: must be [buckets, width], and updates one number a bucket");
    require(!job.first_of_all || (tensors.first && tensors.first->size() == num_buckets),
            "first: must be [buckets, width]");
    require(job.direction == Direction::gradient || tensors.first, "first: must be there");
    require(!tensors.first || tensors.first->width() == update.width, "first: must be as wide as weights");
    require(job.scalar == Scalar::none ||
                (tensors.row_scalar && tensors.row_scalar->size() == static_cast<int64_t>(group_rows)),
            "row_scalar: needs one number a row");
    require(!row_counts || row_counts->size() == rows.size(), "row_counts: needs one number a touched row");
    require(!table_updates || (table_starts && table_starts->size() == table_updates->size()),
            "table_updates: needs one number a table");
    const auto hash = nb::cast<std::string>(config["hash"]);
    const bool is_signed = nb::cast<bool>(config["signed"]);
    const nb::gil_scoped_release released;
    const Buffer<RowBucket> buckets =
        buckets_of_rows(update, hash, row_start, private_rows, shared, shared_buckets, bucket_start, private_start,
                        keys, is_signed ? std::optional<Numbers>(sign_seeds) : std::nullopt);
    Buffer<Entry> entries = entries_of(buckets);
    sort_by_key(entries, updates.size(), threads);
    const Groups groups = group_by_key(entries, threads);
    Buffer<float> scratch(threads * 3 * update.width);
    std::optional<TableCorrections> corrections;
    if (table_updates) corrections.emplace(update, *table_updates, *table_starts, job.energy_decay, 0.0);
    job.energy_correction = corrections ? corrections->first.data() : nullptr;
    job.row_counts = row_counts ? row_counts->data() : nullptr;
    job.updates = updates.data();
    job.scratch = scratch.data();
    if (!tensors.all_float32())
        return run_basis_widened(update, job, hash == "double", buckets, entries, groups, tensors);
    job.first = tensors.first ? static_cast<float*>(tensors.first->stored().data) : nullptr;
    job.second = static_cast<float*>(tensors.second.stored().data);
    job.row_scalar = tensors.row_scalar ? static_cast<float*>(tensors.row_scalar->stored().data) : nullptr;
    run_basis(update, job, hash == "double", buckets, entries, groups);
}

}  // namespace

void bind_basis(nb::module_& module) {
    using namespace nb::literals;
    module.def("basis", basis, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a, "learning_rate"_a,
               "weight_decay"_a, "threads"_a, "config"_a, "first"_out.none(), "second"_out, "updates"_out,
               "row_scalar"_out.none(), "row_counts"_a.none(), "table_updates"_out.none(), "table_starts"_a.none(),
               "row_start"_a, "private_rows"_a, "shared"_a, "shared_buckets"_a, "bucket_start"_a, "private_start"_a,
               "keys"_a, "sign_seeds"_a);
}

}  // namespace recsys
