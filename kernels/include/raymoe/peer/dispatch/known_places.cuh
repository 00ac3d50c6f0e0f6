// Finds the place of each row in the results of an earlier dispatch, for builds with KNOWN_ROUTING. Nothing is computed
// from counts, and the results do not change.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/places.cuh"

namespace raymoe {

// The places of an earlier dispatch, by its results. It has the members of Places that placement blocks use after
// `find`.
class KnownPlaces {
  public:
    __device__ KnownPlaces(const DispatchCall& p, u32*) : p_(p) {}

    __device__ __forceinline__ u32 begin(u32 expert) const { return p_.expert_offsets[expert]; }

    __device__ __forceinline__ u32 end(u32 expert) const { return p_.expert_offsets[expert + 1]; }

    __device__ __forceinline__ u32 count_of(u32 expert) const { return p_.expert_counts[expert]; }

    __device__ __forceinline__ u32 tokens(u32 source) const { return p_.summary->tokens[source]; }

    __device__ __forceinline__ u32 most_tokens() const {
        u32 most = 0;
        for (u32 source = 0; source < p_.peers.ranks; ++source) {
            most = tokens(source) > most ? tokens(source) : most;
        }
        return most;
    }

  private:
    const DispatchCall& p_;
};

// Reads one row's places out of `entry_places` into `places`.
__device__ inline void plan_row(const DispatchParams& p, const KnownPlaces&, u32, u32 source, u32 token, u32* places) {
    const u64 entries = (static_cast<u64>(source) * p.slot_tokens + token) * p.topk;
    u32 found = 0;
    for (u32 first = 0; first < p.topk; first += 8) {
        u32 place[8];  // all loads are in flight together
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            place[i] = ptx::load_4_if(first + i < p.topk, p.entry_places + (entries + first + i) * 8, NOWHERE);
        }
        for (u32 i = 0; i < 8 && first + i < p.topk; ++i) {
            if (place[i] != NOWHERE) {
                places[found++] = place[i];
            }
        }
    }
    if (found < p.topk) {
        places[found] = NOWHERE;
    }
}

// Takes the place of `find_places` of placement_blocks.cuh, but stores only rows of zeros. Where the rows of the
// earlier dispatch did not fit, no row has a place. All threads of the block call this.
__device__ __forceinline__ bool find_places(const DispatchParams& p, u32, KnownPlaces& where, Share share) {
    if (p.zero_padding) {
        zero_gaps(p, where, share);
    }
    return true;
}

#if KNOWN_ROUTING
using RowPlaces = KnownPlaces;
#else
using RowPlaces = Places;
#endif

}  // namespace raymoe
