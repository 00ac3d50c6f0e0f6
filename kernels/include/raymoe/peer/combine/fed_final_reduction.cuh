// The final reduction of final_reduction.cuh for builds with FED_ROWS: own experts' rows and the sums of other ranks
// come through slots in shared memory (row_feed.cuh). Pieces and sums are the same, bit for bit.
//
// While a warp sums a piece, it copies the own experts' rows of the next one, waits for the words of that one, and
// copies the sums of other ranks.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/piece_arrivals.cuh"
#include "raymoe/peer/combine/row_feed.cuh"

namespace raymoe {

template <class Type>
class FedFinalReduction {
  public:
    __device__ FedFinalReduction(const CombineParams& p, u64 epoch, u32 warp, u32 warps, u8* shared)
        : p_(p), arrivals_(p, epoch), warps_(warps), at_(warp),
          own_(ptx::shared_address(shared) + threadIdx.x / 32 * FED_WARP_BYTES + threadIdx.x % 32 * 16),
          feed_(p, ptx::shared_address(shared) + threadIdx.x / 32 * FED_WARP_BYTES + SLOT_BYTES) {
        feed_.begin(epoch);
    }

    // Computes the warp's pieces; ends early if a wait fails. All threads of the warp call this.
    __device__ __forceinline__ void run() {
        const u32 pieces = p_.tokens * p_.pieces;
        u32 next = at_ + warps_;
        load(at_);
        FedPiece piece = piece_of(at_);
        load(next);
        u64 taken = take();
        bool ok = feed_.follow(piece);
#pragma unroll 1
        while (ok && at_ < pieces) {
            const u32 after = 2 * warps_ + static_cast<u32>(__shfl_sync(0xFFFFFFFF, taken, 0));
            const FedPiece ahead = piece_of(next);
            load(after);
            taken = take();
            feed_.follow(ahead);  // the rows of this piece may be copied also if a wait for the next one fails
            ok = sum_piece(piece);
            piece = ahead;
            at_ = next;
            next = after;
        }
        feed_.drain();
    }

  private:
    __device__ __forceinline__ u64 take() const { return threadIdx.x % 32 == 0 ? ptx::atomic_add(p_.taken + 1, 1) : 0; }

    // Loads the places of the rows of a piece.
    __device__ __forceinline__ void load(u32 number) {
        const u32 token = number / p_.pieces;
        const bool wanted = token < p_.tokens;
        mask_ = ptx::load_4_if(wanted, p_.masks + token, 0);
        entry_ = p_.entry(p_.peers.rank, token, wanted);
    }

    // The piece whose places were loaded last. The last pieces of a row may have no vectors.
    __device__ __forceinline__ FedPiece piece_of(u32 number) const {
        const u32 own = 1u << p_.peers.rank;
        FedPiece piece;
        piece.entry = mask_ & own ? entry_ : NOWHERE;
        piece.hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(piece.entry) != NOWHERE);
        piece.ranks = mask_ & ~own;
        piece.number = number;
        piece.begin = number % p_.pieces * p_.piece_vectors();
        piece.last = min(piece.begin + p_.piece_vectors(), p_.vectors());
        return piece;
    }

    // Computes one piece of a row of y. Returns false if a wait failed.
    __device__ __forceinline__ bool sum_piece(const FedPiece& piece) {
        const u32 token = piece.number / p_.pieces, own_rank = 1u << p_.peers.rank, thread = threadIdx.x % 32;
        u8* row = p_.y + static_cast<u64>(token) * p_.row_bytes;
        for (u32 step = piece.begin; step < piece.last; step += STEP) {
            const u32 vectors = min(piece.last - step, STEP);
            if (piece.hits != 0) {
                float sums[UNROLL][Type::COUNT] = {};
                if (!feed_.template add_experts<Type>(piece, sums)) {
                    return false;
                }
#pragma unroll
                for (u32 i = 0; i < UNROLL; ++i) {
                    ptx::shared_store_16(own_ + i * 512, Type::pack(sums[i]));
                }
            }
            float sums[UNROLL][Type::COUNT] = {};
            const u32 ranks = piece.hits != 0 ? piece.ranks | own_rank : piece.ranks;
            for (u32 left = ranks; left != 0; left &= left - 1) {
                if ((left & -left) == own_rank) {
                    add_vectors<Type>(own_, 1.0f, sums);
                } else if (!feed_.template add<Type>(1.0f, sums)) {
                    return false;
                }
            }
            if (CARRIES && step == 0) {
                arrivals_.gather_numbers(token, piece.ranks, piece.entry);
            }
#pragma unroll
            for (u32 i = 0; i < UNROLL; ++i) {
                if (thread + 32 * i < vectors) {
                    ptx::store_16(row + (step + thread + 32 * i) * 16ull, Type::pack(sums[i]));
                }
            }
        }
        trace(p_.trace, AT_PLACED);
        return true;
    }

    const CombineParams& p_;
    PieceArrivals arrivals_;
    u32 warps_;
    u32 at_;
    u32 own_;  // this thread's vectors of the own experts' sum, in shared memory
    RowFeed<FINAL_SLOTS, true> feed_;
    u32 mask_ = 0;   // the ranks that the token of the piece loaded last went to
    u64 entry_ = 0;  // entry k of that token, in thread k
};

}  // namespace raymoe
