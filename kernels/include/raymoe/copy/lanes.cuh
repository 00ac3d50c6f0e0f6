// The lanes of a copy: their parameters, the threads that work on them, and how a run of a lane begins and ends.
//
// copy.cu describes the protocol. Each word's writer, reader and order are given below, where it is declared.
#pragma once

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

constexpr u32 COPY_LANES = 32;

struct CopyLane {
    u8* dst;
    const u8* src;
    u64 bytes;

    Operation* operation;  // null: copy only, the words below are not used

    // Writer: the peer, by a release at system scope of its own epoch, when this rank may begin (its buffer may be
    // written, or read). Reader: each thread here that leads a part of the lane, by an acquire. It only grows and is
    // never reset: a replay computes its next value from this rank's own count, and a peer may be one run ahead. Null:
    // nothing to wait for.
    const u64* credit;
    u64 lag;  // epochs that the credit may be behind: 0, or the number of buffers that need no credit at first

    // In the peer's memory. Writer: the last part out here. Reader: the peer, by an acquire, with the same rules. It
    // runs a proxy fence before it bulk copies the announced bytes. Null: no signal.
    u64* signal;

    u32 op;  // for the error record
    u32 peer;
    u32 first;  // the lane's blocks are [first, first + blocks); a lane without bytes has none
    u32 blocks;
};

struct CopyParams {
    CopyLane lanes[COPY_LANES];
    Watch watch;  // poison is null: the copy waits for nothing and cannot be poisoned
    u32 count;    // lanes
    u32 movers;   // blocks that move bytes; one more block follows if there are lanes without bytes
    u32 stages;
    u32 stage_bytes;
    u32 pace_ns;  // average time from one store of a ring to the next; 0: no pace
};

__device__ __forceinline__ u64 min_of(u64 a, u64 b) {
    return a < b ? a : b;
}

__device__ __forceinline__ bool is_of_this_block(const CopyLane& lane) {
    return lane.bytes != 0 && blockIdx.x - lane.first < lane.blocks;
}

__device__ __forceinline__ bool same_alignment(const CopyLane& lane) {
    return ((reinterpret_cast<u64>(lane.dst) ^ reinterpret_cast<u64>(lane.src)) & 15) == 0;
}

__device__ __forceinline__ u64 head_of(const CopyLane& lane) {
    return min_of((0 - reinterpret_cast<u64>(lane.dst)) & 15, lane.bytes);
}

__device__ __forceinline__ bool has_ends(const CopyLane& lane) {
    return ((reinterpret_cast<u64>(lane.dst) | lane.bytes) & 15) != 0;
}

// The number of parts of a lane with bytes. Each is led by one thread, which takes a ticket.
__device__ __forceinline__ u32 parts_of(const CopyLane& lane) {
    return lane.blocks + (same_alignment(lane) && has_ends(lane) ? 1 : 0);
}

enum class Gate { OPEN, SHUT, STOPPED };

// Whether a run may begin. All words are loaded before the first is tested: each load takes a trip to the L2 cache, and
// such trips are most of the time of a small message.
__device__ __forceinline__ Gate gate_of(const CopyParams& p, const CopyLane& lane, u64& epoch) {
    epoch = lane.operation == nullptr ? 0 : epoch_of_this_run(lane.operation);
    const bool stopped = poisoned(p.watch);
    const u64 credit = lane.credit == nullptr ? ~0ull : ptx::load_acquire_sys(lane.credit);
    if (stopped) {
        return Gate::STOPPED;
    }
    return credit + lane.lag >= epoch || lane.credit == nullptr ? Gate::OPEN : Gate::SHUT;
}

// Waits until a run may begin. False: the wait failed, or the watch was poisoned.
__device__ __forceinline__ bool may_begin(const CopyParams& p, const CopyLane& lane, u64& epoch) {
    const Gate gate = gate_of(p, lane, epoch);
    return gate == Gate::OPEN || (gate == Gate::SHUT && wait_for_epoch(lane.credit, epoch - lane.lag,
                                                                       Waiting{lane.op, lane.peer, epoch}, p.watch));
}

// The last part out of a run calls this, when all bytes are moved. The release orders the bytes of all parts (acquired
// with the ticket) before the epoch that announces them.
__device__ __forceinline__ void finish_lane(const CopyLane& lane, u64 epoch) {
    if (lane.signal != nullptr) {
        ptx::store_release_sys(lane.signal, epoch);
    }
    finish_run(lane.operation, epoch);
}

// The thread that leads a part calls this when the part is done and its stores have arrived. Every part takes a ticket,
// even if it may not move bytes, so that tickets always wrap. A lane with one part needs no ticket.
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
