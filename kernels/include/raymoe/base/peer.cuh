// Addresses in the heaps of peers.
//
// A region has the same offset on every rank. An address at a peer is the base of that peer's mapping, plus the
// region's offset, plus the place in the region. Kernel parameters hold offsets, and bases come only from `Peers`, so
// no struct mixes pointers of two ranks.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 MAX_RANKS = 16;  // GPUs of one host, all linked to one another; in practice 8 at most

struct Peers {
    u64 base[MAX_RANKS];  // where the heap of each rank is mapped here; the own heap: its own address
    u32 rank;
    u32 ranks;

    template <class T>
    __device__ __forceinline__ T* at(u32 peer, u64 offset) const {
        return reinterpret_cast<T*>(base[peer] + offset);
    }

    // Slot `index` of a region whose slots are `slot_bytes` apart.
    __device__ __forceinline__ u8* slot(u32 peer, u64 offset, u64 index, u64 slot_bytes) const {
        return at<u8>(peer, offset + index * slot_bytes);
    }

    // The flag that this rank writes at a peer. Flags of different writers are 128 bytes apart.
    __device__ __forceinline__ u64* flag(u32 peer, u64 offset) const {
        return at<u64>(peer, offset + static_cast<u64>(rank) * 128);
    }

    // The flag that a peer writes here.
    __device__ __forceinline__ u64* flag_of(u32 peer, u64 offset) const {
        return at<u64>(rank, offset + static_cast<u64>(peer) * 128);
    }

    // The `step`-th peer in the order in which this rank serves them. Each rank begins with the next rank, so not all
    // ranks store to the same peer at once. The last step is this rank itself.
    __device__ __forceinline__ u32 in_turn(u32 step) const {
        const u32 peer = rank + 1 + step;
        return peer >= ranks ? peer - ranks : peer;
    }
};
static_assert(sizeof(Peers) == MAX_RANKS * 8 + 8, "");

}  // namespace raymoe
