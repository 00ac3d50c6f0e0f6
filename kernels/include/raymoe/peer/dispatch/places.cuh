// Computes the place of each row at the receiver from the counts of all sources. Every block that computes it gets the
// same result.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"

namespace raymoe {

#ifndef GROUPED_EXPERTS
#define GROUPED_EXPERTS 0  // 1: `group` experts share a gap, after the last of them
#endif
constexpr bool GROUPED = GROUPED_EXPERTS;

// The place at which each source's entries of each expert begin.
class Places {
  public:
    // `shared`: two words for each expert and one for each rank.
    __device__ Places(const DispatchCall& p, u32* shared)
        : p_(p), counts_(shared), begins_(shared + p.experts), tokens_(begins_ + p.experts) {}

    // Finds all places. All threads of the block call this. `count_of_source(source, expert)` returns the source's
    // entries for a local expert; for expert p.local, the tokens that it sent.
    template <class CountOfSource>
    __device__ __forceinline__ void find(CountOfSource count_of_source) {
        const DispatchCall& p = p_;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.experts + p.peers.ranks; i += THREADS) {
            const u32 source = i < p.experts ? p.rank_of(i) : i - p.experts;
            const u32 came = count_of_source(source, i < p.experts ? p.local_of(i) : p.local);
            if (i < p.experts) {
                counts_[i] = came;
            } else {
                tokens_[source] = came < p.slot_tokens ? came : p.slot_tokens;
            }
        }
        block_barrier();
        const u32 each = experts_of_a_thread(), first = threadIdx.x * each;
        u32 mine = 0, left = p.group;
#pragma unroll 1
        for (u32 e = first; e < first + each && e < p.local; ++e) {
            u32 count = 0;
            for_each_source(e, [&](u32 at, u32 its) {
                begins_[at] = mine + count;
                count += its;
            });
            if constexpr (!GROUPED) {
                mine += aligned(count);
            } else {
                mine += count;
                if (--left == 0) {
                    mine = aligned(mine);
                    left = p.group;
                }
            }
        }
        const u32 begin = begin_of(mine);
#pragma unroll 1
        for (u32 e = first; e < first + each && e < p.local; ++e) {
            for_each_source(e, [&](u32 at, u32) { begins_[at] += begin; });
        }
        block_barrier();
    }

    static __device__ __forceinline__ u32 shared_words(const DispatchCall& p) { return 2 * p.experts + MAX_RANKS; }

    __device__ __forceinline__ u32 total() const { return total_; }

    __device__ __forceinline__ bool fits() const { return total_ <= p_.capacity; }

    __device__ __forceinline__ u32 begin(u32 expert) const { return begins_[expert]; }

    __device__ __forceinline__ u32 tokens(u32 source) const { return tokens_[source]; }

    __device__ __forceinline__ u32 most_tokens() const {
        u32 most = 0;
        for (u32 source = 0; source < p_.peers.ranks; ++source) {
            most = tokens_[source] > most ? tokens_[source] : most;
        }
        return most;
    }

    __device__ __forceinline__ u32 count_of(u32 expert) const {
        u32 sum = 0;
        for_each_source(expert, [&](u32, u32 count) { sum += count; });
        return sum;
    }

    // The place where the next expert begins.
    __device__ __forceinline__ u32 end(u32 expert) const {
        return expert + 1 < p_.local ? begins_[expert + 1] : total_;
    }

    // The place of a routing entry of `source`; NOWHERE also if the entry contradicts the source's counts.
    __device__ __forceinline__ u32 place(u32 source, u32 routing) const {
        if (routing == NOWHERE) {
            return NOWHERE;
        }
        const u32 expert = routing >> RANK_BITS, rank = routing & RANK_MASK;
        if (expert >= p_.local || rank >= counts_[source * p_.local + expert]) {
            ptx::atomic_min(&p_.scratch->bad_count, static_cast<u64>(source) << 32 | expert);
            return NOWHERE;
        }
        return begins_[source * p_.local + expert] + rank;
    }

  private:
    // The experts for which a thread computes places: whole groups, so that every thread's sum is a multiple of the
    // alignment.
    __device__ __forceinline__ u32 experts_of_a_thread() const {
        const u32 least = (p_.local + THREADS - 1) / THREADS;
        if constexpr (GROUPED) {  // a thread mostly has one group; a division is slow
            return least <= p_.group ? p_.group : (least + p_.group - 1) / p_.group * p_.group;
        }
        return least;
    }

