// A dispatch of a backward pass says to which dispatch it belongs, and ranks compare that. All ranks must run the
// backward passes in one order: rows of another dispatch would arrive in their places, and nothing else would show it.
//
// A build with KNOWN_ROUTING sends rows to the places of that dispatch. A build with AGAIN routes its rows again.
//
// Memory map of every rank's heap, beside that of dispatch.cu:
//   passes [2][s]   {pass of source s, epoch}
// A pass is the number of the dispatch, its 32 low bits, and above them the number of the call site. Where this rank
// has found over the rail that ranks of other domains run another one, all bits are inverted: its domain then refuses.
//
// Memory order of `passes`: as counts. They are stored before the head of their source.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"

namespace raymoe {

__device__ __forceinline__ u64 pass_of(const DispatchCall& p) {
    const u64 pass = static_cast<u64>(p.site) << 32 | static_cast<u32>(p.forward->number);
    return p.mark == nullptr ? pass : pass ^ *p.mark;
}

// Stores this rank's pass at a rank. One thread calls this, before the fence of the head.
__device__ __forceinline__ void send_pass(const DispatchParams& p, u64 epoch, u32 peer) {
    u8* at = p.pass_at(peer, epoch & 1, p.peers.rank);
    ptx::store_8(at, pass_of(p));
    ptx::store_8(at + 8, epoch);
}

// Announces a dispatch of known routing: its pass, then the head. A rank that routes in this epoch waits for heads and
// reads counts, so those are zero. All threads of one block call this.
__device__ inline void announce_known(const DispatchParams& p, u64 epoch) {
    for (u32 i = threadIdx.x; i < p.experts; i += THREADS) {
        ptx::store_4(p.counts_at(p.rank_of(i), epoch & 1, p.peers.rank, p.local_of(i)), 0);
    }
    if (threadIdx.x < p.peers.ranks) {
        ptx::store_4(p.counts_at(threadIdx.x, epoch & 1, p.peers.rank, p.local), 0);
        send_pass(p, epoch, threadIdx.x);
    }
    block_barrier();  // hands the stores of all threads to the threads below
    if (threadIdx.x < p.peers.ranks) {
        ptx::fence_acq_rel_sys();  // orders the counts and the pass before the head
        ptx::store_relaxed_sys(p.peers.flag(threadIdx.x, p.heads), epoch);
    }
}

// Whether all ranks run the backward pass of the same dispatch. All ranks that run one get the same answer. All threads
// of the block call this, after the block has acquired the heads of all ranks.
__device__ inline bool all_run_this_pass(const DispatchParams& p, u64 epoch) {
    bool same = true;
    if (threadIdx.x < p.peers.ranks) {
        const u8* at = p.pass_at(p.peers.rank, epoch & 1, threadIdx.x);
        same = ptx::load_8(at + 8) == epoch && ptx::load_8(at) == pass_of(p);
    }
    return block_barrier_and(same);
}

// Fills the rows with NaN: all bits are one, which is NaN in each type of rows. With layout rank these are the slots,
// which no peer writes before this rank's next dispatch. All threads of the last block out call this.
__device__ inline void fill_rows_with_nan(u8* rows, u64 nbytes) {
    for (u64 at = threadIdx.x * 16ull; at < nbytes; at += THREADS * 16ull) {
        ptx::store_16(rows + at, {~0ull, ~0ull});
    }
}

// Reports to the host that ranks run backward passes of different dispatches. `pass(rank)` returns a rank's pass, 0 if
// the rank runs none. One thread calls this.
template <class Pass>
__device__ inline void report_passes(const DispatchCall& p, u64 epoch, Pass pass) {
    report_refusal(p.record, p.peers.ranks, epoch, [&](u32 rank, u32 word) {
        const u64 its = pass(rank);
        return word == 0 ? its >> 32 << (32 + SITE_SHIFT) : its & 0xFFFFFFFF;
    });
}

// Ends a dispatch whose ranks run backward passes of different dispatches. All threads of the last block out call this.
__device__ inline void refuse_pass(const DispatchParams& p, u64 epoch) {
    if (p.rank_layout) {
        fill_rows_with_nan(p.slot_at(p.peers.rank, epoch & 1, 0, 0),
                           static_cast<u64>(p.peers.ranks) * p.slot_tokens * p.slot_bytes);
    } else {
        fill_rows_with_nan(p.out, static_cast<u64>(p.capacity) * p.out_row_bytes);
    }
    if (threadIdx.x == 0) {
        report_passes(p, epoch, [&](u32 rank) {
            const u8* at = p.pass_at(p.peers.rank, epoch & 1, rank);
            return ptx::load_8(at + 8) == epoch ? ptx::load_8(at) : 0;
        });
    }
}

}  // namespace raymoe
