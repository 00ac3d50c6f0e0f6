// SwiGLU of rows: out = silu(gate) * up, where a row holds its gate, then its up. Both halves are inputs of their own.
//
// With `end`, a count on the device, only rows before it are computed and take time: the rows of experts end there.
// Rows from it on are not written.
//
// With WEIGHTED, out = weight * silu(gate) * up, where each row has a weight in float32. It is rounded once.
//
// A group computes a piece of a row (rows/pieces.cuh); the result takes the gate's place in the stage. With FP8 it
// leaves as 8-bit floats, quantised from float32, by ordinary stores.

#include "raymoe/rows/pieces.cuh"

#ifndef FP8
#define FP8 0
#endif

namespace raymoe {

static_assert(!FP8 || !WEIGHTED, "8-bit results have no weights");

struct SwigluParams {
    PipeRows inputs[2];  // gate; up
    PipeRows out;        // unused if results are quantised; it has the offset of the gate
    PipeFp8 fp8;
    PipeWork work;
    const u8* end;      // int32, or null
    const u8* weights;  // float32 [rows], with WEIGHTED
};

__device__ __forceinline__ void swiglu_of(const Elements<ROW_TYPE>& gate, const Elements<ROW_TYPE>& up,
                                          float (&into)[8]) {
    float g[8], u[8];
    gate.unpack(g);
    up.unpack(u);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        into[j] = g[j] * sigmoid(g[j]) * u[j];
    }
}

__device__ __forceinline__ void put_row(const SwigluParams& p, const Tile& tile, u32 r) {
    const float weight = weight_of_row(p.weights, tile, r);
    for_each_vectors_of_row(tile, [&](const u32(&eights)[TOGETHER], const bool(&there)[TOGETHER]) {
        Elements<ROW_TYPE> gate[TOGETHER], up[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            gate[k] = take<ROW_TYPE>(p.inputs[0], tile, r, eights[k], there[k]);
            up[k] = take<ROW_TYPE>(p.inputs[1], tile, r, eights[k], there[k]);
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            float values[8];
            swiglu_of(gate[k], up[k], values);
            if constexpr (WEIGHTED) {
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    values[j] *= weight;
                }
            }
            if (there[k]) {
                put(Elements<ROW_TYPE>::pack(values), p.out, tile, r, eights[k]);
            }
        }
    });
}

__device__ __forceinline__ void put_rows(const SwigluParams& p, const Tile& tile) {
#pragma unroll 1
    for (u32 r = 0; r < tile.rows; ++r) {
        put_row(p, tile, r);
    }
}

__device__ __forceinline__ void quantise_rows(const SwigluParams& p, const Tile& tile) {
    const u32 thread = thread_in_group();
#pragma unroll 1
    for (u32 r = 0; r < tile.rows; ++r) {
        float values[PIPE_VECTORS][8];
#pragma unroll
        for (u32 i = 0; i < PIPE_VECTORS; ++i) {
            const u32 eight = i * GROUP_THREADS + thread;
            const bool there = eight < tile.eights;
            swiglu_of(take<ROW_TYPE>(p.inputs[0], tile, r, eight, there),
                      take<ROW_TYPE>(p.inputs[1], tile, r, eight, there), values[i]);
        }
        quantise_row<PIPE_VECTORS>(p.fp8, tile.row + r, tile.first + thread, GROUP_THREADS, tile.first + tile.eights,
                                    [&](u32 i, float (&into)[8]) {
#pragma unroll
                                        for (u32 j = 0; j < 8; ++j) {
                                            into[j] = values[i][j];
                                        }
                                    });
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    swiglu(const __grid_constant__ raymoe::SwigluParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<2> pipe(bounded(p.work, p.end), p.inputs, shared);
    pipe.run([&](const Tile& tile) {
        if constexpr (FP8) {
            quantise_rows(p, tile);
            pipe.give_back(tile);
        } else {
            put_rows(p, tile);
            pipe.store(tile, [&] { store_tile(p.out, tile); });
        }
    });
}
