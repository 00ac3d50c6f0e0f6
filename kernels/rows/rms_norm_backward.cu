// The gradient of RMSNorm: from dy and x to dx, and to the weight's gradient as sums of each group.
//
//   factor = 1 / sqrt(mean(x^2) + eps)    g = dy * weight
//   dx = factor * (g - x * factor^2 * mean(g * x))    d_weight = sum over rows of dy * x * factor
//
// With ADD, x is a sum that was stored as well (rms_norm.cu), and its own gradient is added to dx before rounding.
//
// The factor is computed again, because both sums over a row need one pass. A group of warps holds x and dy in
// registers, or loads them again (rows/gradients.cuh). dx takes the place of x in the stage.

#include "raymoe/rows/gradients.cuh"

#ifndef ADD
#define ADD 0
#endif

namespace raymoe {

// Adds x^2 and dy * weight * x to the sums.
__device__ __forceinline__ void add_to(float (&sums)[2], const RowAgain<ROW_TYPE>& x, const RowAgain<ROW_TYPE>& dy,
                                       const Vector<WEIGHT_TYPE>& weight) {
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        float a[8], g[8], by[8], parts[2] = {};
        x.unpack(i, a);
        dy.unpack(i, g);
        weight.unpack(i, by);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            parts[0] += a[j] * a[j];
            parts[1] += g[j] * by[j] * a[j];
        }
        sums[0] += parts[0];
        sums[1] += parts[1];
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    rms_norm_backward(const __grid_constant__ raymoe::NormBackwardParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<ADD ? 3 : 2> pipe(p.work, p.inputs, shared);
    const Vector<WEIGHT_TYPE> weight(p.weight);
    GroupSums sums(pipe.sums());
    VectorGradient of_weight;
    pipe.run([&](const Tile& tile) {
#pragma unroll 1
        for (u32 r = 0; r < tile.rows; ++r) {
            const RowAgain<ROW_TYPE> dy(p.inputs[0], tile, r);
            const RowAgain<ROW_TYPE> x(p.inputs[1], tile, r);
            float both[2] = {};
            add_to(both, x, dy, weight);
            sums.add(both);
            const float factor = rsqrtf(both[0] * ONE_OVER_HIDDEN + p.eps);
            const float along = -both[1] * ONE_OVER_HIDDEN * factor * factor;
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                float a[8], g[8], by[8];
                x.unpack(i, a);
                dy.unpack(i, g);
                weight.unpack(i, by);
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    const float normed = a[j] * factor;
                    of_weight.sums[i][j] += g[j] * normed;
                    a[j] = normed * along + g[j] * by[j] * factor;
                }
                if constexpr (ADD) {
                    take<ROW_TYPE>(p.inputs[2], tile, r, eight_of(i), is_there(i)).unpack(g);
#pragma unroll
                    for (u32 j = 0; j < 8; ++j) {
                        a[j] += g[j];
                    }
                }
                if (is_there(i)) {
                    put(Elements<ROW_TYPE>::pack(a), p.dx, tile, r, eight_of(i));
                }
            }
        }
        pipe.store(tile, [&] { store_tile(p.dx, tile); });
    });
    ptx::let_next_kernel_begin();
    if (is_consumer()) {
        of_weight.store(p.partials, 0);
    }
}
