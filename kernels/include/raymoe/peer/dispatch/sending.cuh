// The senders of a dispatch push rows of x into the slots of every rank that has an expert of the token.
//
// Senders need no counts: the slot of a row is its token's number. Sender warps take the next token when they have sent
// one, so the warps with faster links take more. While a warp sends one token, it asks for the token after the next,
// and for the experts of the next.
#pragma once

#include "raymoe/peer/dispatch/chunks.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/base/ring.cuh"

namespace raymoe {

// The tokens that a sender warp sends, one after another. All threads of the warp call its functions.
class Tokens {
  public:
    __device__ explicit Tokens(const DispatchParams& p) : p_(p) {}

    // Asks for the first token of warp `warp` of all senders.
    __device__ __forceinline__ void begin(u32 tokens, u32 warp) {
        tokens_ = tokens;
        token_ = warp;
        ask_ranks();
        ask();
    }

    // Finds the next token that goes to a rank of `wanted`, and its mask of these ranks. Returns false if there is
    // none.
    __device__ __forceinline__ bool next(u32 wanted, u32& token, u32& mask) {
        do {
            if (!any(token, mask)) {
                return false;
            }
            mask &= wanted;
        } while (mask == 0);
        return true;
    }

    // Finds the next token, whichever ranks it goes to.
    __device__ __forceinline__ bool any(u32& token, u32& mask) {
        if (token_ >= tokens_) {
            return false;
        }
        token = token_;
        if constexpr (KNOWN) {
            mask = mask_;
        } else {
            const long long id = p_.number(topk_idx_);
            const bool real = id >= 0 && id < p_.experts;
            mask = __reduce_or_sync(0xFFFFFFFF, real ? 1u << p_.rank_of(static_cast<u32>(id)) : 0);
        }
        token_ = p_.all_sender_warps() + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken_, 0));
        ask_ranks();
        ask();
        return true;
    }

  private:
    __device__ __forceinline__ void ask() { taken_ = threadIdx.x % 32 == 0 ? ptx::atomic_add(p_.taken, 1) : 0; }

    // Asks for the ranks of token `token_`, or for the experts from which `any` finds them. Only issues loads.
    __device__ __forceinline__ void ask_ranks() {
        if constexpr (KNOWN) {
            mask_ = ptx::load_4_if(token_ < tokens_, p_.masks + token_, 0);
        } else {
            topk_idx_ = id_of(token_);
        }
    }

    // Expert k of the token, for thread k. Only issues loads.
    __device__ __forceinline__ Id id_of(u32 token) const {
        const u32 k = threadIdx.x % 32;
        return p_.id_if(token < tokens_ && k < p_.topk, static_cast<u64>(token) * p_.topk + k);
    }

    const DispatchParams& p_;
    u32 tokens_ = 0;
    u32 token_ = 0;        // the next token
    Id topk_idx_ = NO_ID;  // its expert k, in thread k
    u32 mask_ = 0;         // its ranks, if the routing is known
    u64 taken_ = 0;        // selects the token after it; valid in the first thread, when the atomic has returned
};

// Writes the epoch at the end of a row's stage. The thread that pushes the row calls this.
__device__ __forceinline__ void stamp(u32 stage, u32 slot_bytes, u64 epoch) {
    if (STAMPS) {
        ptx::shared_store_16(stage + slot_bytes - STAMP_BYTES, {epoch, epoch});
        ptx::fence_proxy_async_shared();  // orders the stamp before the bulk stores out of the stage
    }
}

// Sends rows as they are. A row is loaded once and stored at all ranks that need it. A warp's first thread drives a
// ring of its own. The word of a row follows when at least YOUNGER later rows have been pushed, so the wait for it is
// short.
class SenderWarp {
  public:
    static constexpr u32 YOUNGER = 1;
    static constexpr u32 QUEUE = 32;  // rows of a warp, from their loads to their words

    static __device__ __forceinline__ u32 memory(const DispatchParams& p) {
        return ring_memory(p.sender_stages, p.slot_bytes) + QUEUE * 8;
    }

    __device__ SenderWarp(const DispatchParams& p, u64 epoch, u32 warp, u8* memory, bool drives)
        : p_(p), epoch_(epoch), warp_(warp), parity_(epoch & 1), leads_(threadIdx.x % 32 == 0),
          ring_(memory, p.sender_stages, p.slot_bytes, drives && leads_),
          queue_(ptx::shared_address(memory) + ring_memory(p.sender_stages, p.slot_bytes)), x_(p) {}

    // Sends the tokens that this warp takes of the first `tokens`. All threads of the warp call this. Placement blocks
    // copy this rank's own rows. Returns false if a wait failed: then `finish` announces what has been loaded before.
    __device__ __forceinline__ bool run(u32 tokens) {
        const u32 wanted = ~(1u << p_.peers.rank);
        u32 token, mask;
        if (CHUNKED && warp_ < tokens && !await_row(warp_)) {
            return false;
        }
        if (leads_ && warp_ < tokens) {
            load(warp_);  // before its ranks are known: nearly every token goes to some rank
        }
        Tokens mine(p_);
        mine.begin(tokens, warp_);
        if (mine.any(token, mask) && leads_) {
            queue(token, mask & wanted);
            store();  // nothing is in flight yet
        }
        __syncwarp();
        bool ok = true;
        while (mine.next(wanted, token, mask)) {
            if (CHUNKED && !await_row(token)) {
                ok = false;
                break;
            }
            if (leads_) {
                if (!ring_.can_load()) {
                    store();
                }
                load(token);
                queue(token, mask);
            }
            __syncwarp();
        }
        while (leads_ && ring_.any_loading()) {
            store();
        }
        return ok;
    }

