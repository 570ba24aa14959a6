// What the bindings of rules share: their first arguments, checked, and the counts of tables.
#pragma once

#include <cmath>
#include <cstdint>

#include "gradients.h"
#include "module.h"

namespace recsys {

using Floats = Array<float, 1>;
using Matrix = Array<float, 2>;
using Numbers = Array<const int64_t, 1>;

// The first arguments of every rule. The group has `group_rows` rows; weights are of all of them, or of `rows` alone.
inline Update make_update(const Matrix& weights, const Numbers& rows, size_t group_rows, const Gradients& gradients,
                          double learning_rate, double weight_decay, int threads) {
    const auto num_rows = static_cast<int64_t>(rows.size()), limit = static_cast<int64_t>(group_rows);
    const bool whole = weights.shape(0) == group_rows;
    require(whole || weights.shape(0) == rows.size(), "weights: must be those of all rows, or of the touched ones");
    require(gradients.num_rows() == num_rows && gradients.width() == static_cast<int64_t>(weights.shape(1)),
            "gradients: must be [rows, width of weights]");
    bool ascends = true;
    for (int64_t u = 1; u < num_rows; ++u) ascends &= rows.data()[u - 1] < rows.data()[u];
    require(ascends, "rows: must be distinct and ascending");
    require(num_rows == 0 || (rows.data()[0] >= 0 && rows.data()[num_rows - 1] < limit), "rows: out of range");
    return {weights.data(),
            whole ? rows.data() : nullptr,
            rows.data(),
            gradients.rows(),
            num_rows,
            static_cast<int64_t>(weights.shape(1)),
            static_cast<float>(learning_rate),
            static_cast<float>(1 - learning_rate * weight_decay),
            threads};
}

// Every table counts one more update; then 1 - beta^t of each row's table, [U]: step 1 of both Adams, and the
// correction of BASIS' energies.
struct TableCorrections {
    Buffer<float> first, second;

    TableCorrections(const Update& update, const Array<int64_t, 1>& updates, const Numbers& row_starts, double beta1,
                     double beta2)
        : first(update.num_rows), second(update.num_rows) {
        const auto num_tables = static_cast<int64_t>(updates.size());
        int64_t u = 0;
        for (int64_t table = 0; table < num_tables; ++table) {
            const auto t = static_cast<double>(++updates.data()[table]);
            const auto correction1 = static_cast<float>(1 - std::pow(beta1, t));
            const auto correction2 = static_cast<float>(1 - std::pow(beta2, t));
            const int64_t end = table + 1 < num_tables ? row_starts.data()[table + 1] : INT64_MAX;
            for (; u < update.num_rows && update.rows[u] < end; ++u) {
                first[u] = correction1;
                second[u] = correction2;
            }
        }
    }
};

}  // namespace recsys
