// The kernels for one instruction set: CMake compiles this file once for each, with another RECSYS_VARIANT.
//
// Only plain functions of this variant's namespace here: a template of the standard library that this file and
// another share might be linked in with instructions that the machine does not have.
#ifdef _OPENMP
#include <omp.h>
#endif

namespace recsys::RECSYS_VARIANT {
inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}
}  // namespace recsys::RECSYS_VARIANT

#include "balanced_adam.h"
#include "basis.h"
#include "clip_rows.h"
#include "lookup.h"
#include "partition_rules.h"
#include "rules.h"
#include "stored.h"
#include "sum_rows.h"

namespace recsys::RECSYS_VARIANT {
namespace {

void sgd(const Update& update) { update_rows(update, Sgd{update.width, update.learning_rate, update.keep}); }

void rowwise_adagrad(const Update& update, float* squares, float eps) {
    update_rows(update, RowwiseAdagrad{update.width, update.learning_rate, update.keep, squares, eps});
}

void adagrad(const Update& update, float* squares, float eps) {
    update_rows(update, Adagrad{update.width, update.learning_rate, update.keep, squares, eps});
}

void adam(const Update& update, const AdamState& state) {
    update_rows(update, Adam{update.width, update.learning_rate, update.keep, state});
}

void partial_rowwise_adam(const Update& update, const AdamState& state) {
    update_rows(update, PartialRowwiseAdam{update.width, update.learning_rate, update.keep, state});
}

void sm3_rows(const Update& update, float* maxima, float eps) {
    update_rows(update, Sm3Rows{update.width, update.learning_rate, update.keep, maxima, eps});
}

void sm3_rows_and_columns(const Update& update, const Runs& runs, const Sm3State& state) {
    update_partitions(update, runs, Sm3RowsAndColumns{update, state});
}

void adafactor(const Update& update, const Runs& runs, const AdafactorState& state) {
    update_partitions(update, runs, Adafactor{update, state});
}

void count_sketch_adam(const Update& update, const Runs& runs, const CountSketchState& state) {
    update_partitions(update, runs, CountSketchAdam{update, state});
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {lookup<int32_t>, lookup<int64_t>, per_sample_gradient, read_rows, write_rows, sum_rows,
                         clip_rows, sgd, rowwise_adagrad, adagrad, adam,
                         partial_rowwise_adam, sm3_rows, sm3_rows_and_columns, adafactor, count_sketch_adam,
                         basis, basis_two_buckets, centred_norm, balanced_adam_scales, balanced_adam_move};

}  // namespace recsys::RECSYS_VARIANT
