// The senders of a dispatch: rows out of x into the slots of every rank that has an expert of the token.
//
// Nothing needs to be counted first: the slot of a row is its token's number. Lanes (warps) take tokens as they get
// through them, so that none is left with more than the others; where links are full some come through faster. Which
// token comes after the next is asked for while one is being sent, and so is where the next one goes.
#pragma once

#include "raymoe/dispatch/dispatch.cuh"
#include "raymoe/base/ring.cuh"

namespace raymoe {

// The tokens that a lane sends, one after another. By a whole warp.
class Tokens {
  public:
    __device__ explicit Tokens(const DispatchParams& p) : p_(p) {}

    // Asks for the first of the `lane`-th lane.
    __device__ __forceinline__ void begin(u32 tokens, u32 lane) {
        tokens_ = tokens;
        token_ = lane;
        ids_ = id_of(token_);
        ask();
    }

    // The next token that goes to any rank of `wanted`, and those of them that it goes to. False: there is none.
    __device__ __forceinline__ bool next(u32 wanted, u32& token, u32& mask) {
        do {
            if (!any(token, mask)) {
                return false;
            }
            mask &= wanted;
        } while (mask == 0);
        return true;
    }

    // The next token, wherever it goes.
    __device__ __forceinline__ bool any(u32& token, u32& mask) {
        if (token_ >= tokens_) {
            return false;
        }
        token = token_;
        const long long id = p_.number(ids_);
        const bool real = id >= 0 && id < p_.experts;
        mask = __reduce_or_sync(0xFFFFFFFF, real ? 1u << p_.rank_of(static_cast<u32>(id)) : 0);
        token_ = p_.lanes() + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken_, 0));
        ids_ = id_of(token_);
        ask();
        return true;
    }

  private:
    __device__ __forceinline__ void ask() { taken_ = threadIdx.x % 32 == 0 ? ptx::atomic_add(p_.taken, 1) : 0; }

    // Of thread k: expert k of the token. Only loads.
    __device__ __forceinline__ Id id_of(u32 token) const {
        const u32 k = threadIdx.x % 32;
        return p_.id_if(token < tokens_ && k < p_.topk, static_cast<u64>(token) * p_.topk + k);
    }

    const DispatchParams& p_;
    u32 tokens_ = 0;
    u32 token_ = 0;      // comes next
    Id ids_ = NO_ID;     // of it
    u64 taken_ = 0;      // which token comes after it, when that is known
};

// By the thread that pushes the row: the epoch, at the end of what leaves.
__device__ __forceinline__ void stamp(u32 stage, u32 slot_bytes, u64 epoch) {
    if (STAMPS) {
        ptx::shared_store_16(stage + slot_bytes - STAMP_BYTES, {epoch, epoch});
        ptx::fence_proxy_async_shared();  // orders the stamp before the bulk stores out of the stage
    }
}

// Rows as they are: loaded once, and stored to up to all ranks. A lane's first thread drives a ring of its own. The
// words of rows follow when YOUNGER more rows have been pushed, so that the wait is a short one.
class SendLane {
  public:
    static constexpr u32 YOUNGER = 1;
    static constexpr u32 QUEUE = 32;  // rows of a lane, from their loads to their words

    static __device__ __forceinline__ u32 memory(const DispatchParams& p) {
        return lane_memory(p.sender_stages, p.slot_bytes) + QUEUE * 8;
    }

    __device__ SendLane(const DispatchParams& p, u64 epoch, u32 lane, u8* memory, bool drives)
        : p_(p), epoch_(epoch), lane_(lane), half_(epoch & 1), leads_(threadIdx.x % 32 == 0),
          ring_(memory, p.sender_stages, p.slot_bytes, drives && leads_),
          queue_(ptx::shared_address(memory) + lane_memory(p.sender_stages, p.slot_bytes)) {}

