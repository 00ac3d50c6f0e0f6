// The arrival of a piece at its token's rank, for the warps of the final reduction.
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"

namespace raymoe {

class PieceArrivals {
  public:
    __device__ PieceArrivals(const CombineParams& p, u64 epoch) : p_(p), epoch_(epoch) {}

    // Waits until the piece has arrived from each rank in `mask`. Returns false if a wait of any thread of the warp
    // failed.
    __device__ __forceinline__ bool await(u32 number, u32 mask) const {
        const u32 rank = threadIdx.x % 32, me = p_.peers.rank;
        bool ok = true;
        if (rank != me && mask >> rank & 1) {
            ok = wait_for_epoch(p_.arrival_at(me, rank, number), epoch_, Waiting{p_.op, rank, epoch_}, p_.watch);
            ok = ok && is_of_this_epoch(rank, number);
        }
        ok = __all_sync(0xFFFFFFFF, ok);
        __syncwarp();  // hands what was acquired to the other threads of the warp
        trace_row();
        return ok;
    }

    __device__ __forceinline__ void trace_row() const {
        trace_first(p_.trace, AT_FIRST_ROW);
        trace(p_.trace, AT_LAST_ROW);
    }

    // Stores the numbers of a token's entries, whose first piece has arrived. An entry's bits are zero on all ranks but
    // one, so those of all ranks together are its number.
    __device__ __forceinline__ void gather_numbers(u32 token, u32 mask, u64 entry) const {
        const u32 k = threadIdx.x % 32, me = p_.peers.rank;
        u32 number = p_.number_of(entry);
        for (u32 left = mask & ~(1u << me); left != 0; left &= left - 1) {
            const u8* slot = p_.slot_at(me, epoch_ & 1, __ffs(left) - 1, token);
            number |= ptx::load_4_if(k < p_.topk, slot + p_.wire_row_bytes + k * 4, 0);
        }
        if (k < p_.topk) {
            ptx::store_4(p_.returned_numbers + (static_cast<u64>(token) * p_.topk + k) * 4, number);
        }
    }

  private:
    // Whether the piece from a rank is of this epoch. Builds without stamps do not check.
    __device__ __forceinline__ bool is_of_this_epoch(u32 rank, u32 number) const {
        if (!STAMPS) {
            return true;
        }
        const u8* slot = p_.slot_at(p_.peers.rank, epoch_ & 1, rank, number / p_.pieces);
        const u64 seen = ptx::load_8(slot + p_.stamp_at(number % p_.pieces));
        if (seen != epoch_) {
            fail(p_.watch, FAILURE_STALE, Waiting{p_.op, rank, epoch_}, epoch_, seen, 0);
        }
        return seen == epoch_;
    }

    const CombineParams& p_;
    u64 epoch_;
};

// Adds the sum of this rank's own experts.
template <class Type>
__device__ __forceinline__ void add_own(const Crossed (&own)[UNROLL], float (*sums)[Type::COUNT]) {
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        float values[Type::COUNT];
        own[i].unpack(values);
#pragma unroll
        for (u32 j = 0; j < Type::COUNT; ++j) {
            sums[i][j] += values[j];
        }
    }
}

}  // namespace raymoe
