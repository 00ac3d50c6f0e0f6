// The senders of a dispatch whose rows cross as 8-bit floats. They quantise each row on its way from x to the link,
// once for all ranks that need it.
//
// A block has warps that quantise, one warp that pushes and one that announces. Each of the first has a stage for a row
// that comes in. Rows that leave have stages in common, taken in turn. A quantising warp waits for a stage that has
// been read, fills it and hands it over. The pusher stores stages to the ranks in that order and waits until the rows
// have arrived. The announcer stores the words. So no quantising warp waits for rows to arrive. No row waits for words
// of other rows, whose fence takes a round trip over a full link.
//
// Memory order within a block: a quantising warp's fence.proxy.async and `filled` order a stage before the pusher's
// bulk stores; the pusher's wait_group and `landed` order the rows before the announcer's fence and words.
#pragma once

#include "raymoe/peer/dispatch/chunks.cuh"
#include "raymoe/peer/dispatch/quantised_stages.cuh"
#include "raymoe/peer/dispatch/quantising.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/peer/dispatch/sending.cuh"

namespace raymoe {

// A warp that takes tokens and quantises their rows.
template <class Type>
class QuantisingWarp {
  public:
    static __device__ __forceinline__ u32 memory(const DispatchParams& p) { return ring_memory(1, p.row_bytes); }

    __device__ QuantisingWarp(const DispatchParams& p, const LeavingStages& leaving, u64 epoch, u32 memory)
        : p_(p), leaving_(leaving), epoch_(epoch), leads_(threadIdx.x % 32 == 0), row_(memory),
          barrier_(memory + p.row_bytes), mine_(p), x_(p) {}

    // Loads the first row, whichever ranks it goes to: nearly every token goes to some rank. All threads of the warp,
    // warp `warp` of all senders, call this before the block's barriers are initialised.
    __device__ __forceinline__ void begin(u32 tokens, u32 warp) {
        if (leads_) {
            ptx::barrier_init(barrier_, 1);
            ptx::fence_barrier_init();  // orders the init before the bulk loads that complete on it
        }
        if constexpr (CHUNKED) {
            tokens = warp < tokens && x_.await_by_warp(warp) ? tokens : 0;
        }
        if (warp < tokens) {
            load(warp);
        }
        mine_.begin(tokens, warp);
    }

    // Sends the warp's tokens. All threads of the same warp call this after `begin`.
    __device__ __forceinline__ void run() {
        u32 token, mask;
        bool more = mine_.any(token, mask);
        if (more && mask == 0) {
            await_row();
            more = load_next(token, mask);
        }
        while (more) {
            hand_over(token, mask);
            more = load_next(token, mask);
        }
        const u32 turn = take_turn();
        if (leads_) {
            leaving_.emptied.await_before(turn);
            leaving_.hand_over(turn, LeavingStages::NO_MORE);
        }
    }

    // Whether no wait for a chunk has failed.
    __device__ __forceinline__ bool ok() const { return x_.ok(); }

  private:
    __device__ __forceinline__ void load(u32 token) {
        if (leads_) {
            ptx::barrier_expect(barrier_, p_.x_bytes());
            ptx::bulk_load(row_, p_.x + static_cast<u64>(token) * p_.x_bytes(), p_.x_bytes(), barrier_);
        }
    }

    // Returns false if there is no next row.
    __device__ __forceinline__ bool load_next(u32& token, u32& mask) {
        bool more = mine_.next(~0u, token, mask);
        if constexpr (CHUNKED) {
            more = more && x_.await_by_warp(token);
        }
        if (more) {
            load(token);
        }
        return more;
    }

    __device__ __forceinline__ void await_row() {
        while (!ptx::barrier_try_wait(barrier_, rows_ & 1)) {
        }
        ++rows_;
        __syncwarp();
    }

    __device__ __forceinline__ u32 take_turn() const {
        const u32 turn = leads_ ? atomicAdd(leaving_.turns, 1u) : 0;
        return __shfl_sync(0xFFFFFFFF, turn, 0);
    }

    __device__ __forceinline__ void hand_over(u32 token, u32 mask) {
        await_row();
        const u32 turn = take_turn(), stage = leaving_.stage(turn);
        leaving_.emptied.await_before(turn);
        if (p_.x_scales == nullptr) {
            quantise<Type>(row_, stage, p_.hidden, p_.blocks());
        } else {
            take_quantised(p_, token, row_, stage);
        }
        // Orders this thread's stores to the stage before the bulk stores out of it. Orders its loads of the row before
        // the bulk load that fills its stage again.
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (leads_) {
            stamp(stage, p_.slot_bytes, epoch_);
            leaving_.hand_over(turn, static_cast<u64>(token) << 32 | mask);
        }
    }

    const DispatchParams& p_;
    const LeavingStages& leaving_;
    u64 epoch_;
    bool leads_;
    u32 row_;       // the stage of the row that comes in
    u32 barrier_;   // the load of the row completes on it
    u32 rows_ = 0;  // rows that have come
    Tokens mine_;
    RowsOfX x_;
};

// The warp that pushes the rows of its block's quantising warps, with a thread for each rank.
class Pusher {
  public:
    // Later rows that are pushed before a row's word is due: about as many as are in flight.
    static constexpr u32 YOUNGER = 2;
    static_assert(LeavingStages::MOST_STAGES + YOUNGER <= LeavingStages::QUEUE, "the queue is full before the stages");