    // Calls `act` with the index of each source's entry for an expert, and its count. Four loads are in flight
    // together. A loop that the compiler unrolls has more instructions than a dispatch of few tokens has time for.
    template <class Do>
    __device__ __forceinline__ void for_each_source(u32 expert, Do act) const {
        constexpr u32 TOGETHER = 4;
#pragma unroll 1
        for (u32 source = 0; source < p_.peers.ranks; source += TOGETHER) {
            const u32 first = source * p_.local + expert;
            u32 counts[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                counts[i] = source + i < p_.peers.ranks ? counts_[first + i * p_.local] : 0;
            }
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                if (source + i < p_.peers.ranks) {
                    act(first + i * p_.local, counts[i]);
                }
            }
        }
    }

    __device__ __forceinline__ u32 aligned(u32 rows) const {
        const u32 ends = rows + p_.alignment - 1;
        const bool power = (p_.alignment & (p_.alignment - 1)) == 0;  // the usual case; a division is slow
        return power ? ends & ~(p_.alignment - 1) : ends / p_.alignment * p_.alignment;
    }

    // The sum of `mine` over the threads before this one. The sum over all threads becomes the total.
    __device__ __forceinline__ u32 begin_of(u32 mine) {
        __shared__ u32 sums[WARPS];
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 through = mine;
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xFFFFFFFF, through, step);
            through += lane >= step ? other : 0;
        }
        if (lane == 31) {
            sums[warp] = through;
        }
        block_barrier();
        u32 begin = through - mine;
        total_ = 0;
        for (u32 w = 0; w < WARPS; ++w) {
            begin += w < warp ? sums[w] : 0;
            total_ += sums[w];
        }
        return begin;
    }

    const DispatchCall& p_;
    u32* counts_;  // [source][expert]
    u32* begins_;  // [source][expert]
    u32* tokens_;  // [source]
    u32 total_ = 0;
};

// Whether a dispatch fills `index` (layout rank only), and with what in gaps.
struct Index {
    bool wanted;
    u64 zero_slot;  // for gaps
};
constexpr Index NO_INDEX{false, 0};

// Stores the results of one entry: its place, which is `place` or NOWHERE, its weight and, if `indexed`, its index.
// `slot` is the number of its row's slot.
__device__ __forceinline__ void plan_entry(const DispatchCall& p, u32 source, u64 entry, u64 routing, u32 place,
                                           bool indexed, u64 slot) {
    u8* at = p.entry_places + (static_cast<u64>(source) * p.slot_tokens * p.topk + entry) * 8;
    ptx::store_8(at, (routing & ~0xFFFFFFFFull) | place);
    if (place != NOWHERE) {
        ptx::store_4(p.out_weights + place * 4ull, static_cast<u32>(routing >> 32));
        if (indexed) {
            ptx::store_8(p.index + place * 8ull, slot);
        }
    }
}

// Stores the results of one row's entries, and their places into `places`.
__device__ inline void plan_row(const DispatchParams& p, const Places& where, u32 parity, u32 source, u32 token,
                                u32* places) {
    const u64 entries = static_cast<u64>(token) * p.topk, slot = p.slot(parity, source, token);
    u32 found = 0;
    for (u32 first = 0; first < p.topk; first += 8) {
        u64 routing[8];  // all loads are in flight together
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u64 entry = entries + first + i;
            const u8* routing_at = p.routing_entry_at(p.peers.rank, parity, source, entry);
            routing[i] = ptx::load_8_if(first + i < p.topk, routing_at, NOWHERE);
        }
        for (u32 i = 0; i < 8 && first + i < p.topk; ++i) {
            const u32 place = where.place(source, static_cast<u32>(routing[i]));
            plan_entry(p, source, entries + first + i, routing[i], place, p.rank_layout, slot);
            if (place != NOWHERE) {
                // With layout rank an own row has one place, its slot. A row of a peer is in its slot already.
                if (!p.rank_layout) {
                    places[found++] = place;
                } else if (OWN_FROM_X && source == p.peers.rank && found == 0) {
                    places[found++] = static_cast<u32>(slot);
                }
            }
        }
    }
    if (found < p.topk) {
        places[found] = NOWHERE;
    }
}

// The places of the gap after an expert's rows; none inside a group of experts. `Where`: Places or KnownPlaces.
struct Gap {
    u32 begin;
    u32 end;

