// The warps of a block of a dispatch, and barriers of those that do the same work.
//
// A block sends or places. On few SMs (a build with MIXED_SENDERS) every block places, and some more warps of it send.
// There the two kinds of warps have a barrier each; else both are __syncthreads.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8  // a kernel or a build may define 16: then one block fills an SM
#endif
constexpr u32 WARPS = BLOCK_WARPS;
constexpr u32 THREADS = WARPS * 32;

#ifndef MIXED_SENDERS
#define MIXED_SENDERS 0  // not 0: every block places, and so many more warps of it send. For few SMs
#endif
constexpr bool MIXED = MIXED_SENDERS;
constexpr u32 ALL_THREADS = THREADS + MIXED_SENDERS * 32;  // of a block; the first THREADS count and place
constexpr u32 FIRST_SENDER = MIXED ? WARPS : 0;            // warp of a block that sends

// A barrier of the threads of a block that count and place: all of its threads, unless blocks are mixed. It orders what
// they did before.
__device__ __forceinline__ void block_barrier() {
    if constexpr (MIXED) {
        ptx::barrier_of_warps(1, THREADS);
    } else {
        __syncthreads();
    }
}

// A barrier of the threads of a block that send.
__device__ __forceinline__ void sender_barrier() {
    if constexpr (MIXED) {
        ptx::barrier_of_warps(2, MIXED_SENDERS * 32);
    } else {
        __syncthreads();
    }
}

// The same barriers, and whether `ok` is true for all their threads.
template <u32 SIZE, class Barrier>
__device__ __forceinline__ bool all_of(u32* votes, u32 warp, bool ok, Barrier barrier) {
    ok = __all_sync(0xFFFFFFFF, ok);
    if (threadIdx.x % 32 == 0) {
        votes[warp] = ok;
    }
    barrier();
    for (u32 i = 0; i < SIZE; ++i) {
        ok = ok && votes[i] != 0;
    }
    barrier();  // all threads have read the votes, which the next call overwrites
    return ok;
}

__device__ __forceinline__ bool block_barrier_and(bool ok) {
    if constexpr (MIXED) {
        __shared__ u32 votes[WARPS];
        return all_of<WARPS>(votes, threadIdx.x / 32, ok, block_barrier);
    } else {
        return __syncthreads_and(ok);
    }
}

__device__ __forceinline__ bool sender_barrier_and(bool ok) {
    if constexpr (MIXED) {
        constexpr u32 SENDERS = MIXED ? MIXED_SENDERS : 1;
        __shared__ u32 votes[SENDERS];
        return all_of<SENDERS>(votes, threadIdx.x / 32 - FIRST_SENDER, ok, sender_barrier);
    } else {
        return __syncthreads_and(ok);
    }
}

}  // namespace raymoe
