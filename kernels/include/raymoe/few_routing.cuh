// The routers of a dispatch of few tokens: what routing.cuh finds, each router by itself and in one trip.
//
// Entries are cut into runs of 32, one a thread of a warp. A router counts the entries of each expert before its run,
// so that none waits for another, and all its warps number the run alike: warp r tells the r-th rank. Ids and weights
// are loaded before the epoch is known.
#pragma once

#include "raymoe/few_words.cuh"

namespace raymoe {

class FewRouter {
  public:
    // Shared memory: `experts` counts, of what is before the run. The `number`-th router takes every p.routers-th run.
    __device__ FewRouter(const DispatchParams& p, u32 number, u8* shared)
        : p_(p), number_(number), counts_(reinterpret_cast<u32*>(shared)) {}

    // Loads entries that may turn out not to be sent: the epoch and the number of tokens need not be known. The block
    // has a barrier between this and `run`.
    __device__ __forceinline__ void begin() {
        const u32 first = number_ * RUN, all = p_.tokens * p_.topk;
        load(first, all);
        const u32 before = first < all ? first : all;
#pragma unroll
        for (u32 i = 0; i < EARLY; ++i) {
            const u32 entry = threadIdx.x + i * THREADS;
            early_[i] = p_.id_if(entry < before, entry);
        }
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p_.experts; i += THREADS) {
            counts_[i] = 0;
        }
    }

    // By a whole block that has begun. False: this thread has met an id that is out of range.
    __device__ __forceinline__ bool run(u64 epoch, u32 tokens) {
        const TellInWords words{p_, epoch};
        const u32 entries = tokens * p_.topk;
        id_ = number_ * RUN + lane() < entries ? id_ : NO_ID;
        u32 counted = 0;
        for (u32 first = number_ * RUN; first == 0 || first < entries; first += p_.routers * RUN) {
            if (first != number_ * RUN) {
                load(first, entries);
            }
            count(counted, first);
            counted = first;
            number(words, first, entries);
            if (first + RUN >= entries) {
                tell_counts(words, tokens);
            }
        }
        trace(p_.trace, AT_TOLD);
        return !bad_;
    }

  private:
    static constexpr u32 RUN = 32;
    static constexpr u32 EARLY = 4;  // ids of a thread that are loaded before the epoch is known
    static constexpr u32 NO_EXPERT = 0xFFFFFFFF;

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

    // NO_EXPERT also where the id is out of range.
    __device__ __forceinline__ u32 expert_of(const Id& id) const {
        return (id.high == 0 || !p_.wide_ids) && id.low < p_.experts ? id.low : NO_EXPERT;
    }

    // By every warp: the entries of a run.
    __device__ __forceinline__ void load(u32 first, u32 end) {
        const bool real = first + lane() < end;
        id_ = p_.id_if(real, first + lane());
        weight_ = ptx::load_4_if(real, p_.weights + (first + lane()) * 4, 0);
    }

    // By a whole block: the entries from `counted` on that are before `first`.
    __device__ __forceinline__ void count(u32 counted, u32 first) {
        if (first == 0) {
            return;
        }
        if (first == number_ * RUN) {
            add(early_);
            counted = EARLY * THREADS;
        } else {
            __syncthreads();  // all have read what the last run needed
        }
#pragma unroll 1
        for (u32 entry = counted + threadIdx.x; entry < first; entry += THREADS * EARLY) {
            Id ids[EARLY];
#pragma unroll
            for (u32 i = 0; i < EARLY; ++i) {
                ids[i] = p_.id_if(entry + i * THREADS < first, entry + i * THREADS);
            }
            add(ids);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void add(const Id (&ids)[EARLY]) {
#pragma unroll
        for (u32 i = 0; i < EARLY; ++i) {
            const u32 expert = expert_of(ids[i]);
            if (expert != NO_EXPERT) {
                atomicAdd(counts_ + expert, 1u);
            }
        }
    }

    // By every warp: which entry of its expert each of the run is, to one rank or, where ranks are more, to several.
    __device__ __forceinline__ void number(const TellInWords& words, u32 first, u32 entries) {
        const u32 expert = expert_of(id_), entry = first + lane();
        alike_ = __match_any_sync(0xFFFFFFFF, expert);
        const u32 before = __popc(alike_ & ((1u << lane()) - 1));
        const u32 rank = expert == NO_EXPERT ? 0 : counts_[expert] + before;
        const u64 weight = static_cast<u64>(weight_) << 32;
#pragma unroll 1
        for (u32 step = threadIdx.x / 32; step < p_.peers.ranks; step += WARPS) {
            const u32 peer = p_.peers.in_turn(step);
            const bool there = expert != NO_EXPERT && p_.rank_of(expert) == peer;
            if (entry < entries) {
                words.entry(peer, entry, weight | (there ? p_.local_of(expert) << RANK_BITS | rank : NOWHERE));
            }
        }
        if (threadIdx.x < 32 && expert == NO_EXPERT && p_.number(id_) != -1) {
            ptx::atomic_min(&p_.scratch->bad_entry, static_cast<u64>(entry));
            bad_ = true;
        }
    }

    // By a whole block that has numbered the last run, of nothing where nothing is sent.
    __device__ __forceinline__ void tell_counts(const TellInWords& words, u32 tokens) const {
        __syncthreads();  // all have read what is before the run
        const u32 expert = expert_of(id_);
        if (threadIdx.x < 32 && expert != NO_EXPERT && static_cast<u32>(__ffs(alike_)) == lane() + 1) {
            counts_[expert] += __popc(alike_);
        }
        __syncthreads();
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p_.experts; i += THREADS) {
            words.count(p_.rank_of(i), p_.local_of(i), counts_[i]);
        }
        if (threadIdx.x < p_.peers.ranks) {
            words.count(threadIdx.x, p_.local, tokens);
        }
    }

    const DispatchParams& p_;
    u32 number_;
    u32* counts_;              // [experts], of what is before the run
    Id id_ = NO_ID;            // of entry k of the run, in thread k of each warp
    u32 weight_ = 0;           // its bits
    u32 alike_ = 0;            // threads whose entries have the same expert
    bool bad_ = false;
    Id early_[EARLY] = {};
};

}  // namespace raymoe
