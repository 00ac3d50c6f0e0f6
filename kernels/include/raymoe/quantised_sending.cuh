// The senders of a dispatch whose rows cross as 8-bit floats: quantised on the way from x to the link, once for all
// ranks that a row goes to.
//
// A block has lanes, which are warps, and one warp that pushes. Each lane has a stage for a row as it comes; the rows
// as they leave have stages in common, taken in turn. A lane waits for a stage that has been read, fills it and hands
// it over; the pusher stores stages to the ranks in that order, waits for what has arrived, and says so. So no lane
// waits for rows to arrive, and as many rows are under way as there are stages.
#pragma once

#include "raymoe/quantising.cuh"
#include "raymoe/ring.cuh"
#include "raymoe/sending.cuh"

namespace raymoe {

// What the lanes and the pusher of a block share, in its shared memory. Stage `turn % stages` is of turn `turn`, and
// the turns of a stage alternate the parity of its two barriers. There are no more lanes than stages, so that no lane
// waits for a parity more than one turn of its stage ahead.
struct LeavingStages {
    static constexpr u32 QUEUE = 32;        // turns, from the stage's filling to the row's word
    static constexpr u32 MOST_STAGES = 16;  // QUEUE less what is pushed and not said yet

    u32 stages;
    u32 stage_bytes;
    u32 first;    // the first stage
    u32 queue;    // {token, ranks} of a turn; no ranks: a lane has nothing more
    u32 filled;   // barriers, one a stage: the lane's
    u32 emptied;  // likewise the pusher's
    u32* turns;   // that lanes have taken

    __device__ __forceinline__ LeavingStages(const DispatchParams& p, u8* memory)
        : stages(p.sender_stages), stage_bytes((p.slot_bytes + 127) & ~127u), first(ptx::shared_address(memory)),
          queue(first + stages * stage_bytes), filled(queue + QUEUE * 8), emptied(filled + MOST_STAGES * 8),
          turns(reinterpret_cast<u32*>(memory + (emptied + MOST_STAGES * 8 - first))) {}

    __device__ __forceinline__ void begin() const {
        for (u32 stage = 0; stage < stages; ++stage) {
            ptx::barrier_init(filled + stage * 8, 1);
            ptx::barrier_init(emptied + stage * 8, 1);
        }
        *turns = 0;
    }

    __device__ __forceinline__ u32 stage(u32 turn) const { return first + turn % stages * stage_bytes; }

    __device__ __forceinline__ u32 queued(u32 turn) const { return queue + turn % QUEUE * 8; }

    // Until the row of a turn, or that of the turn that had its stage before.
    __device__ __forceinline__ void await_filled(u32 turn) const { await(filled, turn); }

    __device__ __forceinline__ void await_empty(u32 turn) const {
        if (turn >= stages) {
            await(emptied, turn - stages);
        }
    }

    // The arrival releases what the thread, and the warp that it has synchronised with, have done to the stage.
    __device__ __forceinline__ void fill(u32 turn) const { ptx::barrier_arrive(filled + turn % stages * 8); }

    __device__ __forceinline__ void empty(u32 turn) const { ptx::barrier_arrive(emptied + turn % stages * 8); }

  private:
    __device__ __forceinline__ void await(u32 barriers, u32 turn) const {
        while (!ptx::barrier_try_wait(barriers + turn % stages * 8, turn / stages & 1)) {
        }
    }
};

// A warp that quantises the tokens that no other lane takes.
template <class Type>
class QuantisingLane {
  public:
    static __device__ __forceinline__ u32 memory(const DispatchParams& p) { return lane_memory(1, p.row_bytes); }

    __device__ QuantisingLane(const DispatchParams& p, const LeavingStages& leaving, u64 epoch, u32 memory)
        : p_(p), leaving_(leaving), epoch_(epoch), leads_(threadIdx.x % 32 == 0), row_(memory),
          barrier_(memory + p.row_bytes) {
        if (leads_) {
            ptx::barrier_init(barrier_, 1);
            ptx::fence_barrier_init();  // orders the init before the bulk loads that complete on it
        }
        __syncwarp();
    }

    // By a whole warp, the `lane`-th of all senders.
    __device__ __forceinline__ void run(u32 tokens, u32 lane) {
        u32 token = lane, mask = 0;
        bool more = token < tokens;
        if (more) {
            load(token);  // nearly every token goes somewhere
            Tokens mine(p_, tokens, lane);
            more = mine.any(token, mask);
            if (mask == 0) {
                await_row();
                more = mine.next(~0u, token, mask);
                if (more) {
                    load(token);
                }
            }
            while (more) {
                const u32 this_token = token, its_mask = mask;
                more = mine.next(~0u, token, mask);
                hand_over(this_token, its_mask, more, token);
            }
        }
        const u32 turn = take_turn();
        if (leads_) {
            leaving_.await_empty(turn);
            ptx::shared_store_8(leaving_.queued(turn), 0);
            leaving_.fill(turn);
        }
    }

