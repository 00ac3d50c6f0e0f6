// The memory of one dispatch, which the kernels around NCCL's collectives share and the combine reads again.
//
// Every rank gets the ids and weights of all ranks by an all-gather, and computes alone which rows it receives. R
// ranks, at most T tokens a rank (`tokens`), K ids a token, L experts a rank; N = R*T tokens of all ranks, source after
// source.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 MOST_RANKS = 16;
constexpr u32 NOWHERE = 0xFFFFFFFF;  // no row or no place; as an id: no expert

// Why a rank refuses the data of a step; raymoe/exchange/refusal.py has the same numbers.
constexpr u32 CAUSE_NONE = 0;
constexpr u32 CAUSE_ID = 1;        // other: the token, number: the id
constexpr u32 CAUSE_CAPACITY = 2;  // number: the rows needed
constexpr u32 CAUSE_TOKENS = 5;    // other: rows of x, number: the tokens asked for

// 16 bytes behind the rows of each block of a combine. With CAUSE_NONE, `other` is whether the combine is weighted and
// `number` is the dispatch that it combines. Ranks that combine different dispatches are found by these.
struct Status {
    u32 cause;
    u32 other;
    u64 number;
};
static_assert(sizeof(Status) == 16, "");

// The totals of a dispatch. Written by its kernels; read by later kernels of the stream.
struct DispatchRecord {
    Status refusal;             // why this rank refuses the step, if it does
    u64 number;                 // the dispatch, counted from 1 by the exchange
    u64 unused;
    u32 rows_from[MOST_RANKS];  // rows from each rank; as many sums go back there
    u32 rows_to[MOST_RANKS];    // rows to each rank
};
static_assert(sizeof(DispatchRecord) == 32 + 8 * MOST_RANKS, "");

// One allocation for each dispatch, which begins with what all ranks told: for each source topk_idx[T][K], then
// topk_weights[T][K], 4 bytes each. An id of NOWHERE is no expert.
struct DispatchMemory {
    u64 record;  // offset of a DispatchRecord
    // u32[T][R]: the row that holds the sum of each token of this rank from each rank, among the sums that come back.
    // These lie in blocks of T + 1 rows. NOWHERE: that rank has no expert of the token.
    u64 home;
    u64 row_of;  // u32[N]: the row of the table that holds each token of all ranks; NOWHERE: not for this rank
    u64 places;  // u32[N][K]: the place of each (token, k) among this rank's expert-major rows, or NOWHERE
    u32 rank;
    u32 ranks;
    u32 tokens;
    u32 topk;
    u32 local;  // experts of this rank
    // 1: rows lie one behind the other within their source's block of the table. 0: every token has a row there.
    u32 compact;

    __device__ __forceinline__ u64 entries() const { return static_cast<u64>(tokens) * topk; }

    __device__ __forceinline__ u8* topk_idx_of(u8* kept, u32 source) const { return kept + source * entries() * 8; }

    __device__ __forceinline__ u8* topk_weights_of(u8* kept, u32 source) const {
        return topk_idx_of(kept, source) + entries() * 4;
    }

    __device__ __forceinline__ DispatchRecord* record_of(u8* kept) const {
        return reinterpret_cast<DispatchRecord*>(kept + record);
    }
};

__device__ __forceinline__ Status load_status(const void* at) {
    const ptx::Bytes16 both = ptx::load_16(static_cast<const u8*>(at));
    return {static_cast<u32>(both.low), static_cast<u32>(both.low >> 32), both.high};
}

__device__ __forceinline__ void store_status(void* at, const Status& status) {
    ptx::store_16(static_cast<u8*>(at), {static_cast<u64>(status.other) << 32 | status.cause, status.number});
}

}  // namespace raymoe
