// The final reduction of a combine computes each row of y: it adds the ranks' sums of the token, in rank order, as they
// arrive. The sum of this rank's own experts never leaves the rank, but is rounded as if it had.
//
// A warp takes pieces, as the local reduction cuts them (local_reduction.cuh), in the order in which they leave
// (`number_at`). It sums the own experts' rows before it waits for the peers' sums: mostly the warp is early, and then
// only the additions remain.
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/items.cuh"

namespace raymoe {

template <class Type>
class FinalReduction {
  public:
    __device__ FinalReduction(const CombineParams& p, u64 epoch, u32 warp, u32 warps)
        : p_(p), epoch_(epoch), items_(p.taken + 1, warp, warps) {}

    // Computes the warp's pieces; ends early if a wait fails. All threads of the warp call this.
    __device__ __forceinline__ void run() {
        u32 item = items_.first(0), next = items_.first(1);
        Places places = places_of(item);
        while (item < p_.tokens * p_.pieces) {
            const Places of_next = places_of(next);
            const u32 asked = items_.ask();
            if (!sum_piece(p_.number_at(item, p_.tokens), places.mask, own(places))) {
                return;
            }
            item = next;
            next = items_.number(asked);
            places = of_next;
        }
    }

  private:
    // Of a token.
    struct Places {
        u32 mask;   // the ranks that it went to
        u64 entry;  // entry k of it on this rank, in thread k, if it came here
    };

    // Loads the places of an item's token; valid for any item.
    __device__ __forceinline__ Places places_of(u32 item) const {
        const bool wanted = item < p_.tokens * p_.pieces;
        const u32 token = wanted ? p_.number_at(item, p_.tokens) / p_.pieces : 0;
        return {ptx::load_4_if(wanted, p_.masks + token, 0), p_.entry(p_.peers.rank, token, wanted)};
    }

    // The entry, or NOWHERE if the token did not come to this rank.
    __device__ __forceinline__ u64 own(const Places& places) const {
        return places.mask >> p_.peers.rank & 1 ? places.entry : NOWHERE;
    }

    // Computes one piece of a row of y from the sums of the ranks in `mask` and the own experts' rows. Returns false if
    // a wait failed.
    __device__ __forceinline__ bool sum_piece(u32 number, u32 mask, u64 entry) {
        const u32 token = number / p_.pieces, me = p_.peers.rank;
        const u32 begin = number % p_.pieces * p_.piece_vectors();
        const u32 last = min(begin + p_.piece_vectors(), p_.vectors());  // the last pieces may have no vectors
        const u32 hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(entry) != NOWHERE);
        if (hits != 0 && begin < last && !stored_.await(p_, number % p_.pieces)) {
            return false;
        }
        p_.prefetch(entry, begin, last);
        auto slot = [&](u32 rank) { return Term{p_.slot_at(me, epoch_ & 1, rank, token), 1.0f}; };
        u8* row = p_.y + static_cast<u64>(token) * p_.row_bytes;
        for (u32 step = begin; step < last; step += STEP) {
            const u32 first = step + threadIdx.x % 32;
            Crossed own[UNROLL];
            if (hits != 0) {
                float sums[UNROLL][Type::COUNT] = {};
                add_experts<Type>(p_, entry, hits, first, last, sums);
#pragma unroll
                for (u32 i = 0; i < UNROLL; ++i) {
                    own[i] = Crossed::pack(sums[i]);
                }
            }
            if (step == begin && !await_piece(number, mask)) {
                return false;
            }
            if (CARRIES && step == 0) {
                gather_numbers(token, mask, entry);
            }
            float sums[UNROLL][Type::COUNT] = {};
            for (u32 left = mask; left != 0; left &= left - 1) {
                const u32 rank = __ffs(left) - 1;
                if (rank == me) {
                    add(own, sums);
                    continue;
                }
                const u32 next = left & (left - 1);
                const bool both = next != 0 && __ffs(next) - 1 != me;
                add_two<Crossed, UNROLL>(slot(rank), slot(both ? __ffs(next) - 1 : rank), both, first, last, sums);
                left = both ? next : left;
            }
#pragma unroll
            for (u32 i = 0; i < UNROLL; ++i) {
                if (first + 32 * i < last) {
                    ptx::store_16(row + (first + 32 * i) * 16ull, Type::pack(sums[i]));
                }
            }
        }
        trace(p_.trace, AT_PLACED);
        return true;
    }

    // Stores the numbers of a token's entries, whose first piece has arrived. An entry's bits are zero on all ranks but
    // one, so those of all ranks together are its number.
    __device__ __forceinline__ void gather_numbers(u32 token, u32 mask, u64 entry) const {
        const u32 k = threadIdx.x % 32, me = p_.peers.rank;
        u32 number = p_.number_of(entry);
        for (u32 left = mask & ~(1u << me); left != 0; left &= left - 1) {
            const u8* slot = p_.slot_at(me, epoch_ & 1, __ffs(left) - 1, token);
            number |= ptx::load_4_if(k < p_.topk, slot + p_.wire_row_bytes + k * 4, 0);
        }
        if (k < p_.topk) {
            ptx::store_4(p_.returned_numbers + (static_cast<u64>(token) * p_.topk + k) * 4, number);
        }
    }

    __device__ static __forceinline__ void add(const Crossed (&own)[UNROLL], float (*sums)[Type::COUNT]) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            float values[Type::COUNT];
            own[i].unpack(values);
#pragma unroll
            for (u32 j = 0; j < Type::COUNT; ++j) {
                sums[i][j] += values[j];
            }
        }
    }

    // Waits until the piece has arrived from each rank in `mask`. Returns false if a wait of any thread of the warp
    // failed.
    __device__ __forceinline__ bool await_piece(u32 number, u32 mask) const {
        const u32 rank = threadIdx.x % 32, me = p_.peers.rank;
        bool ok = true;
        if (rank != me && mask >> rank & 1) {
            ok = wait_for_epoch(p_.arrival_at(me, rank, number), epoch_, Waiting{p_.op, rank, epoch_}, p_.watch);
            ok = ok && is_of_this_epoch(rank, number);
        }
        ok = __all_sync(0xFFFFFFFF, ok);
        __syncwarp();  // hands what was acquired to the other threads of the warp
        trace_first(p_.trace, AT_FIRST_ROW);
        trace(p_.trace, AT_LAST_ROW);
        return ok;
    }

    // Whether the piece from a rank is of this epoch. Builds without stamps do not check.
    __device__ __forceinline__ bool is_of_this_epoch(u32 rank, u32 number) const {
        if (!STAMPS) {
            return true;
        }
        const u8* slot = p_.slot_at(p_.peers.rank, epoch_ & 1, rank, number / p_.pieces);
        const u64 seen = ptx::load_8(slot + p_.stamp_at(number % p_.pieces));
        if (seen != epoch_) {
            fail(p_.watch, FAILURE_STALE, Waiting{p_.op, rank, epoch_}, epoch_, seen, 0);
        }
        return seen == epoch_;
    }

    const CombineParams& p_;
    u64 epoch_;
    Items items_;
    StoredPieces stored_;
};

}  // namespace raymoe
