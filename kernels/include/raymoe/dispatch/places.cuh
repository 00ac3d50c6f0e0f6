// Where the rows of a dispatch stand at their receiver: from what the sources told, the same on every block that asks.
#pragma once

#include "raymoe/dispatch/dispatch.cuh"

namespace raymoe {

// Where each source's entries of each expert begin, and with that where everything stands.
class Places {
  public:
    // Shared memory: two words for each expert and one for each rank.
    __device__ Places(const DispatchParams& p, u32* shared)
        : p_(p), counts_(shared), begins_(shared + p.experts), tokens_(begins_ + p.experts) {}

    // By a whole block. `told(source, expert)` gives what a source has for a local expert, and with p.local for an
    // expert how many tokens it has sent.
    template <class Told>
    __device__ __forceinline__ void find(Told told) {
        const DispatchParams& p = p_;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.experts + p.peers.ranks; i += THREADS) {
            const u32 source = i < p.experts ? p.rank_of(i) : i - p.experts;
            const u32 came = told(source, i < p.experts ? p.local_of(i) : p.local);
            if (i < p.experts) {
                counts_[i] = came;
            } else {
                tokens_[source] = came < p.slot_tokens ? came : p.slot_tokens;
            }
        }
        __syncthreads();
        const u32 each = (p.local + THREADS - 1) / THREADS, first = threadIdx.x * each;
        u32 mine = 0;
#pragma unroll 1
        for (u32 e = first; e < first + each && e < p.local; ++e) {
            u32 count = 0;
            for_each_source(e, [&](u32 at, u32 its) {
                begins_[at] = mine + count;
                count += its;
            });
            mine += aligned(count);
        }
        const u32 begin = begin_of(mine);
#pragma unroll 1
        for (u32 e = first; e < first + each && e < p.local; ++e) {
            for_each_source(e, [&](u32 at, u32) { begins_[at] += begin; });
        }
        __syncthreads();
    }

    static __device__ __forceinline__ u32 shared_words(const DispatchParams& p) { return 2 * p.experts + MAX_RANKS; }

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

    // Where the next expert begins.
    __device__ __forceinline__ u32 end(u32 expert) const {
        return expert + 1 < p_.local ? begins_[expert + 1] : total_;
    }

    // The place of what `told` says of an entry of `source`; NOWHERE also where the source contradicts its counts.
    __device__ __forceinline__ u32 place(u32 source, u32 told) const {
        if (told == NOWHERE) {
            return NOWHERE;
        }
        const u32 expert = told >> RANK_BITS, rank = told & RANK_MASK;
        if (expert >= p_.local || rank >= counts_[source * p_.local + expert]) {
            ptx::atomic_min(&p_.scratch->liar, static_cast<u64>(source) << 32 | expert);
            return NOWHERE;
        }
        return begins_[source * p_.local + expert] + rank;
    }

  private:
    // What each source has for an expert, and the index of that. Four loads are under way together; a loop that the
    // compiler unrolls is more instructions than a dispatch of few tokens has time for.
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
        const bool power = (p_.alignment & (p_.alignment - 1)) == 0;  // as it mostly is, and a division takes long
        return power ? ends & ~(p_.alignment - 1) : ends / p_.alignment * p_.alignment;
    }

    // The sum of `mine` over the threads before this one; the sum over all becomes the total.
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
        __syncthreads();
        u32 begin = through - mine;
        total_ = 0;
        for (u32 w = 0; w < WARPS; ++w) {
            begin += w < warp ? sums[w] : 0;
            total_ += sums[w];
        }
        return begin;
    }

    const DispatchParams& p_;
    u32* counts_;  // [source][expert]
    u32* begins_;  // [source][expert]
    u32* tokens_;  // [source]
    u32 total_ = 0;
};

// One entry, which stands at `place` or nowhere: tells home, its weight and, with layout rank, its index. `slot` names
// its row.
__device__ __forceinline__ void plan_entry(const DispatchParams& p, u32 source, u64 entry, u64 told, u32 place,
                                           u64 slot) {
    u8* home = p.home + (static_cast<u64>(source) * p.slot_tokens * p.topk + entry) * 8;
    ptx::store_8(home, (told & ~0xFFFFFFFFull) | place);
    if (place != NOWHERE) {
        ptx::store_4(p.out_weights + place * 4ull, static_cast<u32>(told >> 32));
        if (p.rank_layout) {
            ptx::store_8(p.index + place * 8ull, slot);
        }
    }
}

