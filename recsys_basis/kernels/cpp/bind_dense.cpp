// Bindings of the dense optimizers' kernels.
//
// Tensors come as addresses, 0 for none, and the caller answers for their dtype, size and layout: nanobind takes 2 us
// to look at an array, and for a bias that is longer than its step.
#include <cmath>

#include "module.h"

namespace recsys {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// As torch's own loops: a smaller tensor is not worth the start of threads.
int threads_for(int64_t size, int threads) { return size < 32768 ? 1 : threads; }

double deviation(uintptr_t values, int64_t size) {
    const nb::gil_scoped_release released;
    return kernels().centred_norm(at<const float>(values), size) / std::sqrt(static_cast<double>(size));
}

void balanced_adam_scales(uintptr_t gradient, float cluster_scale, float limit, uintptr_t scales, int64_t num_rows,
                          int64_t width, int threads) {
    const nb::gil_scoped_release released;
    kernels().balanced_adam_scales({at<const float>(gradient), cluster_scale, limit, at<float>(scales), num_rows,
                                    width, threads_for(num_rows * width, threads)});
}

void balanced_adam_move(uintptr_t weights, uintptr_t gradient, uintptr_t first, uintptr_t second, int64_t num_rows,
                        int64_t width, uintptr_t last_sign, uintptr_t num_flips, uintptr_t factors, uintptr_t scales,
                        float scale, float rate, float eps, float threshold, int most_flips, bool holds, int threads) {
    const nb::gil_scoped_release released;
    Buffer<double> row_sums(num_rows);
    kernels().balanced_adam_move({at<float>(weights),
                                  at<const float>(gradient),
                                  at<const float>(first),
                                  at<const float>(second),
                                  at<const float>(factors),
                                  at<int8_t>(last_sign),
                                  at<int8_t>(num_flips),
                                  at<const float>(scales),
                                  scale,
                                  rate,
                                  eps,
                                  threshold,
                                  most_flips,
                                  holds,
                                  num_rows,
                                  width,
                                  threads_for(num_rows * width, threads),
                                  row_sums.data()});
}

}  // namespace

void bind_dense(nb::module_& module) {
    using namespace nb::literals;
    module.def("deviation", deviation, "values"_a, "size"_a);
    module.def("balanced_adam_scales", balanced_adam_scales, "gradient"_a, "cluster_scale"_a, "limit"_a, "scales"_a,
               "num_rows"_a, "width"_a, "threads"_a);
    module.def("balanced_adam_move", balanced_adam_move, "weights"_a, "gradient"_a, "first"_a, "second"_a,
               "num_rows"_a, "width"_a, "last_sign"_a, "num_flips"_a, "factors"_a, "scales"_a,
               "scale"_a, "rate"_a, "eps"_a, "threshold"_a, "most_flips"_a, "holds"_a, "threads"_a);
}

}  // namespace recsys
