// The lanes of a copy: what the kernel is given for each, who works on which, and how a run of one begins and ends.
//
// The protocol is told in kernels/copy.cu, the order of each word where it is declared here.
#pragma once

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

constexpr u32 COPY_LANES = 32;

struct CopyLane {
    u8* dst;
    const u8* src;
    u64 bytes;

    Operation* operation;  // null: copy only, no word below is touched

    // Writer: the peer, by a release at system scope of its own epoch, when this rank may begin (its buffer may be
    // written, or read). Reader: each thread here that leads a part of the lane, acquiring. Only grows, never reset: a
    // replay finds its next value by this rank's own count, and a peer that is one run ahead is as good. Null: nothing
    // to wait for.
    const u64* credit;
    u64 lag;  // epochs that the credit may be behind: 0, or the number of buffers that need no credit at first

    // In the peer's memory. Writer: the last part out here. Reader: the peer, acquiring, by the same rules; it bulk
    // copies what the word announces only after a proxy fence. Null: nobody is told.
    u64* signal;

    u32 op;  // for the error record
    u32 peer;
    u32 first;  // the lane's blocks are [first, first + blocks); a lane without bytes has none
    u32 blocks;
};

struct CopyParams {
    CopyLane lanes[COPY_LANES];
    Watch watch;  // poison is null: no wait, and nothing to be poisoned by
    u32 count;    // lanes
    u32 movers;   // blocks that move bytes; where lanes have none, one more block follows them
    u32 stages;
    u32 stage_bytes;
    u32 pace_ns;  // from one store of a ring to the next, on average; 0: as fast as they go
};

__device__ __forceinline__ u64 min_of(u64 a, u64 b) {
    return a < b ? a : b;
}

__device__ __forceinline__ bool is_of_this_block(const CopyLane& lane) {
    return lane.bytes != 0 && blockIdx.x - lane.first < lane.blocks;
}

__device__ __forceinline__ bool alike(const CopyLane& lane) {
    return ((reinterpret_cast<u64>(lane.dst) ^ reinterpret_cast<u64>(lane.src)) & 15) == 0;
}

__device__ __forceinline__ u64 head_of(const CopyLane& lane) {
    return min_of((0 - reinterpret_cast<u64>(lane.dst)) & 15, lane.bytes);
}

__device__ __forceinline__ bool has_ends(const CopyLane& lane) {
    return ((reinterpret_cast<u64>(lane.dst) | lane.bytes) & 15) != 0;
}

// How many threads do a part of a lane with bytes, each of which takes a ticket.
__device__ __forceinline__ u32 parts_of(const CopyLane& lane) {
    return lane.blocks + (alike(lane) && has_ends(lane) ? 1 : 0);
}

enum class Gate { OPEN, SHUT, STOPPED };

// Whether a run may begin. The words are all loaded before the first is looked at: each is a trip to the L2 cache, and
// a small message is mostly such trips.
__device__ __forceinline__ Gate look(const CopyParams& p, const CopyLane& lane, u64& epoch) {
    epoch = lane.operation == nullptr ? 0 : epoch_of_this_run(lane.operation);
    const bool stopped = poisoned(p.watch);
    const u64 credit = lane.credit == nullptr ? ~0ull : ptx::load_acquire_sys(lane.credit);
    if (stopped) {
        return Gate::STOPPED;
    }
    return credit + lane.lag >= epoch || lane.credit == nullptr ? Gate::OPEN : Gate::SHUT;
}

// Waits where it may not begin yet.
__device__ __forceinline__ bool may_begin(const CopyParams& p, const CopyLane& lane, u64& epoch) {
    const Gate gate = look(p, lane, epoch);
    return gate == Gate::OPEN || (gate == Gate::SHUT && wait_for_epoch(lane.credit, epoch - lane.lag,
                                                                       Waiting{lane.op, lane.peer, epoch}, p.watch));
}

// By the last part out of a run that moved all its bytes. The release orders these bytes (of every part, by the ticket)
// before the epoch that announces them.
__device__ __forceinline__ void finish_lane(const CopyLane& lane, u64 epoch) {
    if (lane.signal != nullptr) {
        ptx::store_release_sys(lane.signal, epoch);
    }
    finish_run(lane.operation, epoch);
}

// By the thread that leads a part, when the part is done and its stores have arrived. Every part takes its ticket, also
// where it may not move, so that tickets always wrap. A part that is alone needs none.
__device__ __forceinline__ void finish_part(const CopyParams& p, const CopyLane& lane, u64 epoch, bool moved) {
    if (lane.operation == nullptr) {
        return;
    }
    const u32 last = parts_of(lane) - 1;
    if (last == 0 ? moved
                  : ptx::atomic_increment_wrapping(&lane.operation->ticket, last) == last && !poisoned(p.watch)) {
        finish_lane(lane, epoch);
    }
}

}  // namespace raymoe
