// Statuses, which ranks send one another with the sums of a combine: why a rank refuses the step, or which dispatch it
// combines.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// Why a rank refuses the data of a step; raymoe/exchange/refusal.py has the same numbers.
constexpr u32 CAUSE_NONE = 0;
constexpr u32 CAUSE_ID = 1;        // other: the token, number: the id
constexpr u32 CAUSE_CAPACITY = 2;  // number: the rows needed
constexpr u32 CAUSE_TOKENS = 5;    // other: rows of x, number: the tokens asked for

// 16 bytes after the rows of each block of a combine. With CAUSE_NONE, `number` is the dispatch that it combines.
// `other` is whether the combine is weighted, plus 2 if it returns numbers of entries, plus 4 times the number of its
// call site. Statuses that differ show that ranks combine different dispatches, or differently.
struct Status {
    u32 cause;
    u32 other;
    u64 number;
};
static_assert(sizeof(Status) == 16, "");

// The status that a rank sends in the backward pass of dispatch `number`, from 1; 0: it runs no backward pass.
__device__ __forceinline__ Status pass_status(u32 site, u64 number) { return {CAUSE_NONE, site << 2, number}; }

__device__ __forceinline__ Status load_status(const void* at) {
    const ptx::Bytes16 both = ptx::load_16(static_cast<const u8*>(at));
    return {static_cast<u32>(both.low), static_cast<u32>(both.low >> 32), both.high};
}

__device__ __forceinline__ void store_status(void* at, const Status& status) {
    ptx::store_16(static_cast<u8*>(at), {static_cast<u64>(status.other) << 32 | status.cause, status.number});
}

}  // namespace raymoe
