// Adds rows in float32, two at a time by a whole warp, so that the loads of both are in flight together.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// A row to add, and its factor.
struct Term {
    const u8* row;
    float weight;
};

// Adds `a`, then `b` if `both`, to `sums`: the UNROLL vectors `first` + 32 * i that are below `last`. The loads of both
// rows are in flight together.
template <class Vector, u32 UNROLL>
__device__ __forceinline__ void add_two(const Term& a, const Term& b, bool both, u32 first, u32 last,
                                        float (*sums)[Vector::COUNT]) {
    Vector loaded[2][UNROLL];
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        if (first + 32 * i < last) {
            loaded[0][i] = Vector::load(a.row + static_cast<u64>(first + 32 * i) * Vector::BYTES);
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        if (both && first + 32 * i < last) {
            loaded[1][i] = Vector::load(b.row + static_cast<u64>(first + 32 * i) * Vector::BYTES);
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        float values[Vector::COUNT];
        loaded[0][i].unpack(values);
#pragma unroll
        for (u32 j = 0; j < Vector::COUNT; ++j) {
            sums[i][j] += a.weight * values[j];
        }
        if (both) {
            loaded[1][i].unpack(values);
#pragma unroll
            for (u32 j = 0; j < Vector::COUNT; ++j) {
                sums[i][j] += b.weight * values[j];
            }
        }
    }
}

}  // namespace raymoe
