// What the kernels around NCCL's collectives share: the memory of one dispatch, which its combine reads again.
//
// Every rank tells all others its ids and weights by an all-gather, so each works out alone what it receives. R ranks,
// T tokens a rank at most (`tokens`), K ids a token, L experts a rank; N = R*T tokens of all ranks, one source behind
// the other.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 MOST_RANKS = 16;
constexpr u32 NOWHERE = 0xFFFFFFFF;  // no row, no place; as an id: no expert

// Why the data of a step is refused; raymoe/exchange/refusal.py has the same numbers.
constexpr u32 CAUSE_NONE = 0;
constexpr u32 CAUSE_ID = 1;        // other: the token, number: the id
constexpr u32 CAUSE_CAPACITY = 2;  // number: the rows that were needed
constexpr u32 CAUSE_TOKENS = 5;    // other: rows of x, number: the tokens asked for

// 16 bytes that travel behind the rows of each block of a combine. CAUSE_NONE: `other` says whether the combine is
// weighted, `number` of which dispatch it is, so that ranks which combine different things are found out.
struct Status {
    u32 cause;
    u32 other;
    u64 number;
};
static_assert(sizeof(Status) == 16, "");

// What a dispatch knows as a whole. Written by its kernels; read by later kernels of the stream.
struct DispatchRecord {
    Status refusal;          // why this rank refuses the step, if it does
    u64 number;              // of this dispatch, counted from 1 by the exchange
    u64 unused;
    u32 came[MOST_RANKS];    // rows from each rank; as many sums go back there
    u32 went[MOST_RANKS];    // rows to each rank
};
static_assert(sizeof(DispatchRecord) == 32 + 8 * MOST_RANKS, "");

// One allocation for each dispatch, which begins with what all ranks told: for each source ids[T][K], then
// weights[T][K], 4 bytes each. An id of NOWHERE is no expert.
struct DispatchMemory {
    u64 record;  // offset of a DispatchRecord
    // u32[T][R]: where the sum of each token of this rank stands in what comes back, in rows of blocks that lie T + 1
    // rows apart; NOWHERE where that rank has none of its experts.
    u64 home;
    u64 row_of;  // u32[N]: which row of the table each token of all ranks is; NOWHERE where it is not for this rank
    u64 places;  // u32[N][K]: where each (token, k) stands among this rank's expert-major rows, or NOWHERE
    u32 rank;
    u32 ranks;
    u32 tokens;
    u32 topk;
    u32 local;  // experts of this rank
    // 1: rows that come lie one behind the other within their source's block of the table. 0: every token has its row.
    u32 compact;

    __device__ __forceinline__ u64 entries() const { return static_cast<u64>(tokens) * topk; }

    __device__ __forceinline__ u8* ids_of(u8* kept, u32 source) const { return kept + source * entries() * 8; }

    __device__ __forceinline__ u8* weights_of(u8* kept, u32 source) const {
        return ids_of(kept, source) + entries() * 4;
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
