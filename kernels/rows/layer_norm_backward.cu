// Computes the gradient of LayerNorm: dx from dy and x, and each group's sums for the gradients of weight and bias.
//
//   c = x - mean    factor = 1 / sqrt(mean(c^2) + eps)    g = dy * weight
//   dx = factor * (g - mean(g) - c * factor^2 * mean(g * c))
//   d_weight = sum over rows of dy * c * factor    d_bias = sum over rows of dy
//
// Mean and factor are computed again. A group of warps holds x and dy in registers, or loads them again
// (rows/gradients.cuh). dx takes the place of x in the stage.

#include "raymoe/rows/gradients.cuh"

namespace raymoe {

__device__ __forceinline__ float sum_of(const RowAgain<ROW_TYPE>& x) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        float a[8], part = 0.0f;  // a sum for each vector: in one chain each addition would wait for the last
        x.unpack(i, a);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            part += a[j];
        }
        sum += part;
    }
    return sum;
}

// Adds c^2, g * c and g to the sums. Elements after the row's end do not count: their dy and weight are zero.
__device__ __forceinline__ void add_to(float (&sums)[3], const RowAgain<ROW_TYPE>& x, float mean,
                                       const RowAgain<ROW_TYPE>& dy, const Vector<WEIGHT_TYPE>& weight) {
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        float a[8], g[8], by[8], parts[3] = {};
        x.unpack(i, a);
        dy.unpack(i, g);
        weight.unpack(i, by);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            const float c = a[j] - mean, product = g[j] * by[j];
            parts[0] += c * c;
            parts[1] += product * c;
            parts[2] += product;
        }
        sums[0] += is_there(i) ? parts[0] : 0.0f;
        sums[1] += parts[1];
        sums[2] += parts[2];
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    layer_norm_backward(const __grid_constant__ raymoe::NormBackwardParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<2> pipe(p.work, p.inputs, shared);
    const Vector<WEIGHT_TYPE> weight(p.weight);
    GroupSums sums(pipe.sums());
    VectorGradient of_weight, of_bias;
    pipe.run([&](const Tile& tile) {
#pragma unroll 1
        for (u32 r = 0; r < tile.rows; ++r) {
            const RowAgain<ROW_TYPE> dy(p.inputs[0], tile, r);
            const RowAgain<ROW_TYPE> x(p.inputs[1], tile, r);
            const auto row = Moments::of<3>(sums, sum_of(x), [&](float mean, float(&parts)[3]) {
                add_to(parts, x, mean, dy, weight);
            });
            const float factor = rsqrtf(row.squares * ONE_OVER_HIDDEN + p.eps);
            const float along = -row.along * ONE_OVER_HIDDEN * factor * factor;
            const float middle = -row.of_g * ONE_OVER_HIDDEN * factor;
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                float a[8], g[8], by[8];
                x.unpack(i, a);
                dy.unpack(i, g);
                weight.unpack(i, by);
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    const float normed = (a[j] - row.mean) * factor;
                    of_weight.sums[i][j] += g[j] * normed;
                    of_bias.sums[i][j] += g[j];
                    a[j] = normed * along + (g[j] * by[j] * factor + middle);
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
        of_bias.store(p.partials, 1);
    }
}