  private:
    __device__ __forceinline__ void load(u32 token) {
        if (leads_) {
            ptx::barrier_expect(barrier_, p_.x_bytes());
            ptx::bulk_load(row_, p_.x + static_cast<u64>(token) * p_.x_bytes(), p_.x_bytes(), barrier_);
        }
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

    __device__ __forceinline__ void hand_over(u32 token, u32 mask, bool more, u32 next_token) {
        await_row();
        const u32 turn = take_turn(), stage = leaving_.stage(turn);
        leaving_.await_empty(turn);
        if (p_.x_scales == nullptr) {
            quantise<Type>(row_, stage, p_.hidden, p_.blocks());
        } else {
            take_quantised(p_, token, row_, stage);
        }
        // Orders this thread's stores to the stage before the bulk stores out of it, and its loads of the row before
        // the bulk load that fills its stage again.
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (more) {
            load(next_token);
        }
        if (leads_) {
            stamp(stage, p_.slot_bytes, epoch_);
            ptx::shared_store_8(leaving_.queued(turn), static_cast<u64>(token) << 32 | mask);
            leaving_.fill(turn);
        }
    }

    const DispatchParams& p_;
    const LeavingStages& leaving_;
    u64 epoch_;
    bool leads_;
    u32 row_;       // where a row comes to
    u32 barrier_;   // on which it completes
    u32 rows_ = 0;  // that have come
};

// The warp that pushes what the lanes of its block hand over, a thread for each rank.
class Pusher {
  public:
    // Rows that are pushed before the word of one is due: about as many as are under way.
    static constexpr u32 YOUNGER = 8;
    static_assert(LeavingStages::MOST_STAGES + YOUNGER + MOST_TOGETHER <= LeavingStages::QUEUE, "");

    __device__ Pusher(const DispatchParams& p, const LeavingStages& leaving, u64 epoch)
        : p_(p), leaving_(leaving), epoch_(epoch), peer_(p.peers.in_turn(threadIdx.x % 32 % p.peers.ranks)),
          pushes_(threadIdx.x % 32 < p.peers.ranks) {}

    // By a whole warp: until every row has arrived, and its words say so.
    __device__ __forceinline__ void run() {
        const u32 behind = leaving_.stages / 2;  // stages that may still be read from
        u32 turn = 0;
        for (u32 lanes = p_.sender_lanes; lanes != 0; ++turn) {
            leaving_.await_filled(turn);
            const u64 row = ptx::shared_load_8(leaving_.queued(turn));
            lanes -= static_cast<u32>(row) == 0;
            push(row, leaving_.stage(turn));
            if (turn >= behind) {
                wait_stages_read(behind);
                __syncwarp();  // no thread's stores read from the stage any more, and none has yet to await its filling
                if (threadIdx.x % 32 == 0) {
                    leaving_.empty(turn - behind);
                }
            }
            if (turn + 1 - said_ >= YOUNGER + p_.together) {
                ptx::bulk_wait<YOUNGER>();
                say(turn + 1 - YOUNGER);
            }
        }
        ptx::bulk_wait<0>();
        say(turn);
    }

  private:
    __device__ __forceinline__ bool goes(u64 row) const { return pushes_ && (row >> peer_ & 1); }

    __device__ __forceinline__ void push(u64 row, u32 stage) {
        if (goes(row)) {
            ptx::bulk_store(p_.slot_at(peer_, epoch_ & 1, p_.peers.rank, row >> 32), stage, p_.slot_bytes);
            trace_first(p_.trace, AT_FIRST_PUSH);
            trace(p_.trace, AT_LAST_PUSH);
        }
        ptx::bulk_commit();
    }

    // That the rows of the turns before `end`, which have been awaited, are there.
    __device__ __forceinline__ void say(u32 end) {
        ptx::fence_acq_rel_sys();  // orders the rows, whose bulk stores this thread has awaited, before their words
        for (; said_ < end; ++said_) {
            const u64 row = ptx::shared_load_8(leaving_.queued(said_));
            if (goes(row)) {
                ptx::store_relaxed_sys(p_.arrival_at(peer_, p_.peers.rank, row >> 32), epoch_);
            }
        }
    }

    const DispatchParams& p_;
    const LeavingStages& leaving_;
    u64 epoch_;
    u32 peer_;
    bool pushes_;
    u32 said_ = 0;  // turns
};

// By a whole block, the `sender`-th, whose lanes are all its warps but the last at most. Sends of the first `n` tokens
// of x what no other block does.
template <class Type>
__device__ inline void send_quantised(const DispatchParams& p, u64 epoch, u32 n, u32 sender, u8* shared) {
    const u32 warp = threadIdx.x / 32, each = QuantisingLane<Type>::memory(p);
    const LeavingStages leaving(p, shared + p.sender_lanes * each);
    if (threadIdx.x == 0) {
        leaving.begin();
    }
    __syncthreads();  // the barriers are there
    if (warp < p.sender_lanes) {
        QuantisingLane<Type>(p, leaving, epoch, ptx::shared_address(shared) + warp * each)
            .run(n, sender * p.sender_lanes + warp);
    } else if (warp == WARPS - 1) {
        Pusher(p, leaving, epoch).run();
    }
    say_done(p, epoch, sender);
}

}  // namespace raymoe
