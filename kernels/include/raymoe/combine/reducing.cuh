// The reducers of a combine: for each token of each peer, the sum of what this rank's experts made of it, in float32,
// rounded once, to what sums cross as, and pushed into the peer's slot.
//
// Rows are cut into pieces, and number n is piece n % pieces of token n / pieces. An item is a number for one of the
// peers, the peers of a number first. A lane is a warp. It takes items as it gets through them, because some are no
// work and some are much; their order makes that all ranks get their first pieces first. Of a piece it sums a step at a
// time and pushes that at once, so that the links have something to do from early on.
#pragma once

#include "raymoe/combine/adding.cuh"
#include "raymoe/combine/combine.cuh"

namespace raymoe {

constexpr u32 STEPS_UNDER_WAY = 4;

// Of one step of a lane.
__device__ __forceinline__ u32 stage_memory() { return STEP * Crossed::BYTES + (STAMPS ? STAMP_BYTES : 0); }

// By the thread that commits: until all groups but the `younger` last ones, which are the steps of a piece, have been
// performed. The instruction takes a constant only.
__device__ __forceinline__ void wait_for_older(u32 younger) {
    switch (younger) {
        case 1: ptx::bulk_wait<1>(); break;
        case 2: ptx::bulk_wait<2>(); break;
        case 3: ptx::bulk_wait<3>(); break;
        default: ptx::bulk_wait<4>();
    }
}

template <class Type>
class ReduceLane {
  public:
    __device__ ReduceLane(const CombineParams& p, u32 reducer, u8* shared)
        : p_(p), lane_(reducer * p.reducer_lanes + threadIdx.x / 32), leads_(threadIdx.x % 32 == 0),
          memory_(ptx::shared_address(shared + threadIdx.x / 32 * STEPS_UNDER_WAY * stage_memory())) {}

    // Loads only: the epoch need not be known.
    __device__ __forceinline__ void begin() {
        const u32 thread = threadIdx.x % 32;
        cause_ = ptx::load_4(&p_.got->refusal.cause);
        sent_ = ptx::load_4_if(thread < p_.peers.ranks, &p_.got->tokens[thread], 0);
        entry_ = entry_of(lane_);
    }