    template <class Where>
    __device__ __forceinline__ Gap(const Where& where, u32 expert) {
        begin = where.begin(expert) + where.count_of(expert);
        end = where.end(expert);
    }
};

// This block's share of work that blocks divide. In dispatch_ll.cu the first blocks of SMs divide it.
struct Share {
    u32 number;
    u32 blocks;
};

// Stores rows of zeros, with scales, into the gaps after this block's share of the experts.
template <class Where>
__device__ inline void zero_gaps(const DispatchCall& p, const Where& where, Share share) {
    for (u32 expert = share.number; expert < p.local; expert += share.blocks) {
        const Gap gap(where, expert);
        const u64 row = p.out_row_bytes, end = gap.end * row;
        for (u64 at = gap.begin * row + threadIdx.x * 16ull; at < end; at += THREADS * 16ull) {
            ptx::store_16(p.out + at, {0, 0});
        }
        const u32 rows = gap.end - gap.begin;
        for (u32 i = threadIdx.x; p.scales != nullptr && i < rows * p.blocks(); i += THREADS) {
            const u64 at = static_cast<u64>(i / rows) * p.scale_stride + gap.begin + i % rows;
            ptx::store_4(p.scales + at * 4, __float_as_uint(1.0f));  // zero times anything but NaN
        }
    }
}

// Stores weights, index and, if asked, rows of this block's share of the gaps. The index is also valid after the last
// row: a caller that gathers by the whole index must not read outside the slots.
__device__ inline void fill_gaps(const DispatchCall& p, const Places& where, Share share, Index index) {
    if (index.wanted) {
        for (u32 place = where.total() + share.number * THREADS + threadIdx.x; place < p.capacity;
             place += share.blocks * THREADS) {
            ptx::store_8(p.index + place * 8ull, index.zero_slot);
        }
    }
    for (u32 expert = share.number * WARPS + threadIdx.x / 32; expert < p.local; expert += share.blocks * WARPS) {
        const Gap gap(where, expert);
        for (u32 place = gap.begin + threadIdx.x % 32; place < gap.end; place += 32) {
            ptx::store_4(p.out_weights + place * 4ull, 0);
            if (index.wanted) {
                ptx::store_8(p.index + place * 8ull, index.zero_slot);
            }
        }
    }
    if (p.zero_padding && !index.wanted) {
        zero_gaps(p, where, share);
    }
}

// Stores counts of 0: the step is refused, or this rank is poisoned.
__device__ inline void store_no_counts(const DispatchCall& p) {
    for (u32 expert = threadIdx.x; expert <= p.local; expert += THREADS) {
        p.expert_offsets[expert] = 0;
        if (expert < p.local) {
            p.expert_counts[expert] = 0;
        }
    }
}

__device__ inline void store_counts(const DispatchCall& p, const Places& where) {
    for (u32 expert = threadIdx.x; expert < p.local; expert += THREADS) {
        p.expert_offsets[expert] = where.begin(expert);
        p.expert_counts[expert] = where.count_of(expert);
    }
    if (threadIdx.x == 0) {
        p.expert_offsets[p.local] = where.total();
    }
}

// Stores counts and this block's share of the gaps: every placement block calls this before it touches rows. Returns
// false if the rows do not fit. Then none is placed, and every entry's place is NOWHERE, so the combine sums no row.
__device__ inline bool begin_placing(const DispatchCall& p, const Places& where, Share share, Index index) {
    const bool fits = where.fits();
    if (share.number == 0) {
        if (fits) {
            store_counts(p, where);
        } else {
            store_no_counts(p);
            p.scratch->needed = where.total();
        }
        if (threadIdx.x < p.peers.ranks) {
            p.summary->tokens[threadIdx.x] = where.tokens(threadIdx.x);
        }
    }
    if (fits) {
        fill_gaps(p, where, share, index);
        return true;
    }
    const u64 entries = static_cast<u64>(p.peers.ranks) * p.slot_tokens * p.topk;
    for (u64 i = share.number * THREADS + threadIdx.x; i < entries; i += share.blocks * THREADS) {
        ptx::store_8(p.entry_places + i * 8, NOWHERE);
    }
    for (u32 place = share.number * THREADS + threadIdx.x; index.wanted && place < p.capacity;
         place += share.blocks * THREADS) {
        ptx::store_8(p.index + place * 8ull, index.zero_slot);
    }
    return false;
}

}  // namespace raymoe
