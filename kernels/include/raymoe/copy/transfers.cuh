// The transfers of a copy: their parameters, the threads that work on them, and how a run of one begins and ends.
//
// copy.cu describes the protocol. Each word's writer, reader and order are given below, where it is declared.
#pragma once

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

constexpr u32 MOST_TRANSFERS = 32;

struct Transfer {
    u8* dst;
    const u8* src;
    u64 bytes;

    Operation* operation;  // null: copy only, the words below are not used

    // Writer: the peer, by a release at system scope of its own epoch, when this rank may begin (its buffer may be
    // written, or read). Reader: each thread here that leads a part of the transfer, by an acquire. It only grows and
    // is never reset: a replay computes its next value from this rank's own count, and a peer may be one run ahead.
    // Null: nothing to wait for.
    const u64* credit;
    u64 lag;  // epochs that the credit may be behind: 0, or the number of buffers that need no credit at first

    // In the peer's memory. Writer: the last part out here. Reader: the peer, by an acquire, with the same rules. It
    // runs a proxy fence before it bulk copies the announced bytes. Null: no signal.
    u64* signal;

    u32 op;  // for the error record
    u32 peer;
    u32 first;  // the transfer's blocks are [first, first + blocks); a transfer without bytes has none
    u32 blocks;
};

struct CopyParams {
    Transfer transfers[MOST_TRANSFERS];
    Watch watch;  // poison is null: the copy waits for nothing and cannot be poisoned
    u32 count;    // transfers
    u32 movers;   // blocks that move bytes; one more block follows if there are transfers without bytes
    u32 stages;
    u32 stage_bytes;
    u32 pace_ns;  // average time from one store of a ring to the next; 0: no pace
};

__device__ __forceinline__ u64 min_of(u64 a, u64 b) {
    return a < b ? a : b;
}

__device__ __forceinline__ bool is_of_this_block(const Transfer& transfer) {
    return transfer.bytes != 0 && blockIdx.x - transfer.first < transfer.blocks;
}

__device__ __forceinline__ bool same_alignment(const Transfer& transfer) {
    return ((reinterpret_cast<u64>(transfer.dst) ^ reinterpret_cast<u64>(transfer.src)) & 15) == 0;
}

__device__ __forceinline__ u64 head_of(const Transfer& transfer) {
    return min_of((0 - reinterpret_cast<u64>(transfer.dst)) & 15, transfer.bytes);
}

__device__ __forceinline__ bool has_ends(const Transfer& transfer) {
    return ((reinterpret_cast<u64>(transfer.dst) | transfer.bytes) & 15) != 0;
}

// The number of parts of a transfer with bytes. Each is led by one thread, which takes a ticket.
__device__ __forceinline__ u32 parts_of(const Transfer& transfer) {
    return transfer.blocks + (same_alignment(transfer) && has_ends(transfer) ? 1 : 0);
}

enum class Gate { OPEN, SHUT, STOPPED };

// Whether a run may begin. All words are loaded before the first is tested: each load takes a trip to the L2 cache, and
// such trips are most of the time of a small message.
__device__ __forceinline__ Gate gate_of(const CopyParams& p, const Transfer& transfer, u64& epoch) {
    epoch = transfer.operation == nullptr ? 0 : epoch_of_this_run(transfer.operation);
    const bool stopped = poisoned(p.watch);
    const u64 credit = transfer.credit == nullptr ? ~0ull : ptx::load_acquire_sys(transfer.credit);
    if (stopped) {
        return Gate::STOPPED;
    }
    return credit + transfer.lag >= epoch || transfer.credit == nullptr ? Gate::OPEN : Gate::SHUT;
}

// Waits until a run may begin. False: the wait failed, or the watch was poisoned.
__device__ __forceinline__ bool may_begin(const CopyParams& p, const Transfer& transfer, u64& epoch) {
    const Gate gate = gate_of(p, transfer, epoch);
    const Waiting who{transfer.op, transfer.peer, epoch};
    return gate == Gate::OPEN ||
           (gate == Gate::SHUT && wait_for_epoch(transfer.credit, epoch - transfer.lag, who, p.watch));
}

// The last part out of a run calls this, when all bytes are moved. The release orders the bytes of all parts (acquired
// with the ticket) before the epoch that announces them.
__device__ __forceinline__ void finish_transfer(const Transfer& transfer, u64 epoch) {
    if (transfer.signal != nullptr) {
        ptx::store_release_sys(transfer.signal, epoch);
    }
    finish_run(transfer.operation, epoch);
}

// The thread that leads a part calls this when the part is done and its stores have arrived. Every part takes a ticket,
// even if it may not move bytes, so that tickets always wrap. A transfer with one part needs no ticket.
__device__ __forceinline__ void finish_part(const CopyParams& p, const Transfer& transfer, u64 epoch, bool moved) {
    if (transfer.operation == nullptr) {
        return;
    }
    const u32 last = parts_of(transfer) - 1;
    if (last == 0 ? moved
                  : ptx::atomic_increment_wrapping(&transfer.operation->ticket, last) == last && !poisoned(p.watch)) {
        finish_transfer(transfer, epoch);
    }
}

}  // namespace raymoe