    // Waits until every row has arrived, and announces the rest.
    __device__ __forceinline__ void finish() {
        if (leads_) {
            ring_.drain();
            announce(0);
        }
    }

  private:
    // Waits until the row of the token is there. Before it waits, it sends and announces the rows that are loaded: they
    // would be as late as the chunk. All threads of the warp call this. Returns false if the wait failed.
    __device__ __forceinline__ bool await_row(u32 token) {
        bool ok = true;
        if (leads_ && !x_.there(token)) {
            while (ring_.any_loading()) {
                store();
            }
            finish();
            ok = x_.await(token);
        }
        return __shfl_sync(0xFFFFFFFF, ok, 0);
    }

    __device__ __forceinline__ u64 queued(u32 number) const { return ptx::shared_load_8(queue_ + number % QUEUE * 8); }

    __device__ __forceinline__ void load(u32 token) {
        ring_.load({p_.x + static_cast<u64>(token) * p_.row_bytes, p_.row_bytes});
    }

    // Queues the ranks of the row that was loaded last; the mask may be 0.
    __device__ __forceinline__ void queue(u32 token, u32 mask) {
        ptx::shared_store_8(queue_ + loaded_++ % QUEUE * 8, static_cast<u64>(token) << 32 | mask);
    }

    // Stores the oldest row of the ring.
    __device__ __forceinline__ void store() {
        const u64 row = queued(stored_++);
        const u32 stage = ring_.await();
        stamp(stage, p_.slot_bytes, epoch_);
        for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
            const u32 peer = p_.peers.in_turn(step);
            if (row >> peer & 1) {
                ptx::bulk_store(p_.slot_at(peer, parity_, p_.peers.rank, row >> 32), stage, p_.slot_bytes);
            }
        }
        ring_.stored();
        trace_first(p_.trace, AT_FIRST_PUSH);
        trace(p_.trace, AT_LAST_PUSH);
        if (stored_ - announced_ >= YOUNGER + p_.together) {
            ptx::bulk_wait<YOUNGER>();
            announce(YOUNGER);
        }
    }

    // Stores the words of all rows but the `younger` last ones. The calling thread has awaited these rows.
    __device__ __forceinline__ void announce(u32 younger) {
        ptx::fence_acq_rel_sys();  // orders the rows, whose bulk stores this thread has awaited, before their words
        for (; stored_ - announced_ > younger; ++announced_) {
            const u64 row = queued(announced_);
            for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
                const u32 peer = p_.peers.in_turn(step);
                if (row >> peer & 1) {
                    ptx::store_relaxed_sys(p_.arrival_at(peer, p_.peers.rank, row >> 32), epoch_);
                }
            }
        }
    }

    const DispatchParams& p_;
    u64 epoch_;
    u32 warp_;
    u32 parity_;
    bool leads_;
    Ring ring_;
    u32 queue_;  // {token, ranks} in the order of loads, in shared memory
    RowsOfX x_;
    u32 loaded_ = 0;
    u32 stored_ = 0;
    u32 announced_ = 0;
};

// Tells every peer that this sender has nothing more to send, also if there was nothing to send. All threads of the
// block that send call this, when its warps have awaited their rows. One fence covers all rows.
__device__ inline void announce_done(const DispatchParams& p, u64 epoch, u32 sender) {
    sender_barrier();  // hands what the warps have awaited to the threads below
    trace(p.trace, AT_ARRIVED);
    const u32 thread = threadIdx.x - FIRST_SENDER * 32;
    if (thread < p.ranks_through_slots()) {
        ptx::fence_acq_rel_sys();  // orders the rows before the words
        ptx::store_relaxed_sys(p.done_at(p.peers.in_turn(thread), p.peers.rank, sender), epoch);
    }
    trace(p.trace, AT_SAID_DONE);
}

// Waits until every sender of every peer has nothing more to send. All threads of the block call this. Returns false if
// a wait failed, here or before.
__device__ inline bool await_all(const DispatchParams& p, u64 epoch) {
    bool ok = threadIdx.x != THREADS - 1 || !poisoned(p.watch);  // checked by a thread that mostly has no word to read
    for (u32 i = threadIdx.x; i < p.ranks_through_slots() * p.senders && ok; i += THREADS) {
        const u32 source = p.peers.in_turn(i / p.senders);
        ok = wait_for_epoch(p.done_at(p.peers.rank, source, i % p.senders), epoch, Waiting{p.op, source, epoch},
                            p.watch);
    }
    return block_barrier_and(ok);
}

// Sends, as the `sender`-th sender, the tokens that its warps take of the first `n`. All threads of the block that send
// call this.
__device__ inline void send_rows(const DispatchParams& p, u64 epoch, u32 n, u32 sender, u8* shared) {
    const u32 warp = threadIdx.x / 32 - FIRST_SENDER;
    const bool drives = warp < p.sender_warps;
    SenderWarp sender_warp(p, epoch, sender * p.sender_warps + warp, shared + warp * SenderWarp::memory(p), drives);
    bool ok = true;
    if (drives) {
        ok = sender_warp.run(n);
        sender_warp.finish();
    }
    if (CHUNKED && !sender_barrier_and(ok)) {
        return;  // a wait failed, so rows are missing
    }
    announce_done(p, epoch, sender);
}

}  // namespace raymoe