// One row: its entries' places into `places`, home, weights and index.
__device__ inline void plan_row(const DispatchParams& p, const Places& where, u32 half, u32 source, u32 token,
                                u32* places) {
    const u64 entries = static_cast<u64>(token) * p.topk, slot = p.slot(half, source, token);
    u32 found = 0;
    for (u32 first = 0; first < p.topk; first += 8) {
        u64 told[8];  // all loads are under way together
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u64 entry = entries + first + i;
            told[i] = ptx::load_8_if(first + i < p.topk, p.told_at(p.peers.rank, half, source, entry), NOWHERE);
        }
        for (u32 i = 0; i < 8 && first + i < p.topk; ++i) {
            const u32 place = where.place(source, static_cast<u32>(told[i]));
            plan_entry(p, source, entries + first + i, told[i], place, slot);
            if (place != NOWHERE) {
                // With layout rank a row of this rank has one place, its slot, and one of a peer is there already.
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

// The places of the gap behind an expert's rows.
struct Gap {
    u32 begin;
    u32 end;

    __device__ __forceinline__ Gap(const Places& where, u32 expert) {
        begin = where.begin(expert) + where.count_of(expert);
        end = where.end(expert);
    }
};

// Rows of zeros, with scales, in the gaps behind this placer's share of the experts.
__device__ inline void zero_gaps(const DispatchParams& p, const Places& where, u32 placer) {
    for (u32 expert = placer; expert < p.local; expert += p.placers) {
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

// Weights, index and, where asked, rows of this placer's share of the gaps. The index has no garbage behind the last
// row either: who gathers by all of it would read outside the slots.
__device__ inline void fill_gaps(const DispatchParams& p, const Places& where, u32 placer) {
    if (p.rank_layout) {
        for (u32 place = where.total() + placer * THREADS + threadIdx.x; place < p.capacity;
             place += p.placers * THREADS) {
            ptx::store_8(p.index + place * 8ull, p.zero_slot);
        }
    }
    for (u32 expert = placer * WARPS + threadIdx.x / 32; expert < p.local; expert += p.placers * WARPS) {
        const Gap gap(where, expert);
        for (u32 place = gap.begin + threadIdx.x % 32; place < gap.end; place += 32) {
            ptx::store_4(p.out_weights + place * 4ull, 0);
            if (p.rank_layout) {
                ptx::store_8(p.index + place * 8ull, p.zero_slot);
            }
        }
    }
    if (p.zero_padding && !p.rank_layout) {
        zero_gaps(p, where, placer);
    }
}

// Nothing came: of a step that is refused, or by a rank that is poisoned.
__device__ inline void place_nothing(const DispatchParams& p) {
    for (u32 expert = threadIdx.x; expert <= p.local; expert += THREADS) {
        p.expert_offsets[expert] = 0;
        if (expert < p.local) {
            p.expert_counts[expert] = 0;
        }
    }
}

__device__ inline void tell_counts(const DispatchParams& p, const Places& where) {
    for (u32 expert = threadIdx.x; expert < p.local; expert += THREADS) {
        p.expert_offsets[expert] = where.begin(expert);
        p.expert_counts[expert] = where.count_of(expert);
    }
    if (threadIdx.x == 0) {
        p.expert_offsets[p.local] = where.total();
    }
}

// What every placer does before it touches rows, with its share of the gaps. False: the rows do not fit; then none is
// placed, and each goes home as zeros, that is, not at all.
__device__ inline bool begin_placing(const DispatchParams& p, const Places& where, u32 placer) {
    const bool fits = where.fits();
    if (placer == 0) {
        if (fits) {
            tell_counts(p, where);
        } else {
            place_nothing(p);
            p.scratch->needed = where.total();
        }
        if (threadIdx.x < p.peers.ranks) {
            p.got->tokens[threadIdx.x] = where.tokens(threadIdx.x);
        }
    }
    if (fits) {
        fill_gaps(p, where, placer);
        return true;
    }
    const u64 entries = static_cast<u64>(p.peers.ranks) * p.slot_tokens * p.topk;
    for (u64 i = placer * THREADS + threadIdx.x; i < entries; i += p.placers * THREADS) {
        ptx::store_8(p.home + i * 8, NOWHERE);
    }
    for (u32 place = placer * THREADS + threadIdx.x; p.rank_layout && place < p.capacity;
         place += p.placers * THREADS) {
        ptx::store_8(p.index + place * 8ull, p.zero_slot);
    }
    return false;
}

}  // namespace raymoe
