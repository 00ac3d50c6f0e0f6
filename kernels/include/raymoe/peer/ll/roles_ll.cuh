// Assigns the blocks of a launch to its two kinds of work: what leaves this rank, and what arrives.
//
// Stores to a full link stall the warps that make them, and may delay the other loads of their SM. So warps that wait
// for peers should be on other SMs, and whole SMs are assigned. A launch that fills the GPU may have a second round of
// blocks. Block i of that round is assumed to share the SM of block i of the first round. Only speed depends on that.
//
// On few SMs (a build with MIXED_ROLES) every block works on what leaves, and then on what arrives. It has twice the
// warps. What leaves waits for nothing.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"

namespace raymoe {

#ifndef MIXED_ROLES
#define MIXED_ROLES 0  // 1: every block does both kinds of work
#endif

struct Role {
    bool leaves;  // works on what leaves; else, or with MIXED_ROLES also, on what arrives
    u32 place;    // among the SMs of its kind
    u32 round;    // 0: the first block of its SM
    u32 number;   // among the blocks of its kind, the first round before the second
    u32 blocks;   // of its kind

    // The first `leaving` SMs work on what leaves, the other `arriving` SMs on what arrives.
    __device__ __forceinline__ Role(u32 leaving, u32 arriving) {
        if constexpr (MIXED_ROLES) {
            leaves = true;
            place = number = blockIdx.x;
            round = 0;
            blocks = gridDim.x;
            return;
        }
        const u32 all = leaving + arriving;
        round = blockIdx.x < all ? 0 : 1;
        const u32 at = blockIdx.x - round * all;
        leaves = at < leaving;
        const u32 mine = leaves ? leaving : arriving;
        place = leaves ? at : at - leaving;
        number = round * mine + place;
        blocks = gridDim.x > all ? 2 * mine : mine;
    }

    // The number of this warp among those of its kind.
    __device__ __forceinline__ u32 warp() const { return number * WARPS + threadIdx.x / 32; }

    __device__ __forceinline__ u32 warps() const { return blocks * WARPS; }
};

}  // namespace raymoe
