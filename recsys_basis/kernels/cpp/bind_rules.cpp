// Bindings of the update rules but BASIS: one function a rule, called with rows whose gradients are already summed.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "buckets.h"
#include "update.h"

namespace recsys {
namespace {

void require_shape(const Matrix& state, size_t group_rows, const Matrix& weights) {
    require(state.shape(0) == group_rows && state.shape(1) == weights.shape(1),
            "state: must be [group_rows, width of weights]");
}

void sgd(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
         double learning_rate, double weight_decay, int threads) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    const nb::gil_scoped_release released;
    kernels().sgd(update);
}

void rowwise_adagrad(const Matrix& weights, const Numbers& rows, size_t group_rows,
                     const Gradients& gradients, double learning_rate, double weight_decay, int threads,
                     const Floats& squares, float eps) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require(squares.size() == group_rows, "state: needs one number a row");
    const nb::gil_scoped_release released;
    kernels().rowwise_adagrad(update, squares.data(), eps);
}

void adagrad(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
             double learning_rate, double weight_decay, int threads, const Matrix& squares, float eps) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require_shape(squares, group_rows, weights);
    const nb::gil_scoped_release released;
    kernels().adagrad(update, squares.data(), eps);
}

void adam(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
          double learning_rate, double weight_decay, int threads, const Matrix& first, const Matrix& second,
          const Array<int64_t, 1>& updates, const Numbers& row_starts, double beta1, double beta2, float eps) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require_shape(first, group_rows, weights);
    require_shape(second, group_rows, weights);
    require(updates.size() == row_starts.size(), "updates: needs one number a table");
    const nb::gil_scoped_release released;
    const TableCorrections corrections(update, updates, row_starts, beta1, beta2);
    kernels().adam(update, {first.data(), second.data(), static_cast<float>(1 - beta1),
                            static_cast<float>(1 - beta2), eps, corrections.first.data(),
                            corrections.second.data()});
}

void partial_rowwise_adam(const Matrix& weights, const Numbers& rows, size_t group_rows,
                          const Gradients& gradients, double learning_rate, double weight_decay,
                          int threads, const Matrix& first, const Floats& second, const Array<int64_t, 1>& updates,
                          const Numbers& row_starts, double beta1, double beta2, float eps) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require_shape(first, group_rows, weights);
    require(second.size() == group_rows, "state: needs one number a row");
    require(updates.size() == row_starts.size(), "updates: needs one number a table");
    const nb::gil_scoped_release released;
    const TableCorrections corrections(update, updates, row_starts, beta1, beta2);
    kernels().partial_rowwise_adam(update, {first.data(), second.data(), static_cast<float>(1 - beta1),
                                            static_cast<float>(1 - beta2), eps, corrections.first.data(),
                                            corrections.second.data()});
}

// Runs of rows of one partition; row_start holds the first row of each.
class PartitionRuns {
public:
    PartitionRuns(const Update& update, const Numbers& row_start) {
        const int64_t* begin = row_start.data();
        const int64_t* end = begin + row_start.size();
        for (int64_t u = 0; u < update.num_rows;) {
            const int64_t* next = std::upper_bound(begin, end, update.rows[u]);
            starts_.push_back(u);
            partitions_.push_back(next - begin - 1);
            const int64_t limit = next == end ? INT64_MAX : *next;
            while (u < update.num_rows && update.rows[u] < limit) ++u;
        }
        starts_.push_back(update.num_rows);
    }

    Runs runs() const { return {starts_.data(), partitions_.data(), static_cast<int64_t>(partitions_.size())}; }

private:
    std::vector<int64_t> starts_, partitions_;
};

void sm3(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
         double learning_rate, double weight_decay, int threads, const Floats& row_maxima,
         const std::optional<Matrix>& column_maxima, const Numbers& row_start, float eps) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require(row_maxima.size() == group_rows, "row_maxima: needs one number a row");
    require(!column_maxima || (column_maxima->shape(0) == row_start.size() && column_maxima->shape(1) == weights.shape(1)),
            "column_maxima: must be [partitions, width]");
    const nb::gil_scoped_release released;
    if (!column_maxima) return kernels().sm3_rows(update, row_maxima.data(), eps);
    const PartitionRuns partitions(update, row_start);
    Buffer<float> scratch(threads * update.width);
    kernels().sm3_rows_and_columns(update, partitions.runs(),
                                   {row_maxima.data(), column_maxima->data(), eps, scratch.data()});
}

void adafactor(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
               double learning_rate, double weight_decay, int threads, const Floats& row_average,
               const Matrix& column_average, const std::optional<Array<int32_t, 1>>& row_updates,
               const std::optional<Array<int32_t, 1>>& column_updates, const Numbers& row_start, double decay_power,
               std::optional<double> beta2, float eps, float update_clip) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require(row_average.size() == group_rows, "row_average: needs one number a row");
    require(column_average.shape(0) == row_start.size() && column_average.shape(1) == weights.shape(1),
            "column_average: must be [partitions, width]");
    require(beta2 || (row_updates && row_updates->size() == group_rows && column_updates &&
                      column_updates->size() == row_start.size()),
            "updates: must be there, one a row and one a partition, where beta2 is not constant");
    const nb::gil_scoped_release released;
    const PartitionRuns partitions(update, row_start);
    Buffer<float> scratch(threads * 2 * update.width), inverse_roots(update.num_rows);
    kernels().adafactor(update, partitions.runs(),
                        {row_average.data(), column_average.data(), beta2 ? nullptr : row_updates->data(),
                         beta2 ? nullptr : column_updates->data(), decay_power,
                         static_cast<float>(1 - beta2.value_or(0)), eps, update_clip, scratch.data(),
                         inverse_roots.data()});
}

