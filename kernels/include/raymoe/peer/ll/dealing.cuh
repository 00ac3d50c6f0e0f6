// Deals the rows of few tokens out to warps. exchange/peer/ll.py computes the numbers, because kernels divide slowly.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// A divisor of numbers below 2^31.
struct Divisor {
    u32 by;
    u32 inverse;
    u32 shift;

    __device__ __forceinline__ u32 under(u32 number) const {
        return static_cast<u32>(static_cast<u64>(number * 2) * inverse >> 32) >> shift;
    }
};

// The part of a row that is one warp's work.
struct Unit {
    u32 token;
    u32 step;    // of the peer (`Peers::in_turn`) if each token has a row for several peers, else 0
    u32 number;  // among the units of the row
};

// Rows are cut into units of `each` groups of lines; the last unit of a row may have fewer. Units are numbered token
// after token, and peer after peer within a token.
struct Dealing {
    u32 each;
    u32 groups;  // of a row
    Divisor units;  // of a row
    Divisor peers;  // rows of a token

    __device__ __forceinline__ Unit unit(u32 u) const {
        const u32 row = units.under(u), token = peers.under(row);
        return {token, row - token * peers.by, u - row * units.by};
    }

    // The number of units of so many tokens.
    __device__ __forceinline__ u32 all(u32 tokens) const { return tokens * peers.by * units.by; }

    // The first group of a unit.
    __device__ __forceinline__ u32 begin(u32 unit) const { return unit * each; }

    // The number of groups of a unit.
    __device__ __forceinline__ u32 count(u32 unit) const {
        const u32 left = groups - begin(unit);
        return left < each ? left : each;
    }
};

}  // namespace raymoe
