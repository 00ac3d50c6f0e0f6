// How the rows of few tokens are dealt out to warps. raymoe/device/ll.py decides it: a division takes a kernel long.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// A number that others, below 2^31, are divided by.
struct Divisor {
    u32 by;
    u32 inverse;
    u32 shift;

    __device__ __forceinline__ u32 under(u32 number) const {
        return static_cast<u32>(static_cast<u64>(number * 2) * inverse >> 32) >> shift;
    }
};

// Which part of which row a warp has to do with.
struct Unit {
    u32 token;
    u32 step;    // among the peers that have a row of the token, or 0
    u32 number;  // among the units of the row
};

// Rows are cut into units of `each` groups of lines, the last one of a row maybe of fewer, token after token and of a
// token peer after peer.
struct Dealing {
    u32 each;
    u32 groups;  // of a row
    Divisor units;  // of a row
    Divisor peers;  // rows of a token

    __device__ __forceinline__ Unit unit(u32 u) const {
        const u32 row = units.under(u), token = peers.under(row);
        return {token, row - token * peers.by, u - row * units.by};
    }

    // Units of so many tokens.
    __device__ __forceinline__ u32 all(u32 tokens) const { return tokens * peers.by * units.by; }

    // The first group of a unit.
    __device__ __forceinline__ u32 begin(u32 unit) const { return unit * each; }

    // Groups of a unit.
    __device__ __forceinline__ u32 count(u32 unit) const {
        const u32 left = groups - begin(unit);
        return left < each ? left : each;
    }
};

}  // namespace raymoe
