// The counting blocks of a dispatch count the entries of each expert, number them, and store them at every rank.
//
// Entry (t, k) of this rank needs the number of entries of the same expert before it, in the order (t, k). Each
// counting block takes a run of tokens; each of its warps takes a run of those entries:
//   1. every warp counts its entries by expert; the block publishes its sums in this rank's memory
//   2. the block waits for the sums of the blocks before it, which gives every warp the counts it begins with
//   3. every warp goes over its entries again, 32 at a time, numbers them, and stores a routing entry at every rank
// The last counting block knows the totals and stores them as counts. The counting block that finishes last stores the
// head at every rank. For few tokens: routing_ll.cuh.
//
// Memory order of `counting_words`, which stay on this GPU:
//   writer: sums by relaxed stores of all threads; __syncthreads; release at GPU scope
//   reader: one thread for each earlier counting block: acquire; __syncthreads; relaxed loads of the sums
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/passes.cuh"

namespace raymoe {

class CountingBlock {
  public:
    // `shared`: WARPS * experts counters, and `experts` sums.
    __device__ CountingBlock(const DispatchParams& p, u64 epoch, u32 tokens, u32 number, u8* shared)
        : p_(p), epoch_(epoch), parity_(epoch & 1), tokens_(tokens), number_(number),
          sends_totals_(number + 1 == p.counting_blocks), counters_(reinterpret_cast<u32*>(shared)),
          sums_(counters_ + WARPS * p.experts) {
        const u32 each = (tokens + p.counting_blocks - 1) / p.counting_blocks;
        first_ = number * each < tokens ? number * each : tokens;
        last_ = first_ + each < tokens ? first_ + each : tokens;
        const u32 entries = (last_ - first_) * p.topk;
        const u32 run = (entries + THREADS - 1) / THREADS * 32;  // of a warp, in whole steps of 32
        const u32 begin = threadIdx.x / 32 * run;
        begin_ = static_cast<u64>(first_) * p.topk + (begin < entries ? begin : entries);
        end_ = static_cast<u64>(first_) * p.topk + (begin + run < entries ? begin + run : entries);
    }

    // All threads of the block call this. Returns false if a wait failed.
    __device__ __forceinline__ bool run() {
        count();
        publish();
        if (!begin_numbers()) {
            return false;
        }
        number();
        mark();
        announce();
        trace(p_.trace, AT_ENTRIES_PUBLISHED);
        return true;
    }

  private:
    static constexpr u32 NO_EXPERT = 0xFFFFFFFF;

    static constexpr u32 TOGETHER = 4;  // entries of a thread whose loads are in flight at a time

    // Whether there are other counting blocks: they need one another's sums.
    __device__ __forceinline__ bool waits() const { return p_.counting_blocks != 1; }

    __device__ __forceinline__ u32* counters() const { return counters_ + threadIdx.x / 32 * p_.experts; }

    // NO_EXPERT also where the id is out of range.
    __device__ __forceinline__ u32 expert_of(long long id) const {
        return id >= 0 && id < p_.experts ? static_cast<u32>(id) : NO_EXPERT;
    }

    __device__ __forceinline__ void count() {
        for (u32 i = threadIdx.x; i < WARPS * p_.experts; i += THREADS) {
            counters_[i] = 0;
        }
        block_barrier();
        for (u64 entry = begin_ + threadIdx.x % 32; entry < end_; entry += 32 * TOGETHER) {
            long long topk_idx[TOGETHER];
            p_.topk_idx_of(entry, 32, end_, topk_idx);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                const u32 expert = expert_of(topk_idx[i]);
                if (expert != NO_EXPERT) {
                    atomicAdd(counters() + expert, 1u);
                }
            }
        }
        block_barrier();
    }

    // Makes each warp's counters the counts of the warps before it, and publishes the sums.
    __device__ __forceinline__ void publish() {
        u32* published = p_.counting_sums + static_cast<u64>(number_) * p_.experts;
        for (u32 expert = threadIdx.x; expert < p_.experts; expert += THREADS) {
            u32 sum = 0;
            for (u32 warp = 0; warp < WARPS; ++warp) {
                u32& counter = counters_[warp * p_.experts + expert];
                const u32 here = counter;
                counter = sum;
                sum += here;
            }
            sums_[expert] = sum;
            if (waits()) {
                ptx::store_relaxed_gpu_32(published + expert, sum);
            }
        }
        block_barrier();
        if (threadIdx.x == 0 && waits()) {
            ptx::store_release_gpu(p_.counting_words + number_, epoch_);  // orders the sums of all threads before it
        }
    }

