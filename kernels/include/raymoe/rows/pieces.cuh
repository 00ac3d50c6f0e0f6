// Kernels that work on each element alone: a tile is a piece of a row, or some short rows. A group is one warp, or more
// if there are few stages.
#pragma once

#include "raymoe/rows/elements.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16
#endif

#ifndef PIPE_VECTORS
#define PIPE_VECTORS 8  // the most vectors of a thread in each row of a tile
#endif
#ifndef WEIGHTED
#define WEIGHTED 0  // whether each row of a result has a weight
#endif

namespace raymoe {

constexpr u32 TOGETHER = PIPE_VECTORS < 2 ? PIPE_VECTORS : 2;  // vectors whose loads overlap

// Bounds the work to rows before `*end`, a count on the device. Without `end` all of it stays.
__device__ __forceinline__ PipeWork bounded(PipeWork work, const u8* end) {
    if (end == nullptr) {
        return work;
    }
    const int count = static_cast<int>(ptx::load_4(end));
    const u64 rows = count < 0 ? 0 : static_cast<u64>(count);
    work.rows = min(work.rows, rows);
    work.tiles = static_cast<u32>((work.rows + work.tile_rows - 1) / work.tile_rows) * work.pieces;
    return work;
}

// Calls `compute(eights, there)` for TOGETHER eights of each row of a tile at a time, numbered from the tile's left
// edge. All threads of the group call this.
template <class Compute>
__device__ __forceinline__ void for_each_vectors_of_row(const Tile& tile, Compute compute) {
#pragma unroll 1
    for (u32 begin = 0; begin < tile.eights; begin += TOGETHER * GROUP_THREADS) {
        u32 eights[TOGETHER];
        bool there[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            eights[k] = begin + k * GROUP_THREADS + thread_in_group();
            there[k] = eights[k] < tile.eights;
        }
        compute(eights, there);
    }
}

// Calls `compute(r, eights, there)` for each row of a tile, in the same way.
template <class Compute>
__device__ __forceinline__ void for_each_vectors(const Tile& tile, Compute compute) {
#pragma unroll 1
    for (u32 r = 0; r < tile.rows; ++r) {
        for_each_vectors_of_row(
            tile, [&](const u32(&eights)[TOGETHER], const bool(&there)[TOGETHER]) { compute(r, eights, there); });
    }
}

// The weight of row `r` of a tile: float32, one for each row. 1 without WEIGHTED.
__device__ __forceinline__ float weight_of_row(const u8* weights, const Tile& tile, u32 r) {
    return WEIGHTED ? __uint_as_float(ptx::load_4(weights + (tile.row + r) * 4)) : 1.0f;
}

// The logistic function, with an error of some units in the last place of a float.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

}  // namespace raymoe
