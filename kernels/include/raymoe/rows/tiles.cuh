// Rows of tensors cut into tiles: where a tile lies in global memory, and bulk copies between there and a stage.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// Rows of a tensor. An input's tiles lie at `offset` of each stage, and so does an output that is stored out of there.
struct PipeRows {
    u8* at;
    u64 stride;       // bytes from row to row
    u32 eight_bytes;  // bytes of eight elements
    u32 offset;
};

struct PipeWork {
    u64 rows;
    u32* taken;  // DYNAMIC: the counter of tiles
    u32 tiles;
    u32 tile_rows;  // the most rows of a tile; 1 if a row has several pieces
    u32 pieces;     // pieces of a row
    u32 piece;      // eights (eight elements) of a piece; the last one may be shorter
    u32 width;      // eights of a row
    u32 stage_bytes;
};

struct Tile {
    u64 row;
    u32 rows;
    u32 first;   // its first eight in each row
    u32 eights;  // its eights in each row
    u32 stage;   // the shared address of its stage
    u32 turn;
};

__device__ __forceinline__ Tile tile_of(const PipeWork& work, u32 number) {
    u32 rows = number, piece = 0;
    if (work.pieces != 1) {
        rows = number / work.pieces;
        piece = number - rows * work.pieces;
    }
    const u64 row = static_cast<u64>(rows) * work.tile_rows, left = work.rows - row;
    const u32 first = piece * work.piece;
    return {row, left < work.tile_rows ? static_cast<u32>(left) : work.tile_rows, first,
            min(work.piece, work.width - first), 0, 0};
}

// The first byte of a tile in global memory.
__device__ __forceinline__ u8* in_global(const PipeRows& rows, const Tile& tile) {
    return rows.at + tile.row * rows.stride + static_cast<u64>(tile.first) * rows.eight_bytes;
}

__device__ __forceinline__ u32 bytes_of(const PipeRows& rows, const Tile& tile) {
    return tile.rows * tile.eights * rows.eight_bytes;
}

// Calls `copy(global, offset in the tile, bytes)` for each run of bytes of a tile that is contiguous at both ends.
template <class Copy>
__device__ __forceinline__ void for_each_run(const PipeRows& rows, const Tile& tile, Copy copy) {
    u8* const at = in_global(rows, tile);
    const u32 row_bytes = tile.eights * rows.eight_bytes;
    if (tile.rows == 1 || rows.stride == row_bytes) {
        copy(at, 0, tile.rows * row_bytes);
        return;
    }
#pragma unroll 1
    for (u32 r = 0; r < tile.rows; ++r) {
        copy(at + r * rows.stride, r * row_bytes, row_bytes);
    }
}

// Begins bulk stores of the tile out of its stage.
__device__ __forceinline__ void store_tile(const PipeRows& rows, const Tile& tile) {
    for_each_run(rows, tile, [&](u8* global, u32 offset, u32 bytes) {
        ptx::bulk_store(global, tile.stage + rows.offset + offset, bytes);
    });
}

__device__ __forceinline__ void load_tile(const PipeRows& rows, const Tile& tile, u32 barrier) {
    for_each_run(rows, tile, [&](const u8* global, u32 offset, u32 bytes) {
        ptx::bulk_load(tile.stage + rows.offset + offset, global, bytes, barrier);
    });
}

}  // namespace raymoe