    __device__ __forceinline__ bool begin_numbers() {
        bool ok = true;
        for (u32 other = threadIdx.x; waits() && other < number_; other += THREADS) {
            const Waiting waiting{p_.op, p_.peers.rank, epoch_};
            ok = ok && wait_for_epoch(p_.counting_words + other, epoch_, waiting, p_.watch);
        }
        if (!block_barrier_and(ok)) {
            return false;
        }
        for (u32 expert = threadIdx.x; expert < p_.experts; expert += THREADS) {
            u32 before = 0;
            for (u32 other = 0; waits() && other < number_; ++other) {
                before += ptx::load_relaxed_gpu_32(p_.counting_sums + static_cast<u64>(other) * p_.experts + expert);
            }
            for (u32 warp = 0; warp < WARPS; ++warp) {
                counters_[warp * p_.experts + expert] += before;
            }
            if (sends_totals_) {
                send_count(p_.rank_of(expert), p_.local_of(expert), before + sums_[expert]);
            }
        }
        if (sends_totals_ && threadIdx.x < p_.peers.ranks) {
            send_count(threadIdx.x, p_.local, tokens_);
        }
        block_barrier();
        return true;
    }

    __device__ __forceinline__ void number() {
        const u32 lane = threadIdx.x % 32;
        for (u64 first = begin_; first < end_; first += 32 * TOGETHER) {
            long long topk_idx[TOGETHER];
            u32 weights[TOGETHER];
            p_.topk_idx_of(first + lane, 32, end_, topk_idx);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                const u64 entry = first + 32 * i + lane;
                weights[i] = ptx::load_4_if(entry < end_, p_.topk_weights + entry * 4, 0);
            }
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                const u64 entry = first + 32 * i + lane;
                const u32 expert = expert_of(topk_idx[i]), number = next_of(expert);
                if (entry < end_) {
                    send_entry(entry, topk_idx[i], number, weights[i]);
                }
            }
        }
    }

    // The number of each thread's entry among those of its expert, in the order of threads. All threads of the warp
    // call this.
    __device__ __forceinline__ u32 next_of(u32 expert) {
        const u32 alike = __match_any_sync(0xFFFFFFFF, expert);
        const u32 before = __popc(alike & ((1u << threadIdx.x % 32) - 1));
        const u32 begin = expert == NO_EXPERT ? 0 : counters()[expert];
        __syncwarp();
        if (expert != NO_EXPERT && before == 0) {
            counters()[expert] = begin + __popc(alike);
        }
        __syncwarp();
        return begin + before;
    }

    __device__ __forceinline__ void send_entry(u64 entry, long long id, u32 rank, u32 its_weight) {
        const u32 expert = expert_of(id);
        const bool nowhere = expert == NO_EXPERT;
        if (nowhere && id != -1) {
            ptx::atomic_min(&p_.scratch->bad_entry, entry);
        }
        const u32 place = nowhere ? NOWHERE : p_.local_of(expert) << RANK_BITS | rank;
        const u32 owner = nowhere ? NOWHERE : p_.rank_of(expert);
        const u64 weight = static_cast<u64>(its_weight) << 32;
        for (u32 step = 0; step < p_.peers.ranks; ++step) {
            const u32 peer = p_.peers.in_turn(step);
            u8* routing_at = p_.routing_entry_at(peer, parity_, p_.peers.rank, entry);
            ptx::store_8(routing_at, weight | (peer == owner ? place : NOWHERE));
        }
    }

    __device__ __forceinline__ void send_count(u32 peer, u32 expert, u32 value) {
        ptx::store_4(p_.counts_at(peer, parity_, p_.peers.rank, expert), value);
    }

    // Stores the head at every rank, by the counting block that finishes last. All threads of the block call this, when
    // they have stored their routing entries.
    __device__ __forceinline__ void announce() {
        block_barrier();  // orders the stores of this block's threads before the ticket
        const u32 last = p_.counting_blocks - 1;
        if (threadIdx.x != 0 || (last != 0 && ptx::atomic_increment_wrapping(&p_.scratch->routed, last) != last)) {
            return;
        }
        for (u32 peer = 0; AGAIN && peer < p_.peers.ranks; ++peer) {
            send_pass(p_, epoch_, peer);
        }
        // Orders the counts and routing entries of all counting blocks, which the ticket has acquired, before the
        // words.
        ptx::fence_acq_rel_sys();
        for (u32 step = 0; step < p_.peers.ranks; ++step) {
            ptx::store_relaxed_sys(p_.peers.flag(p_.peers.in_turn(step), p_.heads), epoch_);
        }
    }

    // Stores the ranks that each token was sent to, for its combine.
    __device__ __forceinline__ void mark() {
        for (u32 token = first_ + threadIdx.x; token < last_; token += THREADS) {
            p_.masks[token] = p_.ranks_of(token);
        }
        if (sends_totals_) {
            for (u32 token = tokens_ + threadIdx.x; token < p_.tokens; token += THREADS) {
                p_.masks[token] = 0;
            }
        }
    }

    const DispatchParams& p_;
    u64 epoch_;
    u32 parity_;
    u32 tokens_;
    u32 number_;
    bool sends_totals_;  // the last counting block, which knows the totals
    u32* counters_;
    u32* sums_;
    u32 first_, last_;  // tokens of this counting block
    u64 begin_, end_;   // entries of this warp
};

}  // namespace raymoe