void count_sketch_adam(const Matrix& weights, const Numbers& rows, size_t group_rows,
                       const Gradients& gradients, double learning_rate, double weight_decay, int threads,
                       const std::optional<Matrix>& first, const Matrix& second, const Array<int64_t, 1>& updates,
                       const Numbers& table_starts, const Numbers& row_start, const Numbers& bucket_start,
                       const Numbers& widths, const Numbers& seeds, double beta1, double beta2, float eps) {
    const Update update = make_update(weights, rows, group_rows, gradients, learning_rate, weight_decay, threads);
    require(second.shape(1) == weights.shape(1), "second: must be as wide as weights");
    require(!first || (first->shape(0) == second.shape(0) && first->shape(1) == second.shape(1)),
            "first: must have the shape of second");
    require(updates.size() == table_starts.size(), "updates: needs one number a table");
    require(widths.size() == row_start.size() && bucket_start.size() == row_start.size() &&
                seeds.size() == kSketchDepth * row_start.size(),
            "widths, bucket_start, seeds: need one, one and three numbers a partition");
    const nb::gil_scoped_release released;
    const TableCorrections corrections(update, updates, table_starts, beta1, beta2);
    const PartitionRuns partitions(update, row_start);
    const SketchMap map{row_start.data(), bucket_start.data(), widths.data(), seeds.data(),
                        static_cast<int64_t>(row_start.size())};
    const Buffer<SketchRow> places = sketch_of(map, update.rows, partitions.runs(), threads);
    Buffer<float> moments(update.num_rows * 2 * update.width);
    kernels().count_sketch_adam(
        update, partitions.runs(),
        {first ? first->data() : nullptr, second.data(), places.data(), static_cast<float>(1 - beta1),
         static_cast<float>(1 - beta2), eps, corrections.first.data(), corrections.second.data(), moments.data()});
}

// Shorten gradients in place; counts are there where CowClip is.
void clip_rows(const Array<const float, 2>& weights, const Numbers& rows, const Matrix& gradients,
               const std::optional<Numbers>& counts, std::optional<float> max_norm,
               std::optional<float> cowclip_ratio, float cowclip_min_norm, int threads) {
    require(gradients.shape(0) == rows.size() && gradients.shape(1) == weights.shape(1),
            "gradients: must be [rows, width of weights]");
    require(!cowclip_ratio || (counts && counts->size() == rows.size()), "counts: needs one a row");
    const nb::gil_scoped_release released;
    kernels().clip_rows({weights.data(), rows.data(), gradients.data(), cowclip_ratio ? counts->data() : nullptr,
                         static_cast<int64_t>(rows.size()), static_cast<int64_t>(weights.shape(1)),
                         max_norm.value_or(std::numeric_limits<float>::infinity()), cowclip_ratio.value_or(0),
                         cowclip_min_norm, threads});
}

}  // namespace

void bind_rules(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Gradients>(module, "Gradients")
        .def(nb::init_implicit<Array<const float, 2>>())
        .def("tensor", [](nb::handle_t<Gradients> self) {
            auto& gradients = nb::cast<Gradients&>(self);
            float* whole = gradients.gather();
            const size_t shape[] = {static_cast<size_t>(gradients.num_rows()), static_cast<size_t>(gradients.width())};
            return nb::ndarray<nb::pytorch, float>(whole, 2, shape, self);
        });
    module.def("sgd", sgd, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a, "learning_rate"_a, "weight_decay"_a,
               "threads"_a);
    module.def("rowwise_adagrad", rowwise_adagrad, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a,
               "learning_rate"_a, "weight_decay"_a, "threads"_a, "squares"_out, "eps"_a);
    module.def("adagrad", adagrad, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a, "learning_rate"_a,
               "weight_decay"_a, "threads"_a, "squares"_out, "eps"_a);
    module.def("adam", adam, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a, "learning_rate"_a, "weight_decay"_a,
               "threads"_a, "first"_out, "second"_out, "updates"_out, "row_starts"_a, "beta1"_a, "beta2"_a, "eps"_a);
    module.def("partial_rowwise_adam", partial_rowwise_adam, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a,
               "learning_rate"_a, "weight_decay"_a, "threads"_a, "first"_out, "second"_out, "updates"_out,
               "row_starts"_a, "beta1"_a, "beta2"_a, "eps"_a);
    module.def("sm3", sm3, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a, "learning_rate"_a, "weight_decay"_a,
               "threads"_a, "row_maxima"_out, "column_maxima"_out.none(), "row_start"_a, "eps"_a);
    module.def("adafactor", adafactor, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a, "learning_rate"_a,
               "weight_decay"_a, "threads"_a, "row_average"_out, "column_average"_out, "row_updates"_out.none(),
               "column_updates"_out.none(), "row_start"_a, "decay_power"_a, "beta2"_a.none(), "eps"_a, "update_clip"_a);
    module.def("count_sketch_adam", count_sketch_adam, "weights"_out, "rows"_a, "group_rows"_a, "gradients"_a,
               "learning_rate"_a, "weight_decay"_a, "threads"_a, "first"_out.none(), "second"_out, "updates"_out,
               "table_starts"_a, "row_start"_a, "bucket_start"_a, "widths"_a, "seeds"_a, "beta1"_a, "beta2"_a, "eps"_a);
    module.def("clip_rows", clip_rows, "weights"_out, "rows"_a, "gradients"_a, "counts"_a.none(), "max_norm"_a.none(),
               "cowclip_ratio"_a.none(), "cowclip_min_norm"_a, "threads"_a);
}

}  // namespace recsys
