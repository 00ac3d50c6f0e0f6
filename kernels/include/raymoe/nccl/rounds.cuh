// The memory of one dispatch, which the kernels around NCCL's collectives share and the combine reads again.
//
// Every rank gets the ids and weights of all ranks by an all-gather, and computes alone which rows it receives. R
// ranks, at most T tokens a rank (`tokens`), K ids a token, L experts a rank; N = R*T tokens of all ranks, source after
// source.
#pragma once

#include "raymoe/nccl/statuses.cuh"

namespace raymoe {

constexpr u32 MOST_RANKS = 16;
constexpr u32 NOWHERE = 0xFFFFFFFF;  // no row or no place; as an id: no expert

// The totals of a dispatch. Written by its kernels; read by later kernels of the stream.
struct DispatchRecord {
    Status refusal;             // why this rank refuses the step, if it does
    u64 number;                 // the dispatch, counted from 1 by the exchange
    u64 unused;
    u32 rows_from[MOST_RANKS];  // rows from each rank; as many sums are returned there
    u32 rows_to[MOST_RANKS];    // rows to each rank
};
static_assert(sizeof(DispatchRecord) == 32 + 8 * MOST_RANKS, "");

// One allocation for each dispatch, which begins with what all ranks published: for each source topk_idx[T][K], then
// topk_weights[T][K], 4 bytes each, and last a Status: to which dispatch this one belongs, in a backward pass
// (compare_passes.cu). An id of NOWHERE is no expert.
struct DispatchMemory {
    u64 record;  // offset of a DispatchRecord
    // u32[T][R]: the row that holds the sum of each token of this rank from each rank, among the returned sums. These
    // lie in blocks of T + 1 rows. NOWHERE: that rank has no expert of the token.
    u64 returned_rows;
    u64 row_of;  // u32[N]: the row of the table that holds each token of all ranks; NOWHERE: not for this rank
    u64 places;  // u32[N][K]: the place of each (token, k) among this rank's expert-major rows, or NOWHERE
    u32 rank;
    u32 ranks;
    u32 tokens;
    u32 topk;
    u32 local;  // experts of this rank
    // 1: rows lie one after the other within their source's block of the table. 0: every token has a row there.
    u32 compact;

    __device__ __forceinline__ u64 entries() const { return static_cast<u64>(tokens) * topk; }

    // Bytes that a rank publishes, a multiple of 16. raymoe/exchange/nccl/rounds.py computes the same.
    __device__ __forceinline__ u64 published_bytes() const { return (entries() * 8 + 15) / 16 * 16 + sizeof(Status); }

    __device__ __forceinline__ u8* topk_idx_of(u8* saved, u32 source) const {
        return saved + source * published_bytes();
    }

    __device__ __forceinline__ u8* topk_weights_of(u8* saved, u32 source) const {
        return topk_idx_of(saved, source) + entries() * 4;
    }

    __device__ __forceinline__ u8* pass_of(u8* saved, u32 source) const {
        return topk_idx_of(saved, source + 1) - sizeof(Status);
    }

    __device__ __forceinline__ DispatchRecord* record_of(u8* saved) const {
        return reinterpret_cast<DispatchRecord*>(saved + record);
    }
};

// The bytes that blocks before the `block`-th have besides their T + 1 rows, if each has `skew`, which is signed.
__device__ __forceinline__ long long skew_of(u32 block, u32 skew) {
    return static_cast<long long>(static_cast<int>(block)) * static_cast<int>(skew);
}

}  // namespace raymoe
