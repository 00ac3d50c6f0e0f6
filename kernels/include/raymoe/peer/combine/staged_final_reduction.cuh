// The final reduction of final_reduction.cuh for builds with STAGED_ROWS: own experts' rows and the sums of other ranks
// come through stages (row_stages.cuh), and y leaves by bulk stores. Pieces and sums are the same, bit for bit.
//
// While a warp sums a piece, it loads the own experts' rows of the next one. When it begins with a piece, it looks once
// whether the piece has arrived from all ranks; then it loads their sums while it adds its own experts' rows. Else it
// waits for the words when these are added.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/piece_arrivals.cuh"
#include "raymoe/peer/combine/row_stages.cuh"

namespace raymoe {

template <class Type>
class StagedFinalReduction {
  public:
    __device__ StagedFinalReduction(const CombineParams& p, u64 epoch, u32 warp, u32 warps, u8* shared)
        : p_(p), arrivals_(p, epoch), warps_(warps), at_(warp), leads_(threadIdx.x % 32 == 0),
          memory_(ptx::shared_address(shared) + threadIdx.x / 32 * staged_memory(p)), stages_(memory_, STAGE_BYTES),
          feed_(p, memory_ + leaving_memory()) {
        feed_.begin(epoch);
    }

    // Computes the warp's pieces; ends early if a wait fails. All threads of the warp call this.
    __device__ __forceinline__ void run() {
        const u32 pieces = p_.tokens * p_.pieces;
        u32 next = at_ + warps_;
        load(at_);
        StagedPiece piece = piece_of(at_);
        load(next);
        u64 taken = take();
        feed_.follow(with_peers(piece));
        bool ok = true;
#pragma unroll 1
        while (ok && at_ < pieces) {
            const u32 after = 2 * warps_ + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken, 0));
            const StagedPiece ahead = piece_of(next);
            load(after);
            taken = take();
            feed_.follow(with_peers(ahead));
            ok = sum_piece(piece);
            piece = ahead;
            at_ = next;
            next = after;
        }
        if (!ok) {
            feed_.drain();
        }
        if (leads_) {
            ptx::bulk_wait<0>();  // y is stored before the last block out may store NaN, and before the kernel ends
        }
    }

  private:
    __device__ __forceinline__ u64 take() const { return leads_ ? ptx::atomic_add(p_.taken + 1, 1) : 0; }

    // Loads the places of the rows of a piece.
    __device__ __forceinline__ void load(u32 number) {
        const u32 token = number / p_.pieces;
        const bool wanted = token < p_.tokens;
        mask_ = ptx::load_4_if(wanted, p_.masks + token, 0);
        entry_ = p_.entry(p_.peers.rank, token, wanted);
    }

    // The piece whose places were loaded last. Its ranks are all to which its token went, this rank too. The last
    // pieces of a row may have no vectors.
    __device__ __forceinline__ StagedPiece piece_of(u32 number) const {
        StagedPiece piece;
        piece.entry = mask_ >> p_.peers.rank & 1 ? entry_ : NOWHERE;
        piece.hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(piece.entry) != NOWHERE);
        piece.ranks = mask_;
        piece.number = number;
        piece.begin = number % p_.pieces * p_.piece_vectors();
        piece.last = min(piece.begin + p_.piece_vectors(), p_.vectors());
        return piece;
    }

    // The same piece with the ranks whose sums are loaded.
    __device__ __forceinline__ StagedPiece with_peers(StagedPiece piece) const {
        piece.ranks &= ~(1u << p_.peers.rank);
        return piece;
    }

    // Computes one piece of a row of y. Returns false if a wait failed.
    __device__ __forceinline__ bool sum_piece(const StagedPiece& piece) {
        const u32 token = piece.number / p_.pieces;
        u8* row = p_.y + static_cast<u64>(token) * p_.row_bytes;
        for (u32 step = piece.begin; step < piece.last; step += STEP) {
            const u32 vectors = min(piece.last - step, STEP);
            Crossed own[UNROLL];
            if (piece.hits != 0) {
                float sums[UNROLL][Type::COUNT] = {};
                add_staged_experts<Type>(p_, feed_, piece, vectors, sums);
#pragma unroll
                for (u32 i = 0; i < UNROLL; ++i) {
                    own[i] = Crossed::pack(sums[i]);
                }
            }
            if (step == piece.begin && !await_words(piece)) {
                return false;
            }
            if (CARRIES && step == 0) {
                arrivals_.gather_numbers(token, piece.ranks, piece.entry);
            }
            float sums[UNROLL][Type::COUNT] = {};
            for (u32 left = piece.ranks; left != 0; left &= left - 1) {
                if (__ffs(left) - 1 == p_.peers.rank) {
                    add_own<Type>(own, sums);
                } else {
                    add_row<Crossed>(feed_.await(), 1.0f, vectors, sums);
                    feed_.take();
                }
            }
            store(row, step, vectors, sums);
        }
        trace(p_.trace, AT_PLACED);
        return true;
    }

    // Waits until the piece has arrived from all ranks. Where the feed has seen that, only stamps are looked at.
    __device__ __forceinline__ bool await_words(const StagedPiece& piece) {
        if ((piece.ranks & ~(1u << p_.peers.rank)) == 0) {
            return true;
        }
        const bool seen = feed_.has_words(piece.number);
        if (seen && !STAMPS) {
            arrivals_.trace_row();
            return true;
        }
        if (!arrivals_.await(piece.number, piece.ranks)) {
            return false;
        }
        if (!seen) {
            feed_.arrived();
        }
        return true;
    }

    // Stores a step of y out of a stage.
    __device__ __forceinline__ void store(u8* row, u32 step, u32 vectors, const float (*sums)[Type::COUNT]) {
        const u32 stage = stages_.next(), thread = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (thread + 32 * i < vectors) {
                ptx::shared_store_16(stage + (thread + 32 * i) * 16, Type::pack(sums[i]));
            }
        }
        SumStages::fill();
        if (leads_) {
            ptx::bulk_store(row + step * 16ull, stage, vectors * 16);
            ptx::bulk_commit();
        }
    }

    const CombineParams& p_;
    PieceArrivals arrivals_;
    u32 warps_;
    u32 at_;
    bool leads_;
    u32 memory_;
    SumStages stages_;
    RowFeed<true> feed_;
    u32 mask_ = 0;   // the ranks that the token of the piece loaded last went to
    u64 entry_ = 0;  // entry k of that token, in thread k
};

}  // namespace raymoe
