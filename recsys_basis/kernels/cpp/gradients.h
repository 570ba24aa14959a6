// The summed gradient of each distinct row of a batch, as the rules read it.
//
// A row that one item of weight 1 touches, the commonest, has its gradient where the batch left it: only the
// others need a sum.
#pragma once

#include <cstring>
#include <utility>

#include "buffer.h"
#include "module.h"

namespace recsys {

class Gradients {
public:
    // Of all rows, in their order.
    explicit Gradients(const Array<const float, 2>& tensor)
        : width_(tensor.shape(1)), rows_(tensor.shape(0)), source_(tensor) {
        for (int64_t u = 0; u < rows_.size; ++u) rows_[u] = tensor.data() + u * width_;
    }
    // Pointers [U] into `source` and `sums`.
    Gradients(Buffer<const float*> rows, Buffer<float> sums, int64_t width, const Array<const float, 2>& source)
        : width_(width), rows_(std::move(rows)), sums_(std::move(sums)), source_(source) {}

    int64_t num_rows() const { return rows_.size; }
    int64_t width() const { return width_; }
    const float* const* rows() const { return rows_.data(); }

    // All in one piece [U, D], which the rules read from now on: it may be changed.
    float* gather() {
        if (gathered_) return sums_.data();
        Buffer<float> whole(num_rows() * width_);
        for (int64_t u = 0; u < num_rows(); ++u) {
            float* row = whole.data() + u * width_;
            std::memcpy(row, rows_[u], width_ * sizeof(float));
            rows_[u] = row;
        }
        sums_ = std::move(whole);
        source_ = {};
        gathered_ = true;
        return sums_.data();
    }

private:
    int64_t width_;
    Buffer<const float*> rows_;  // [U], each [D]
    Buffer<float> sums_;
    Array<const float, 2> source_;  // keeps the memory that pointers lead to
    bool gathered_ = false;
};

}  // namespace recsys
