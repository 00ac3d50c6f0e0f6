// The loading thread of a product: it takes tiles, and loads their weights and tokens.
#pragma once

#include "raymoe/moe/product/product.cuh"

namespace raymoe {

// Writes the number of tiles before each expert to shared memory. The loading warp calls this.
__device__ __forceinline__ void count_tiles(const ProductParams& p, const Memory& memory) {
    const u32 lane = threadIdx.x % 32, side_by_side = TELLS ? 1 : output_tiles(p);
    u32 before = 0;
    for (u32 begin = 0; begin < p.experts; begin += 32) {
        const u32 expert = begin + lane;
        const u32 rows = ptx::load_4_if(expert < p.experts, p.expert_counts + expert * 4ull, 0);
        u32 sum = token_tiles(rows) * side_by_side;
        const u32 own = sum;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xFFFFFFFF, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (expert < p.experts) {
            ptx::shared_store_4(memory.first_tile(expert), before + sum - own);
        }
        before += __shfl_sync(0xFFFFFFFF, sum, 31);
    }
    if (lane == 0) {
        ptx::shared_store_4(memory.first_tile(p.experts), before);
    }
}

// Finds the tile of this number. `last` is the block's last one: its numbers only rise.
__device__ __forceinline__ ProductTile find_tile(const ProductParams& p, const Memory& memory, u32 number,
                                                 const ProductTile& last) {
    u32 piece = 0, side_by_side = 1;
    if constexpr (TELLS) {
        const u32 of_piece = ptx::shared_load_4(memory.first_tile(p.experts)) * p.piece_tiles;
        piece = number / of_piece;
        number -= piece * of_piece;
        side_by_side = output_tiles(p, piece);
    }
    u32 expert = piece == last.piece ? last.expert : 0;
    while (ptx::shared_load_4(memory.first_tile(expert + 1)) * side_by_side <= number) {
        ++expert;
    }
    const u32 rows = ptx::load_4(p.expert_counts + expert * 4ull), tiles = token_tiles(rows);
    const u32 start = ptx::load_4(p.expert_offsets + expert * 4ull);
    const u32 room = ptx::load_4(p.expert_offsets + expert * 4ull + 4) - start;
    const u32 within = number - ptx::shared_load_4(memory.first_tile(expert)) * side_by_side;
    // Neighbouring tiles have the same weights, so that blocks which run at once read them from the L2 cache.
    const u32 output = (piece * p.piece_tiles + within / tiles) * OUTPUTS;
    const u32 token_tile = within % tiles, steps = rounded_up(rows, STEP) / STEP;
    // Tiles of an expert are alike. Where one of many tokens costs as much as a full one, all but the last are full.
    constexpr bool full = COLUMN_TOKENS < TOKENS;
    const u32 begin = full ? token_tile * TOKENS : token_tile * steps / tiles * STEP;
    const u32 end = full ? begin + TOKENS : (token_tile + 1) * steps / tiles * STEP;
    const u32 stored = ZEROES_GAPS ? min(end, room) : min(end, rows);
    return {expert, output, start + begin, min(end, rows) - begin, stored - begin, piece};
}

struct Loader {
    const ProductParams& p;
    const Memory memory;
    u32 turn = 0;  // of the stages

    // Loads a tile, and returns the number of the next one. It is taken near the end, so that blocks begin tiles in the
    // order of their numbers: those that share weights then read them at about the same time, once from memory.
    __device__ __forceinline__ u32 load(const ProductTile& tile, u64 weights_policy, u64 tokens_policy) {
        const u32 rows = loaded_tokens(tile), bytes = WEIGHT_BYTES + rows * ROW_BYTES;
        u32 next = 0;
        for (u32 column = 0; column < p.columns; column += COLUMNS, ++turn) {
            const u32 stage = turn % STAGES, barrier = memory.full(stage);
            await(memory.empty(stage), (turn / STAGES + 1) & 1);
            ptx::barrier_expect(barrier, bytes);
            load_weights(tile, column, memory.weights(stage), barrier, weights_policy);
            load_tokens(tile.row, rows, column, memory.tokens(stage), barrier, tokens_policy);
            const bool last = column + COLUMNS >= p.columns;
            if (last ? column == 0 : column + 2 * COLUMNS >= p.columns) {  // the last step but one
                // Blocks increment the counter once for each tile.
                next = ptx::blocks() + ptx::atomic_increment_wrapping_relaxed(p.taken, tiles() - 1);
            }
        }
        return next;
    }

    // The number of tiles.
    __device__ __forceinline__ u32 tiles() const {
        return ptx::shared_load_4(memory.first_tile(p.experts)) * (TELLS ? output_tiles(p) : 1);
    }

    // Loads both halves of the weights. Transposed ones have a box for each 64 outputs, which are its pieces.
    __device__ __forceinline__ void load_weights(const ProductTile& tile, u32 column, u32 shared, u32 barrier,
                                                 u64 policy) {
        if constexpr (TRANSPOSED) {
            constexpr u32 BOX_BYTES = COLUMNS * PIECE_BYTES;
#pragma unroll 1
            for (u32 box = 0; box < WEIGHT_BYTES / BOX_BYTES; ++box) {
                ptx::tensor_load_3d(shared + box * BOX_BYTES, p.first, tile.output + box * PIECE, column, tile.expert,
                                    barrier, policy);
            }
        } else {
            const u32 second = GATED ? tile.output : tile.output + HALF_ROWS;
            ptx::tensor_load_3d(shared, p.first, column, tile.output, tile.expert, barrier, policy);
            ptx::tensor_load_3d(shared + HALF_BYTES, p.second, column, second, tile.expert, barrier, policy);
        }
    }

    // Loads a multiple of 8 rows by boxes of 64, 32, 16 and 8.
    __device__ __forceinline__ void load_tokens(u32 row, u32 rows, u32 column, u32 shared, u32 barrier, u64 policy) {
        for (; rows >= 64; rows -= 64, row += 64, shared += 64 * ROW_BYTES) {
            ptx::tensor_load_2d(shared, p.tokens[0], column, row, barrier, policy);
        }
#pragma unroll
        for (u32 map = 1; map < 4; ++map) {
            const u32 box = 64u >> map;
            if (rows & box) {
                ptx::tensor_load_2d(shared, p.tokens[map], column, row, barrier, policy);
                row += box;
                shared += box * ROW_BYTES;
            }
        }
    }
};

// Takes tiles until there are none, and loads them.
__device__ __forceinline__ void load_tiles(const ProductParams& p, const Memory& memory) {
    const u64 once = ptx::evict_first_policy(), again = ptx::evict_last_policy();
    Loader loader{p, memory};
    u32 number = blockIdx.x;
    ProductTile last{};
    for (u32 turn = 0;; ++turn) {
        const u32 record = turn % 2;
        const bool there = number < loader.tiles();
        const ProductTile tile = there ? find_tile(p, memory, number, last) : ProductTile{};
        last = tile;
        await(memory.read(record), (turn / 2 + 1) & 1);
        ptx::shared_store_16(memory.tile(record), {tile.expert | static_cast<u64>(tile.output) << 32,
                                                   tile.row | static_cast<u64>(tile.rows) << 32});
        ptx::shared_store_8(memory.tile(record) + 16, tile.stored | static_cast<u64>(tile.piece) << 32);
        ptx::barrier_arrive(memory.told(record));
        if (!there) {
            return;
        }
        const bool alone = ptx::load_4(p.expert_counts + tile.expert * 4ull) <= TOKENS;
        number = loader.load(tile, alone ? once : again, again);
    }
}

}  // namespace raymoe
