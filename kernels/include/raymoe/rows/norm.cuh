// The shared parts of the norms' forward kernels: their parameters, and how a row's results leave.
#pragma once

#include "raymoe/rows/rows.cuh"

#ifndef FP8
#define FP8 0  // 1: results leave as 8-bit floats with scales
#endif

namespace raymoe {

// The fields that every norm reads come first: a block waits for each line of parameters that it reads.
struct NormParams {
    const u8* weight;  // [HIDDEN]
    const u8* bias;    // [HIDDEN], or null
    float eps;
    u32 unused;
    PipeRows inputs[2];   // x; residual
    PipeRows outputs[2];  // y, if it is not quantised; x + residual. Each has the offset of its input
    PipeWork work;
    PipeFp8 fp8;
};

// Puts row `r` of a tile, whose elements `value(i, into)` computes, where it leaves from.
template <class Value>
__device__ __forceinline__ void put_results(const NormParams& p, const Tile& tile, u32 r, Value value) {
    if constexpr (FP8) {
        quantise_row<VECTORS>(p.fp8, tile.row + r, thread_in_group(), GROUP_THREADS, ROW_EIGHTS, value);
    } else {
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            float y[8];
            value(i, y);
            if (is_there(i)) {
                put(Elements<ROW_TYPE>::pack(y), p.outputs[0], tile, r, eight_of(i));
            }
        }
    }
}

}  // namespace raymoe
