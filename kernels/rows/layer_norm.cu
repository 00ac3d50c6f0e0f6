// LayerNorm of rows: y = (x - mean) / sqrt(variance + eps) * weight + bias.
//
// A group of warps holds a row in registers (rows/rows.cuh). The variance is the mean of (x - mean)^2, so it takes a
// second sum over the registers: the difference of two large sums would lose it where the mean is far from zero. For
// the same reason the mean is subtracted from x before anything is multiplied.
//
// Rows come and leave through the stages of rows/pipe.cuh; y takes the place of x. With FP8 it leaves as 8-bit floats,
// quantised from float32, by ordinary stores.

#include "raymoe/rows/norm.cuh"

#ifndef BIAS
#define BIAS 0
#endif

namespace raymoe {

__device__ __forceinline__ float sum_of(const Part<ROW_TYPE>& x) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        float values[8], part = 0.0f;  // a sum for each vector: in one chain each addition would wait for the last
        x.eights[i].unpack(values);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            part += values[j];
        }
        sum += part;
    }
    return sum;
}

// Sums (x - mean)^2. Elements after the row's end do not count.
__device__ __forceinline__ float sum_of_squares(const Part<ROW_TYPE>& x, float mean) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        float values[8], part = 0.0f;
        x.again(i, values);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            part += (values[j] - mean) * (values[j] - mean);
        }
        sum += is_there(i) ? part : 0.0f;
    }
    return sum;
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    layer_norm(const __grid_constant__ raymoe::NormParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<1> pipe(p.work, p.inputs, shared);
    const Vector<WEIGHT_TYPE> weight(p.weight);
    // The bias stays in registers, unless quantising needs them, or fewer of them let more blocks fit on an SM.
    const Vector<WEIGHT_TYPE, !FP8 && (LOADING != Loading::ROW || !SHARES_SM)> bias(BIAS ? p.bias : p.weight);
    GroupSums sums(pipe.sums());
    pipe.run([&](const Tile& tile) {
#pragma unroll 1
        for (u32 r = 0; r < tile.rows; ++r) {
            const Part<ROW_TYPE> x = Part<ROW_TYPE>::of_row(p.inputs[0], tile, r);
            const auto row = Moments::of<1>(sums, sum_of(x), [&](float mean, float(&parts)[1]) {
                parts[0] = sum_of_squares(x, mean);
            });
            const float factor = rsqrtf(row.squares * ONE_OVER_HIDDEN + p.eps);
            put_results(p, tile, r, [&](u32 i, float (&y)[8]) {
                float by[8], more[8];
                x.again(i, y);
                weight.unpack(i, by);
                if constexpr (BIAS) {
                    bias.unpack(i, more);
                }
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    y[j] = (y[j] - row.mean) * factor * by[j] + (BIAS ? more[j] : 0.0f);
                }
            });
        }
        if constexpr (FP8) {
            pipe.give_back(tile);
        } else {
            pipe.store(tile, [&] { store_tile(p.outputs[0], tile); });
        }
    });
}
