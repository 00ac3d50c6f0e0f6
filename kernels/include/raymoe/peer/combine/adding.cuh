// Adds the experts' rows of a combine, a step at a time by a whole warp, with the loads of two rows in flight together.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/base/terms.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

// 16-byte vectors of a row that a thread has in flight at a time, of two rows at a time: as many as there are registers
// for, fewer if sums cross as a wider type. With STAGED_ROWS, vectors that it reads of a stage.
constexpr u32 UNROLL = STAGED_ROWS ? STAGED_ROWS : Crossed::BYTES > 16 ? 2 : 4;

// Adds the experts' rows of a token to `sums`, in the order of k. All threads of the warp call this. `entry` is that of
// CombineCall::entry; bit k of `hits` says that entry k is on this rank.
template <class Type>
__device__ __forceinline__ void add_experts(const CombineCall& p, u64 entry, u32 hits, u32 first, u32 last,
                                            float (*sums)[Type::COUNT]) {
    auto term = [&](u32 k) {
        const u64 chosen = __shfl_sync(0xFFFFFFFF, entry, k);
        return Term{p.expert_rows + static_cast<u64>(static_cast<u32>(chosen)) * p.row_bytes,
                    p.weighted ? __uint_as_float(static_cast<u32>(chosen >> 32)) : 1.0f};
    };
    while (hits != 0) {
        const Term a = term(__ffs(hits) - 1);
        hits &= hits - 1;
        const bool both = hits != 0;
        const Term b = both ? term(__ffs(hits) - 1) : a;
        hits &= hits - 1;
        add_two<Crossing<Type, Type>, UNROLL>(a, b, both, first, last, sums);
    }
}

constexpr u32 STEP = 32 * UNROLL;  // vectors that a warp sums, and pushes, at a time

}  // namespace raymoe
