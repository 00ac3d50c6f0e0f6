// How rows are added up in a combine: a step of them at a time, by a whole warp, two rows' loads under way together.
#pragma once

#include "raymoe/combine/combine.cuh"
#include "raymoe/base/terms.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

// 16-byte vectors of a row that a thread has under way at a time, of two rows at a time: as many as there are registers
// for where sums cross as something wider.
constexpr u32 UNROLL = Crossed::BYTES > 16 ? 2 : 4;

// Adds to `sums` what the experts made of a token, in the order of k. By a whole warp; `entry` is that of
// CombineParams::entry, bit k of `hits` says that entry k is here.
template <class Type>
__device__ __forceinline__ void add_experts(const CombineParams& p, u64 entry, u32 hits, u32 first, u32 last,
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

constexpr u32 STEP = 32 * UNROLL;  // vectors that a warp sums at a time, and pushes

}  // namespace raymoe