    // By a whole warp, until every piece has arrived and its word says so. Where an item's rows stand is asked for
    // while the item before is summed, and which item comes after that one.
    __device__ __forceinline__ void run(u64 epoch) {
        epoch_ = epoch;
        if (threadIdx.x / 32 >= p_.reducer_lanes || cause_ != CAUSE_NONE) {
            return;
        }
        const u32 peers = p_.peers.ranks - 1, lanes = p_.lanes();
        u32 most = 0;
#pragma unroll 1
        for (u32 step = 0; step < peers; ++step) {
            most = max(most, __shfl_sync(0xFFFFFFFF, sent_, p_.peers.in_turn(step)));
        }
        const u32 items = most * p_.pieces * peers;
        u32 item = lane_, next = lane_ + lanes;
        while (item < items) {
            const u64 entry = entry_;
            entry_ = entry_of(next);
            const u64 taken = leads_ ? ptx::atomic_add(p_.taken, 1) : 0;
            const u32 source = p_.peers.in_turn(item % peers), number = item / peers;
            const bool sent = number / p_.pieces < __shfl_sync(0xFFFFFFFF, sent_, source);
            const u32 hits = __ballot_sync(0xFFFFFFFF, sent && static_cast<u32>(entry) != NOWHERE);
            if (hits != 0) {
                push(source, number, entry, hits);
            }
            item = next;
            next = 2 * lanes + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken, 0));
        }
        if (leads_) {
            ptx::bulk_wait<0>();
            say_arrived();
        }
    }

  private:
    // Of an item: a piece for one source. Also of tokens that there may be and are not; a rank alone has no items.
    __device__ __forceinline__ u64 entry_of(u32 item) const {
        const u32 peers = max(p_.peers.ranks, 2u) - 1, token = item / peers / p_.pieces;
        return p_.entry(p_.peers.in_turn(item % peers), token, token < p_.slot_tokens);
    }

    __device__ __forceinline__ void push(u32 source, u32 number, u64 entry, u32 hits) {
        const u32 begin = number % p_.pieces * p_.piece_vectors();
        const u32 last = min(begin + p_.piece_vectors(), p_.vectors());
        if (begin >= last) {
            return;
        }
        p_.prefetch(entry, begin, last);
        u8* slot = p_.slot_at(source, epoch_ & 1, p_.peers.rank, number / p_.pieces);
        u32 steps = 0;
        for (u32 step = begin; step < last; step += STEP, ++steps) {
            const u32 stage = memory_ + groups_++ % STEPS_UNDER_WAY * stage_memory();
            if (leads_) {
                ptx::bulk_wait_read<STEPS_UNDER_WAY - 1>();  // what was in this stage has been read out of it
            }
            __syncwarp();
            sum_step(stage, entry, hits, step, last);
            if (leads_) {
                push_step(slot, stage, step, last, number);
            }
        }
        if (leads_) {
            if (unsaid_ == p_.together) {
                wait_for_older(steps);  // not for this piece, so that the wait is a short one
                say_arrived();
            }
#pragma unroll
            for (u32 i = 0; i < MOST_TOGETHER; ++i) {
                words_[i] = i == unsaid_ ? p_.arrival_at(source, p_.peers.rank, number) : words_[i];
            }
            ++unsaid_;
        }
    }

    // By a whole warp: vectors from `step` on, into the stage.
    __device__ __forceinline__ void sum_step(u32 stage, u64 entry, u32 hits, u32 step, u32 last) const {
        const u32 first = step + threadIdx.x % 32;
        float sums[UNROLL][Type::COUNT] = {};
        add_experts<Type>(p_, entry, hits, first, last, sums);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (first + 32 * i < last) {
                Crossed::pack(sums[i]).shared_store(stage + (first + 32 * i - step) * Crossed::BYTES);
            }
        }
        ptx::fence_proxy_async_shared();  // orders this thread's stores to the stage before the bulk store out of it
        __syncwarp();
    }

    // The last step of a piece takes its stamp along. What a row lacks to whole 16 bytes nobody reads.
    __device__ __forceinline__ void push_step(u8* slot, u32 stage, u32 step, u32 last, u32 number) const {
        const u32 end = min(step + STEP, last);
        const u32 bytes = ((end - step) * Crossed::BYTES + 15) & ~15u;
        ptx::bulk_store(slot + static_cast<u64>(step) * Crossed::BYTES, stage, bytes);
        if (STAMPS && end == last) {
            const u32 stamp = stage + STEP * Crossed::BYTES;
            ptx::shared_store_16(stamp, {epoch_, epoch_});
            ptx::fence_proxy_async_shared();  // orders the stamp before the bulk store of it
            ptx::bulk_store(slot + p_.stamp_at(number % p_.pieces), stamp, STAMP_BYTES);
        }
        ptx::bulk_commit();
        trace_first(p_.trace, AT_FIRST_PUSH);
        trace(p_.trace, AT_LAST_PUSH);
    }

    // By the thread that has awaited the pieces of which nothing has been said.
    __device__ __forceinline__ void say_arrived() {
        ptx::fence_acq_rel_sys();  // orders the pieces, whose bulk stores this thread has awaited, before their words
#pragma unroll
        for (u32 i = 0; i < MOST_TOGETHER; ++i) {
            if (i < unsaid_) {
                ptx::store_relaxed_sys(words_[i], epoch_);
            }
        }
        unsaid_ = 0;
    }

    const CombineParams& p_;
    u32 lane_;
    bool leads_;
    u32 memory_;
    u64 epoch_ = 0;
    u32 cause_ = 0;  // why this rank refuses the step, if it does
    u32 sent_ = 0;   // tokens of rank i that came here, in thread i
    u64 entry_ = 0;  // of the item that comes next, the k-th in thread k
    u32 groups_ = 0;
    u32 unsaid_ = 0;  // pieces that have been pushed, and of which nothing has been said yet
    u64* words_[MOST_TOGETHER] = {};  // of these
};

// By a whole block, each of whose lanes has awaited its pieces: that they have nothing more to push, to every peer,
// also where there was nothing to push. Nothing is read because of these words; they end the peers' kernels.
__device__ inline void say_done(const CombineParams& p, u64 epoch, u32 reducer) {
    __syncthreads();  // hands what the lanes have awaited to the threads below
    trace(p.trace, AT_ARRIVED);
    if (threadIdx.x + 1 < p.peers.ranks) {
        ptx::store_relaxed_sys(p.done_at(p.peers.in_turn(threadIdx.x), p.peers.rank, reducer), epoch);
    }
    trace(p.trace, AT_SAID_DONE);
}

}  // namespace raymoe
