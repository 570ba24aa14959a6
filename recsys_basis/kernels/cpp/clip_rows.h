// Rows' gradients shortened before the update: recsys_basis/row_optimizers/clipping.py.
#pragma once

#include <cmath>

#include "arrays.h"
#include "rows.h"

namespace recsys::RECSYS_VARIANT {

void clip_rows(const Clip& clip) {
    const int64_t width = clip.width;
#pragma omp parallel for num_threads(clip.threads) schedule(static)
    for (int64_t u = 0; u < clip.num_rows; ++u) {
        float* g = clip.gradients + u * width;
        const float norm = std::sqrt(sum_of_squares(g, width));
        float limit = clip.max_norm;
        if (clip.counts) {
            float of_weights = clip.cowclip_ratio * std::sqrt(sum_of_squares(clip.weights + clip.rows[u] * width, width));
            if (of_weights < clip.cowclip_min_norm) of_weights = clip.cowclip_min_norm;
            const float cowclip = static_cast<float>(clip.counts[u]) * of_weights;
            if (cowclip < limit) limit = cowclip;
        }
        if (norm <= limit) continue;
        const float factor = limit / norm;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) g[d] *= factor;
    }
}

}  // namespace recsys::RECSYS_VARIANT
