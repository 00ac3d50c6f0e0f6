// The shared parts of the norms' forward kernels: their parameters, and how they store the results of a row.
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
    PipeRows outputs[2];  // y, unused if quantised; x + residual. They have the offsets of the inputs
    PipeWork work;
    PipeFp8 fp8;
};

// Stores row `r` of a tile, whose elements `value(i, into)` computes: as 8-bit floats, or where `put` stores.
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