    // By a whole warp: of the first `tokens` tokens, what no other lane takes. The placers see to this rank's own rows.
    __device__ __forceinline__ void run(u32 tokens) {
        const u32 wanted = ~(1u << p_.peers.rank);
        u32 token, mask;
        if (leads_ && lane_ < tokens) {
            load(lane_);  // before it is known where it goes: nearly every token goes somewhere
        }
        Tokens mine(p_);
        mine.begin(tokens, lane_);
        if (mine.any(token, mask) && leads_) {
            queue(token, mask & wanted);
            store();  // nothing is under way yet
        }
        __syncwarp();
        while (mine.next(wanted, token, mask)) {
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
    }

    // Until every row has arrived, and its words say so.
    __device__ __forceinline__ void finish() {
        if (leads_) {
            ring_.drain();
            say(0);
        }
    }

  private:
    __device__ __forceinline__ u64 queued(u32 number) const { return ptx::shared_load_8(queue_ + number % QUEUE * 8); }

    __device__ __forceinline__ void load(u32 token) {
        ring_.load({p_.x + static_cast<u64>(token) * p_.row_bytes, p_.row_bytes});
    }

    // Where the row goes that was loaded last; nowhere, for all that the store cares.
    __device__ __forceinline__ void queue(u32 token, u32 mask) {
        ptx::shared_store_8(queue_ + loaded_++ % QUEUE * 8, static_cast<u64>(token) << 32 | mask);
    }

    // The oldest row of the ring.
    __device__ __forceinline__ void store() {
        const u64 row = queued(stored_++);
        const u32 stage = ring_.await();
        stamp(stage, p_.slot_bytes, epoch_);
        for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
            const u32 peer = p_.peers.in_turn(step);
            if (row >> peer & 1) {
                ptx::bulk_store(p_.slot_at(peer, half_, p_.peers.rank, row >> 32), stage, p_.slot_bytes);
            }
        }
        ring_.stored();
        trace_first(p_.trace, AT_FIRST_PUSH);
        trace(p_.trace, AT_LAST_PUSH);
        if (stored_ - said_ >= YOUNGER + p_.together) {
            ptx::bulk_wait<YOUNGER>();
            say(YOUNGER);
        }
    }

    // By the thread that has awaited all rows but the `younger` last ones: that they are there.
    __device__ __forceinline__ void say(u32 younger) {
        ptx::fence_acq_rel_sys();  // orders the rows, whose bulk stores this thread has awaited, before their words
        for (; stored_ - said_ > younger; ++said_) {
            const u64 row = queued(said_);
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
    u32 lane_;
    u32 half_;
    bool leads_;
    Ring ring_;
    u32 queue_;  // {token, ranks} in the order of loads, in shared memory
    u32 loaded_ = 0;
    u32 stored_ = 0;
    u32 said_ = 0;
};

// By a whole block, each of whose lanes has awaited its rows: that they have nothing more to send, to every peer, also
// where there was nothing to send. One fence for all of them.
__device__ inline void say_done(const DispatchParams& p, u64 epoch, u32 sender) {
    __syncthreads();  // hands what the lanes have awaited to the threads below
    trace(p.trace, AT_ARRIVED);
    if (threadIdx.x < p.heard()) {
        ptx::fence_acq_rel_sys();  // orders the rows before the words
        ptx::store_relaxed_sys(p.done_at(p.peers.in_turn(threadIdx.x), p.peers.rank, sender), epoch);
    }
    trace(p.trace, AT_SAID_DONE);
}

// Until every sender of every peer has nothing more to send. By a whole block. False: a wait failed, here or before.
__device__ inline bool await_all(const DispatchParams& p, u64 epoch) {
    bool ok = threadIdx.x != THREADS - 1 || !poisoned(p.watch);  // by a thread that mostly has no word to look at
    for (u32 i = threadIdx.x; i < p.heard() * p.senders && ok; i += THREADS) {
        const u32 source = p.peers.in_turn(i / p.senders);
        ok = wait_for_epoch(p.done_at(p.peers.rank, source, i % p.senders), epoch, Waiting{p.op, source, epoch},
                            p.watch);
    }
    return __syncthreads_and(ok);
}

// By a whole block, the `sender`-th. Sends of the first `n` tokens of x what no other block does.
__device__ inline void send_rows(const DispatchParams& p, u64 epoch, u32 n, u32 sender, u8* shared) {
    const u32 warp = threadIdx.x / 32;
    const bool drives = warp < p.sender_lanes;
    SendLane lane(p, epoch, sender * p.sender_lanes + warp, shared + warp * SendLane::memory(p), drives);
    if (drives) {
        lane.run(n);
        lane.finish();
    }
    say_done(p, epoch, sender);
}

}  // namespace raymoe
