// The local reduction of local_reduction.cuh for builds with FED_ROWS: experts' rows come through slots in shared
// memory (row_feed.cuh). Items, pieces, words and sums are the same, bit for bit.
//
// While a warp sums an item, it copies the rows of the next one, asks for the places of the one after that, and takes
// one more from the count.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/pushes.cuh"
#include "raymoe/peer/combine/row_feed.cuh"

namespace raymoe {

template <class Type>
class FedLocalReduction {
  public:
    __device__ FedLocalReduction(const CombineParams& p, u32 block, u8* shared)
        : p_(p), warp_(block * p.local_warps + threadIdx.x / 32), leads_(threadIdx.x % 32 == 0),
          memory_(ptx::shared_address(shared) + threadIdx.x / 32 * FED_WARP_BYTES), stages_(memory_, SLOT_BYTES),
          pushes_(p, SLOT_BYTES), feed_(p, memory_ + STEPS_UNDER_WAY * SumStages::bytes(SLOT_BYTES)) {}

    // Only issues loads, before the epoch is known.
    __device__ __forceinline__ void begin() {
        const u32 thread = threadIdx.x % 32;
        cause_ = ptx::load_4(&p_.summary->refusal.cause);
        sent_ = ptx::load_4_if(thread < p_.peers.ranks, &p_.summary->tokens[thread], 0);
        entry_ = entry_of(warp_);
    }

    // Reduces the warp's items, and returns when every piece has arrived and its word is stored. All threads of the
    // warp call this.
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
        if (item >= items) {
            return;  // nothing is pushed, so there is nothing to announce
        }
        FedPiece piece = piece_of(item, items, entry_);
        entry_ = entry_of(next);
        u64 taken = take();
        feed_.follow(piece);
#pragma unroll 1
        while (item < items) {
            const u32 after = 2 * warps + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken, 0));
            const FedPiece ahead = piece_of(next, items, entry_);
            entry_ = entry_of(after);
            taken = take();
            feed_.follow(ahead);
            if (piece.has_rows()) {
                push(p_.peers.in_turn(item % peers), piece);
            }
            piece = ahead;
            item = next;
            next = after;
        }
        pushes_.finish();
    }

  private:
    __device__ __forceinline__ u64 take() const { return leads_ ? ptx::atomic_add(p_.taken, 1) : 0; }

    // The places of an item's rows; valid for any item. A rank alone has no items.
    __device__ __forceinline__ u64 entry_of(u32 item) const {
        const u32 peers = max(p_.peers.ranks, 2u) - 1, token = item / peers / p_.pieces;
        return p_.entry(p_.peers.in_turn(item % peers), token, token < p_.most_tokens);
    }

    // The piece of an item, without rows if there is no such item.
    __device__ __forceinline__ FedPiece piece_of(u32 item, u32 items, u64 entry) const {
        const u32 peers = p_.peers.ranks - 1;
        FedPiece piece;
        piece.entry = entry;
        piece.number = item / peers;
        const u32 sent = __shfl_sync(0xFFFFFFFF, sent_, p_.peers.in_turn(item % peers));
        const bool wanted = item < items && piece.number / p_.pieces < sent;
        piece.hits = __ballot_sync(0xFFFFFFFF, wanted && static_cast<u32>(entry) != NOWHERE);
        piece.begin = piece.number % p_.pieces * p_.piece_vectors();
        piece.last = min(piece.begin + p_.piece_vectors(), p_.vectors());
        return piece;
    }

    __device__ __forceinline__ void push(u32 source, const FedPiece& piece) {
        u8* slot = p_.slot_at(source, epoch_ & 1, p_.peers.rank, piece.number / p_.pieces);
        if (CARRIES && piece.begin == 0) {
            pushes_.push_numbers(slot, piece.entry);
        }
        u32 steps = 0;
        for (u32 step = piece.begin; step < piece.last; step += STEP, ++steps) {
            const u32 stage = sum_step(piece, step);
            if (leads_) {
                pushes_.push_step(slot, stage, step, piece.last, piece.number);
            }
        }
        pushes_.end_piece(source, piece.number, steps);
    }

    // Sums the vectors from `step` on into a stage, and returns it.
    __device__ __forceinline__ u32 sum_step(const FedPiece& piece, u32 step) {
        const u32 vectors = min(piece.last - step, STEP), thread = threadIdx.x % 32;
        float sums[UNROLL][Type::COUNT] = {};
        feed_.template add_experts<Type>(piece, sums);
        const u32 stage = stages_.next();
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (thread + 32 * i < vectors) {
                Crossed::pack(sums[i]).shared_store(stage + (thread + 32 * i) * Crossed::BYTES);
            }
        }
        SumStages::fill();
        return stage;
    }

    const CombineParams& p_;
    u32 warp_;
    bool leads_;
    u32 memory_;
    SumStages stages_;
    Pushes pushes_;
    RowFeed<LOCAL_SLOTS, false> feed_;
    u64 epoch_ = 0;
    u32 cause_ = 0;  // why this rank refuses the step; CAUSE_NONE if it does not
    u32 sent_ = 0;   // the tokens that rank i sent here, in thread i
    u64 entry_ = 0;  // entry k of the next item, in thread k
};

}  // namespace raymoe
