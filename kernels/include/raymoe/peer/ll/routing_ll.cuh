// The counting blocks of a dispatch of few tokens. They find the same as routing.cuh, but each counting block works
// alone, in one trip.
//
// Entries are cut into runs of 32, one entry for each thread of a warp. Each counting block has p.counting_runs
// consecutive runs. A counting block counts the entries of each expert before its runs, so none waits for another. All
// its warps number a run in the same way, and warp r sends the run's routing entries to rank r. Ids and weights are
// loaded before the epoch is known, or before the previous run is sent.
#pragma once

#include "raymoe/peer/ll/words_ll.cuh"

namespace raymoe {

class LlCountingBlock {
  public:
    // `shared`: `experts` counts of the entries before the run.
    __device__ LlCountingBlock(const DispatchLlParams& p, u32 number, u8* shared)
        : p_(p), begin_(number * p.counting_runs * RUN), counts_(reinterpret_cast<u32*>(shared)) {}

    // Issues loads of entries that may turn out not to be sent, before the epoch and the number of tokens are known.
    // The caller runs a barrier of the block between this and `run`.
    __device__ __forceinline__ void begin() {
        const u32 all = p_.tokens * p_.topk;
        run_ = loaded(begin_, all);
        const u32 before = begin_ < all ? begin_ : all;
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

    // Sends this counting block's entries, and the last counting block also the counts. All threads of the block call
    // this after `begin`. Returns false if this thread has found an id out of range.
    __device__ __forceinline__ bool run(u64 epoch, u32 tokens) {
        const RoutingWords words{p_, epoch};
        const u32 entries = tokens * p_.topk, end = begin_ + p_.counting_runs * RUN;
        if (begin_ == 0 || begin_ < entries) {
            run_.id = begin_ + lane() < entries ? run_.id : NO_ID;
            count_before();
            for (u32 first = begin_; first == begin_ || (first < end && first < entries); first += RUN) {
                const Run next = loaded(first + RUN, end < entries ? end : entries);
                number(words, first, entries);
                count_run();
                run_ = next;
            }
            if (end >= entries) {
                send_counts(words, tokens);
            }
        }
        trace(p_.trace, AT_ENTRIES_PUBLISHED);
        return !bad_;
    }

  private:
    static constexpr u32 RUN = 32;
    static constexpr u32 EARLY = 4;  // ids of a thread that are loaded before the epoch is known
    static constexpr u32 MORE = 16;  // ids after those that are loaded together
    static constexpr u32 NO_EXPERT = 0xFFFFFFFF;

    // 32 entries, entry k in thread k of each warp.
    struct Run {
        Id id;
        u32 weight;  // its bits
    };

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

    // NO_EXPERT also where the id is out of range.
    __device__ __forceinline__ u32 expert_of(const Id& id) const {
        return (id.high == 0 || !p_.wide_topk_idx) && id.low < p_.experts ? id.low : NO_EXPERT;
    }

    // Loads the entries of a run. Every warp calls this.
    __device__ __forceinline__ Run loaded(u32 first, u32 end) const {
        const bool real = first + lane() < end;
        return {p_.id_if(real, first + lane()), ptx::load_4_if(real, p_.topk_weights + (first + lane()) * 4, 0)};
    }

    // Counts the entries before the first run. All threads of the block call this.
    __device__ __forceinline__ void count_before() {
        if (begin_ == 0) {
            return;
        }
        add(early_);
#pragma unroll 1
        for (u32 entry = EARLY * THREADS + threadIdx.x; entry < begin_; entry += THREADS * MORE) {
            Id topk_idx[MORE];
#pragma unroll
            for (u32 i = 0; i < MORE; ++i) {
                topk_idx[i] = p_.id_if(entry + i * THREADS < begin_, entry + i * THREADS);
            }
            add(topk_idx);
        }
        __syncthreads();
    }

    template <u32 COUNT>
    __device__ __forceinline__ void add(const Id (&topk_idx)[COUNT]) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const u32 expert = expert_of(topk_idx[i]);
            if (expert != NO_EXPERT) {
                atomicAdd(counts_ + expert, 1u);
            }
        }
    }

    // Numbers the entries of the run among those of their expert, and sends them to one rank. If there are more ranks
    // than warps, it sends them to several. Every warp calls this.
    __device__ __forceinline__ void number(const RoutingWords& words, u32 first, u32 entries) {
        const u32 expert = expert_of(run_.id), entry = first + lane();
        alike_ = __match_any_sync(0xFFFFFFFF, expert);
        const u32 before = __popc(alike_ & ((1u << lane()) - 1));
        const u32 rank = expert == NO_EXPERT ? 0 : counts_[expert] + before;
        const u64 weight = static_cast<u64>(run_.weight) << 32;
#pragma unroll 1
        for (u32 step = threadIdx.x / 32; step < p_.peers.ranks; step += WARPS) {
            const u32 peer = p_.peers.in_turn(step);
            const bool there = expert != NO_EXPERT && p_.rank_of(expert) == peer;
            if (entry < entries) {
                words.entry(peer, entry, weight | (there ? p_.local_of(expert) << RANK_BITS | rank : NOWHERE));
            }
        }
        if (threadIdx.x < 32 && expert == NO_EXPERT && p_.number(run_.id) != -1) {
            ptx::atomic_min(&p_.scratch->bad_entry, static_cast<u64>(entry));
            bad_ = true;
        }
    }

    // Adds the run to the counts. All threads of the block call this, after they have numbered the run.
    __device__ __forceinline__ void count_run() {
        __syncthreads();  // all warps have read the counts before the run
        const u32 expert = expert_of(run_.id);
        if (threadIdx.x < 32 && expert != NO_EXPERT && static_cast<u32>(__ffs(alike_)) == lane() + 1) {
            counts_[expert] += __popc(alike_);
        }
        __syncthreads();
    }

    // Sends all counts, and the number of tokens. All threads of the block call this, after they have counted all runs.
    __device__ __forceinline__ void send_counts(const RoutingWords& words, u32 tokens) const {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p_.experts; i += THREADS) {
            words.count(p_.rank_of(i), p_.local_of(i), counts_[i]);
        }
        if (threadIdx.x < p_.peers.ranks) {
            words.count(threadIdx.x, p_.local, tokens);
        }
    }

    const DispatchLlParams& p_;
    u32 begin_;           // its first entry
    u32* counts_;         // [experts], of the entries before the run
    Run run_{NO_ID, 0};
    u32 alike_ = 0;       // threads whose entries have the same expert
    bool bad_ = false;
    Id early_[EARLY] = {};
};

}  // namespace raymoe
