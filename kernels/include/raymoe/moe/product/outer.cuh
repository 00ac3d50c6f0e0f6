// The parameters, tiles, shared memory and loads of outer_product.cu, which describes them.
#pragma once

#include "raymoe/moe/product/operands.cuh"

namespace raymoe {

#ifdef ADDS_RESULTS
constexpr bool ADDS = true;
#else
constexpr bool ADDS = false;
#endif

constexpr u32 TILE_OUTPUTS = 128, TILE_COLUMNS = 256;
constexpr u32 ROWS = 64;  // of a stage, and of a box
constexpr u32 STAGES = 4, BOX_BYTES = ROWS * PIECE_BYTES, DY_BYTES = TILE_OUTPUTS / PIECE * BOX_BYTES;
constexpr u32 STAGE_BYTES = DY_BYTES + TILE_COLUMNS / PIECE * BOX_BYTES;

// The maps have four dimensions: columns of a row, CLIPPED rows, rows, and 2^34 bytes less than a row. Row r of an
// expert that ends before row `end` is at row CLIPPED - count + r of the second dimension, at `end` of the third and at
// CLIPPED of the fourth. The address is that of its row, because those of the second and the fourth cancel out modulo
// 2^64, up to r - count rows. The second dimension ends after row count - 1: loads give zeros for later rows.
constexpr u32 CLIPPED = 1u << 30;

struct OuterParams {
    EncodedMap dy;  // [rows][outputs], boxes of 64 rows and 64 outputs
    EncodedMap x;   // [rows][columns], boxes of 64 rows and 64 columns
    const u8* expert_offsets;  // u32[experts + 1]: the first row of each expert
    const u8* expert_counts;   // u32[experts]: its rows
    u8* d_weight;              // [experts][outputs][columns]; ADDS_RESULTS: of float
    u32* taken;                // the counter of tiles
    u32 experts;
    u32 outputs;  // a multiple of 8
    u32 columns;  // a multiple of 8
    u32 unused[5];  // up to a multiple of 64 bytes
};

// A tile as the loading thread describes it.
struct OuterTile {
    u32 expert;  // p.experts: there is no tile any more
    u32 output;  // its first one
    u32 column;  // its first one
    u32 rows;    // of the expert
};

__device__ __forceinline__ u32 stages_of(u32 rows) { return (rows + ROWS - 1) / ROWS; }

// The columns that are multiplied.
__device__ __forceinline__ u32 columns_of(const OuterParams& p, const OuterTile& tile) {
    return min(TILE_COLUMNS, rounded_up(p.columns - tile.column, PIECE));
}

// Shared memory.
struct OuterMemory {
    u32 begin;  // a multiple of 1024

    __device__ __forceinline__ u32 dy(u32 stage) const { return begin + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 x(u32 stage) const { return dy(stage) + DY_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return begin + STAGES * STAGE_BYTES + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(STAGES) + stage * 8; }
    __device__ __forceinline__ u32 told(u32 record) const { return empty(STAGES) + record * 8; }
    __device__ __forceinline__ u32 read(u32 record) const { return told(2) + record * 8; }
    __device__ __forceinline__ u32 tile(u32 record) const { return read(2) + record * 16; }
};

// Prefetches the floats that the results of a tile are added to. The loading thread calls this.
__device__ __forceinline__ void prefetch_sums(const OuterParams& p, const OuterTile& tile) {
    if constexpr (ADDS) {
        const u32 outputs = min(TILE_OUTPUTS, p.outputs - tile.output);
        const u64 first = static_cast<u64>(tile.expert) * p.outputs + tile.output;
        const u8* at = p.d_weight + (first * p.columns + tile.column) * 4;
        for (u32 output = 0; output < outputs && tile.rows != 0; ++output, at += p.columns * 4ull) {
            ptx::prefetch_if(true, at, min(TILE_COLUMNS, p.columns - tile.column) * 4);
        }
    }
}

// Loads all stages of a tile. The loading thread calls this; `turn` counts the stages.
__device__ __forceinline__ void load_tile(const OuterParams& p, const OuterMemory& memory, const OuterTile& tile,
                                          u64 policy, u32& turn) {
    const u32 end = ptx::load_4(p.expert_offsets + tile.expert * 4ull) + tile.rows;
    const u32 boxes = columns_of(p, tile) / PIECE, bytes = DY_BYTES + boxes * BOX_BYTES;
    prefetch_sums(p, tile);
    for (u32 row = 0; row < tile.rows; row += ROWS, ++turn) {
        const u32 stage = turn % STAGES, barrier = memory.full(stage), clipped = CLIPPED - tile.rows + row;
        await(memory.empty(stage), (turn / STAGES + 1) & 1);
        ptx::barrier_expect(barrier, bytes);
#pragma unroll
        for (u32 box = 0; box < TILE_OUTPUTS / PIECE; ++box) {
            ptx::tensor_load_4d(memory.dy(stage) + box * BOX_BYTES, p.dy, tile.output + box * PIECE, clipped, end,
                                CLIPPED, barrier, policy);
        }
        for (u32 box = 0; box < boxes; ++box) {
            ptx::tensor_load_4d(memory.x(stage) + box * BOX_BYTES, p.x, tile.column + box * PIECE, clipped, end,
                                CLIPPED, barrier, policy);
        }
    }
}

}  // namespace raymoe
