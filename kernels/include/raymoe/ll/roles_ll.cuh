// Which blocks of a launch do which of its two kinds of work: what leaves this rank, and what arrives.
//
// Stores to a link that is full stop the warps that make them, and may hold up the other loads of their multiprocessor:
// who waits for peers should sit on another one. So it is multiprocessors that are dealt out. A launch that fills the
// GPU may have a second round of blocks, and block i of that round is taken to share the multiprocessor of block i of
// the first. Only the speed counts on that.
#pragma once

#include "raymoe/dispatch/dispatch.cuh"

namespace raymoe {

struct Role {
    bool leaves;  // works on what leaves
    u32 place;    // among the multiprocessors of its kind
    u32 round;    // 0: the first block of its multiprocessor
    u32 number;   // among the blocks of its kind, the first round before the second
    u32 blocks;   // of its kind

    // `leaving` multiprocessors for what leaves, the first ones, and `arriving` for what arrives.
    __device__ __forceinline__ Role(u32 leaving, u32 arriving) {
        const u32 all = leaving + arriving;
        round = blockIdx.x < all ? 0 : 1;
        const u32 at = blockIdx.x - round * all;
        leaves = at < leaving;
        const u32 mine = leaves ? leaving : arriving;
        place = leaves ? at : at - leaving;
        number = round * mine + place;
        blocks = gridDim.x > all ? 2 * mine : mine;
    }

    // Of this warp among those of its kind.
    __device__ __forceinline__ u32 warp() const { return number * WARPS + threadIdx.x / 32; }

    __device__ __forceinline__ u32 warps() const { return blocks * WARPS; }
};

}  // namespace raymoe
