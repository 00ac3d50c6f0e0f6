// What the kernels of products share besides loading: the work of a block's warps, and what multiplying warps do around
// the tile that they multiply.
#pragma once

#include "raymoe/moe/product/loading.cuh"

namespace raymoe {

// Gives a stage back to the loading thread.
__device__ __forceinline__ void give_back(const Memory& memory, u32 turn) {
    if (threadIdx.x % 32 == 0) {
        ptx::barrier_arrive(memory.empty(turn % STAGES));
    }
}

// Multiplies a tile of N tokens and stores its results, tokens as columns of wgmma. The multiplying warps call this.
// Each kernel has its own.
template <u32 N, class Params>
__device__ __forceinline__ void multiply_tile(const Params& p, const Memory& memory, const ProductTile& tile,
                                              u32& turn);

template <u32 N, class Params>
__device__ __forceinline__ void multiply_at_most(const Params& p, const Memory& memory, const ProductTile& tile,
                                                 u32 tokens, u32& turn) {
    if (tokens == N) {
        multiply_tile<N>(p, memory, tile, turn);
    } else if constexpr (N > STEP) {
        multiply_at_most<N - STEP>(p, memory, tile, tokens, turn);
    }
}

// The tile of this turn, when the loading thread has written its record. All threads of the warp call this.
__device__ __forceinline__ ProductTile told_tile(const Memory& memory, u32 turn) {
    const u32 record = turn % 2;
    await(memory.told(record), turn / 2 & 1);
    const ptx::Bytes16 words = ptx::shared_load_16(memory.tile(record));
    const u64 more = ptx::shared_load_8(memory.tile(record) + 16);
    const ProductTile tile{static_cast<u32>(words.low),  static_cast<u32>(words.low >> 32),
                           static_cast<u32>(words.high), static_cast<u32>(words.high >> 32),
                           static_cast<u32>(more),       static_cast<u32>(more >> 32)};
    __syncwarp();  // all threads of the warp have read the record
    if (threadIdx.x % 32 == 0) {
        ptx::barrier_arrive(memory.read(record));
    }
    return tile;
}

// The same of a tile of more than COLUMN_TOKENS, tokens as rows.
template <class Params>
__device__ __forceinline__ void multiply_many_tokens(const Params& p, const Memory& memory, const ProductTile& tile,
                                                     u32& turn);

// Counts a tile whose results this warp has stored. The warp that counts the last one of a piece says that the piece
// is there. All threads of the warp call this.
__device__ __forceinline__ void tell_stored(const ProductParams& p, const Memory& memory, const ProductTile& tile) {
    __syncwarp();  // hands the stores of the warp to the thread below
    if (threadIdx.x % 32 == 0) {
        const u32 tiles = ptx::shared_load_4(memory.first_tile(p.experts)) * output_tiles(p, tile.piece);
        const u32 last = tiles * MULTIPLYING_WARPS - 1;
        if (ptx::atomic_increment_wrapping(&p.pieces->stored[tile.piece], last) == last) {
            ptx::store_release_gpu(&p.pieces->ready[tile.piece], ptx::load_8(p.dispatch));
        }
    }
}

template <class Params>
__device__ __forceinline__ void multiply_tiles(const Params& p, const ProductParams& product, const Memory& memory) {
    u32 stage_turn = 0;
    for (u32 turn = 0;; ++turn) {
        const ProductTile tile = told_tile(memory, turn);
        if (tile.rows == 0) {
            return;
        }
        bool multiplied = false;
        if constexpr (COLUMN_TOKENS < TOKENS) {
            multiplied = tile.stored > COLUMN_TOKENS;
            if (multiplied) {
                multiply_many_tokens(p, memory, tile, stage_turn);
            }
        }
        if (!multiplied) {
            multiply_at_most<COLUMN_TOKENS>(p, memory, tile, rounded_up(tile.stored, STEP), stage_turn);
        }
        if constexpr (TELLS) {
            tell_stored(product, memory, tile);
        }
    }
}

// The work of warps 9 to 11, of which product.cu has none.
struct Idle {
    static constexpr u32 WARPS = 0, ARRIVALS = 0;

    __device__ __forceinline__ void run() const {}
};

// Runs a block. `product` is `p`, or the part of it that all kernels have. `others` is what the last three warps
// do: `WARPS` of them read each record, and each stage is full after `ARRIVALS` of theirs too.
template <class Params, class Others>
__device__ __forceinline__ void run_block(const Params& p, const ProductParams& product, const Memory& memory,
                                          const Others& others) {
    if (threadIdx.x == 0) {
        trace(product.trace, AT_START);
        if (TELLS) {
            ptx::let_next_kernel_begin();
        }
        for (u32 stage = 0; stage < STAGES; ++stage) {
            ptx::barrier_init(memory.full(stage), 1 + Others::ARRIVALS);
            ptx::barrier_init(memory.empty(stage), MULTIPLYING_WARPS);
        }
        for (u32 record = 0; record < 2; ++record) {
            ptx::barrier_init(memory.told(record), 1);
            ptx::barrier_init(memory.read(record), MULTIPLYING_WARPS + Others::WARPS);
        }
        ptx::fence_barrier_init();  // orders the inits before the loads that complete on them
    }
    if (threadIdx.x / 32 == LOADING_WARP) {
        count_tiles(product, memory);
    }
    __syncthreads();  // hands the barriers and the numbers of tiles to all threads
    if (threadIdx.x < MULTIPLYING_WARPS * 32) {
        ptx::take_registers<MULTIPLYING_REGISTERS>();
        multiply_tiles(p, product, memory);
        if (threadIdx.x == 0) {
            trace(product.trace, AT_END);
        }
    } else {
        ptx::give_registers_away<OTHER_REGISTERS>();
        if (threadIdx.x == LOADING_WARP * 32) {
            load_tiles(product, memory);
        } else if (threadIdx.x / 32 > LOADING_WARP) {
            others.run();
        }
    }
}

}  // namespace raymoe
