// RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight.
//
// With ADD, h = x + residual takes the place of x, rounded to the type of rows, and is stored too.
// With FP8, y leaves as 8-bit floats with a scale for each 128 elements. It is quantised from float32, not from rounded
// results.
//
// A group of warps holds a row in registers from its sum to its results (rows/rows.cuh). Rows come and leave through
// the stages of rows/pipe.cuh; y takes the place of x in the stage, and h that of the residual. 8-bit floats are stored
// by ordinary stores: a row of them need not be a multiple of the 16 bytes that bulk copies move.

#include "raymoe/rows/norm.cuh"

#ifndef ADD
#define ADD 0
#endif

namespace raymoe {

constexpr u32 INPUTS = ADD ? 2 : 1;

// Adds the residual to x and puts the sum in its place, some vectors at a time: their loads overlap, and the whole
// residual would need as many registers as x.
__device__ __forceinline__ void add_residual(const NormParams& p, const Tile& tile, u32 r, Part<ROW_TYPE>& x) {
    constexpr u32 TOGETHER = 4;
#pragma unroll
    for (u32 begin = 0; begin < VECTORS; begin += TOGETHER) {
        Elements<ROW_TYPE> residual[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER && begin + k < VECTORS; ++k) {
            const u32 i = begin + k;
            residual[k] = take<ROW_TYPE>(p.inputs[1], tile, r, eight_of(i), is_there(i));
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER && begin + k < VECTORS; ++k) {
            const u32 i = begin + k;
            float a[8], b[8];
            x.eights[i].unpack(a);
            residual[k].unpack(b);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                a[j] += b[j];
            }
            x.eights[i] = Elements<ROW_TYPE>::pack(a);
            if (is_there(i)) {
                put(x.eights[i], p.outputs[1], tile, r, eight_of(i));
            }
        }
    }
}

__device__ __forceinline__ float sum_of_squares(const Part<ROW_TYPE>& x) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        float values[8], part = 0.0f;  // a sum for each vector: in one chain each addition would wait for the last
        x.eights[i].unpack(values);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            part += values[j] * values[j];
        }
        sum += part;
    }
    return sum;
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    rms_norm(const __grid_constant__ raymoe::NormParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<INPUTS> pipe(p.work, p.inputs, shared);
    // A block of one row loads the weight when it has the sum: with fewer registers, more blocks fit on an SM.
    const Vector<WEIGHT_TYPE, LOADING != Loading::ROW> weight(p.weight);
    GroupSums sums(pipe.sums());
    pipe.run([&](const Tile& tile) {
#pragma unroll 1
        for (u32 r = 0; r < tile.rows; ++r) {
            Part<ROW_TYPE> x = Part<ROW_TYPE>::of_row(p.inputs[0], tile, r);
            if constexpr (ADD) {
                add_residual(p, tile, r, x);
            }
            float sum[1] = {sum_of_squares(x)};
            sums.add(sum);
            const float factor = rsqrtf(sum[0] * ONE_OVER_HIDDEN + p.eps);
            const auto normed = [&](u32 i, float (&y)[8]) {
                float by[8];
                x.again(i, y);
                weight.unpack(i, by);
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    y[j] = y[j] * factor * by[j];
                }
            };
            put_results(p, tile, r, normed);
        }
        if constexpr (FP8 && !ADD) {
            pipe.give_back(tile);
        } else {
            pipe.store(tile, [&] {
                if constexpr (!FP8) {
                    store_tile(p.outputs[0], tile);
                }
                if constexpr (ADD) {
                    store_tile(p.outputs[1], tile);
                }
            });
        }
    });
}
