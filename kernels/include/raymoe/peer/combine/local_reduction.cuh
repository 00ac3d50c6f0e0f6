// The local reduction of a combine: its warps sum the rows of this rank's experts for each token of each peer. They sum
// in float32, round once to the type in which sums cross, and push the sum into the peer's slot.
//
// Rows are cut into pieces; number n is piece n % pieces of token n / pieces. An item is a number for one peer, and the
// items of a number are consecutive. So all ranks get their first pieces first. A warp takes the next item when it has
// finished one, because some items are no work and some are much. It sums a piece step by step and pushes each step at
// once, so that the links are busy from early on. With CARRIES the numbers of a token's entries go with its first
// piece.
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/pushes.cuh"

namespace raymoe {

template <class Type>
class LocalReduction {
  public:
    __device__ LocalReduction(const CombineParams& p, u32 block, u8* shared)
        : p_(p), warp_(block * p.local_warps + threadIdx.x / 32), leads_(threadIdx.x % 32 == 0),
          stages_(ptx::shared_address(shared + threadIdx.x / 32 * STEPS_UNDER_WAY * SumStages::bytes(STEP_BYTES)),
                  STEP_BYTES),
          pushes_(p, STEP_BYTES) {}

    // Only issues loads, before the epoch is known.
    __device__ __forceinline__ void begin() {
        const u32 thread = threadIdx.x % 32;
        cause_ = ptx::load_4(&p_.summary->refusal.cause);
        sent_ = ptx::load_4_if(thread < p_.peers.ranks, &p_.summary->tokens[thread], 0);
        entry_ = entry_of(warp_);
    }

    // Reduces the warp's items, and returns when every piece has arrived and its word is stored. All threads of the
    // warp call this. While an item is summed, the warp asks for the places of the next one, and for the item after
    // that.
    __device__ __forceinline__ void run(u64 epoch) {
        epoch_ = epoch;
        pushes_.begin(epoch);
        if (threadIdx.x / 32 >= p_.local_warps || cause_ != CAUSE_NONE) {
            return;
        }
        const u32 peers = p_.peers.ranks - 1, warps = p_.reduction_warps();
        sent_ = min(sent_ - min(sent_, p_.first_token), p_.most_tokens);
        u32 most = 0;
#pragma unroll 1
        for (u32 step = 0; step < peers; ++step) {
            most = max(most, __shfl_sync(0xFFFFFFFF, sent_, p_.peers.in_turn(step)));
        }
        const u32 items = most * p_.pieces * peers;
        u32 item = warp_, next = warp_ + warps;
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
            next = 2 * warps + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken, 0));
        }
        pushes_.finish();
    }

  private:
    static constexpr u32 STEP_BYTES = STEP * Crossed::BYTES;

    // The places of an item's rows; valid for any item. A rank alone has no items.
    __device__ __forceinline__ u64 entry_of(u32 item) const {
        const u32 peers = max(p_.peers.ranks, 2u) - 1, token = item / peers / p_.pieces;
        return p_.entry(p_.peers.in_turn(item % peers), token, token < p_.most_tokens);
    }

    __device__ __forceinline__ void push(u32 source, u32 number, u64 entry, u32 hits) {
        const u32 begin = number % p_.pieces * p_.piece_vectors();
        const u32 last = min(begin + p_.piece_vectors(), p_.vectors());
        if (begin >= last) {
            return;
        }
        p_.prefetch(entry, begin, last);
        u8* slot = p_.slot_at(source, epoch_ & 1, p_.peers.rank, number / p_.pieces);
        if (CARRIES && begin == 0) {
            pushes_.push_numbers(slot, entry);
        }
        u32 steps = 0;
        for (u32 step = begin; step < last; step += STEP, ++steps) {
            const u32 stage = stages_.next();
            sum_step(stage, entry, hits, step, last);
            if (leads_) {
                pushes_.push_step(slot, stage, step, last, number);
            }
        }
        pushes_.end_piece(source, number, steps);
    }

    // Sums the vectors from `step` on into the stage. All threads of the warp call this.
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
        SumStages::fill();
    }

    const CombineParams& p_;
    u32 warp_;
    bool leads_;
    SumStages stages_;
    Pushes pushes_;
    u64 epoch_ = 0;
    u32 cause_ = 0;  // why this rank refuses the step; CAUSE_NONE if it does not
    u32 sent_ = 0;   // the tokens that rank i sent here, in thread i
    u64 entry_ = 0;  // entry k of the next item, in thread k
};

// Tells every peer that this block has nothing more to push, also if there was nothing to push. All threads of the
// block call this, when its warps have awaited their pieces. No data is read because of these words; they let the
// peers' kernels end.
__device__ inline void announce_done(const CombineParams& p, u64 epoch, u32 block) {
    __syncthreads();  // hands what the warps have awaited to the threads below
    trace(p.trace, AT_ARRIVED);
    if (threadIdx.x + 1 < p.peers.ranks) {
        ptx::store_relaxed_sys(p.done_at(p.peers.in_turn(threadIdx.x), p.peers.rank, block), epoch);
    }
    trace(p.trace, AT_SAID_DONE);
}

}  // namespace raymoe