    __device__ Pusher(const DispatchParams& p, const LeavingStages& leaving, u64 epoch)
        : p_(p), leaving_(leaving), epoch_(epoch), peer_(p.peers.in_turn(threadIdx.x % 32 % p.peers.ranks)),
          pushes_(threadIdx.x % 32 < p.peers.ranks) {}

    // Pushes all rows, and returns when every row has arrived. All threads of the warp call this.
    __device__ __forceinline__ void run() const {
        const u32 unread = leaving_.stages > YOUNGER ? YOUNGER : leaving_.stages - 1;  // stages that may still be read
        u32 turn = 0;
        for (u32 warps = p_.sender_warps; warps != 0; ++turn) {
            leaving_.filled.await(turn);
            const u64 row = leaving_.queued(turn);
            if (row == LeavingStages::NO_MORE) {
                --warps;
            } else {
                push(row, leaving_.stage(turn));
            }
            ptx::bulk_commit();
            if (turn >= unread) {
                wait_stages_read(unread);
                __syncwarp();  // no thread's stores still read the stage, and all threads have awaited its filling
                if (leads()) {
                    leaving_.emptied.pass(turn - unread);
                }
            }
            if (turn >= YOUNGER) {
                ptx::bulk_wait<YOUNGER>();
                pass_landed(turn - YOUNGER);
            }
        }
        ptx::bulk_wait<0>();
        for (u32 younger = turn < YOUNGER ? turn : YOUNGER; younger != 0; --younger) {
            pass_landed(turn - younger);
        }
    }

  private:
    __device__ __forceinline__ bool leads() const { return threadIdx.x % 32 == 0; }

    __device__ __forceinline__ void push(u64 row, u32 stage) const {
        if (pushes_ && (row >> peer_ & 1)) {
            ptx::bulk_store(p_.slot_at(peer_, epoch_ & 1, p_.peers.rank, row >> 32), stage, p_.slot_bytes);
            trace_first(p_.trace, AT_FIRST_PUSH);
            trace(p_.trace, AT_LAST_PUSH);
        }
    }

    // Tells the announcer that the row of the turn has arrived: each thread has awaited its own rank's store.
    __device__ __forceinline__ void pass_landed(u32 turn) const {
        __syncwarp();  // hands what the warp has awaited to the thread that arrives on the barrier
        if (leads()) {
            leaving_.landed.pass(turn);
        }
    }

    const DispatchParams& p_;
    const LeavingStages& leaving_;
    u64 epoch_;
    u32 peer_;
    bool pushes_;
};

// The warp that announces the rows that have arrived, with a thread for each rank.
class Announcer {
  public:
    __device__ Announcer(const DispatchParams& p, const LeavingStages& leaving, u64 epoch)
        : p_(p), leaving_(leaving), epoch_(epoch), peer_(p.peers.in_turn(threadIdx.x % 32 % p.peers.ranks)),
          announces_(threadIdx.x % 32 < p.peers.ranks) {}

    // Stores the words of all rows. One fence covers all rows that have arrived by then. All threads of the warp call
    // this.
    __device__ __forceinline__ void run() const {
        u32 turn = 0;
        for (u32 warps = p_.sender_warps; warps != 0;) {
            leaving_.landed.await(turn);
            u32 end = turn + 1;
            while (end - turn < LeavingStages::QUEUE && __all_sync(0xFFFFFFFF, leaving_.landed.passed(end))) {
                ++end;
            }
            ptx::fence_acq_rel_sys();  // orders the rows, whose bulk stores the pusher has awaited, before their words
            for (; turn != end; ++turn) {
                const u64 row = leaving_.queued(turn);
                if (row == LeavingStages::NO_MORE) {
                    --warps;
                } else if (announces_ && (row >> peer_ & 1)) {
                    ptx::store_relaxed_sys(p_.arrival_at(peer_, p_.peers.rank, row >> 32), epoch_);
                }
                __syncwarp();  // every thread has read the entry
                if (threadIdx.x % 32 == 0) {
                    leaving_.announced.pass(turn);
                }
            }
        }
    }

  private:
    const DispatchParams& p_;
    const LeavingStages& leaving_;
    u64 epoch_;
    u32 peer_;
    bool announces_;
};

// Sends, as the `sender`-th sender, the tokens that its warps take of the first `n`. All threads of the block that send
// call this. All of their warps but the last two can quantise.
template <class Type>
__device__ inline void send_quantised(const DispatchParams& p, u64 epoch, u32 n, u32 sender, u8* shared) {
    constexpr u32 SENDING_WARPS = MIXED ? MIXED_SENDERS : WARPS;
    const u32 warp = threadIdx.x / 32 - FIRST_SENDER, each = QuantisingWarp<Type>::memory(p);
    const LeavingStages leaving(p, shared + p.sender_warps * each);
    QuantisingWarp<Type> quantising_warp(p, leaving, epoch, ptx::shared_address(shared) + warp * each);
    if (warp < p.sender_warps) {
        quantising_warp.begin(n, sender * p.sender_warps + warp);
    } else if (warp == SENDING_WARPS - 1 && threadIdx.x % 32 == 0) {
        leaving.begin();
    }
    sender_barrier();  // the barriers are initialised
    if (warp < p.sender_warps) {
        quantising_warp.run();
    } else if (warp == SENDING_WARPS - 2) {
        Pusher(p, leaving, epoch).run();
    } else if (warp == SENDING_WARPS - 1) {
        Announcer(p, leaving, epoch).run();
    }
    if (CHUNKED && !sender_barrier_and(quantising_warp.ok())) {
        return;  // a wait failed, so rows are missing
    }
    announce_done(p, epoch, sender);
}

}  // namespace raymoe
