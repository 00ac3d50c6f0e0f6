// The parameters of dispatch_ll.cu, and its words: counts and routing entries, each with its epoch.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/passes.cuh"
#include "raymoe/peer/ll/dealing.cuh"
#include "raymoe/peer/ll/lines.cuh"

namespace raymoe {

struct DispatchLlParams : DispatchCall {
    // Offsets in every rank's heap, for each parity. The parity is the epoch mod 2. dispatch_ll.cu has the memory map.
    // The lines and routing entries of a source begin at the same places for every exchange of a workspace.
    u64 rows[2];
    u64 routing_entries[2];
    u64 counts[2];

    u32 lines;            // of a source, in `rows`
    u32 entries;          // of a source, in `routing_entries`
    Dealing sent;         // deals rows of x out to warps that send
    Dealing placed;       // deals rows of all ranks out to warps that place
    u32 counting_blocks;  // the first so many of the SMs that place have one
    u32 counting_runs;    // of 32 entries, that each counting block has
    u32 leaving_sms;      // SMs that send
    u32 arriving_sms;     // SMs that place
};

__device__ __forceinline__ u8* routing_word(const DispatchLlParams& p, u32 peer, u32 parity, u32 source, u64 entry) {
    return p.peers.slot(peer, p.routing_entries[parity], static_cast<u64>(source) * p.entries + entry, 16);
}

__device__ __forceinline__ u8* count_word(const DispatchLlParams& p, u32 peer, u32 parity, u32 source, u32 expert) {
    return p.peers.slot(peer, p.counts[parity], static_cast<u64>(source) * (p.local + 1) + expert, 16);
}

// Stores routing entries and counts at a peer, each with its epoch. In a backward pass (AGAIN) the upper halves of two
// counts hold the pass: that of the tokens its dispatch, that of the first local expert its call site. Else they are 0.
struct RoutingWords {
    const DispatchLlParams& p;
    u64 epoch;

    __device__ __forceinline__ void entry(u32 peer, u64 entry, u64 value) const {
        ptx::store_relaxed_sys_16(routing_word(p, peer, epoch & 1, p.peers.rank, entry), {value, epoch});
    }

    __device__ __forceinline__ u32 pass_half(u32 expert) const {
        const u64 pass = AGAIN ? pass_of(p) : 0;
        return static_cast<u32>(expert == p.local ? pass : expert == 0 ? pass >> 32 : 0);
    }

    __device__ __forceinline__ void count(u32 peer, u32 expert, u32 value) const {
        const u64 word = AGAIN ? static_cast<u64>(pass_half(expert)) << 32 | value : value;
        ptx::store_relaxed_sys_16(count_word(p, peer, epoch & 1, p.peers.rank, expert), {word, epoch});
    }
};

// The counts that this thread hands to `Places`. It looks at them early, because they mostly come with the first row.
class EarlyCounts {
  public:
    __device__ EarlyCounts(const DispatchLlParams& p, u64 epoch) : p_(p), epoch_(epoch) {}

    // Loads the words that have not come yet. Returns whether this thread has all of its words.
    __device__ __forceinline__ bool look() {
        const bool counts = count_.high != epoch_ && threadIdx.x < p_.experts;
        const bool tokens = tokens_.high != epoch_ && threadIdx.x < p_.peers.ranks;
        const u8* count_at = word(p_.rank_of(threadIdx.x), p_.local_of(threadIdx.x));
        count_ = ptx::load_relaxed_sys_16_if(counts, count_at, count_);
        tokens_ = ptx::load_relaxed_sys_16_if(tokens, word(threadIdx.x, p_.local), tokens_);
        return (count_.high == epoch_ || threadIdx.x >= p_.experts) &&
               (tokens_.high == epoch_ || threadIdx.x >= p_.peers.ranks);
    }

    // Waits for a count; `expert` is p.local for the tokens of a source. Returns false if the wait failed.
    __device__ __forceinline__ bool wait(u32 source, u32 expert, u32& count) const {
        const bool tokens = expert == p_.local;
        const u64 seen = tokens ? tokens_.high : count_.high;
        const u32 of = tokens ? source : source * p_.local + expert;
        if (of == threadIdx.x && seen == epoch_) {
            count = static_cast<u32>(tokens ? tokens_.low : count_.low);
            return true;
        }
        u64 came = 0;
        const bool ok =
            wait_for_word(word(source, expert), epoch_, Waiting{p_.op, source, epoch_}, p_.watch, came);
        count = static_cast<u32>(came);
        return ok;
    }

  private:
    __device__ __forceinline__ u8* word(u32 source, u32 expert) const {
        return count_word(p_, p_.peers.rank, epoch_ & 1, source, expert);
    }

    const DispatchLlParams& p_;
    u64 epoch_;
    ptx::Bytes16 count_{0, 0};
    ptx::Bytes16 tokens_{0, 0};
};

// The pass of a rank, from the upper halves of its counts, which have come. One thread calls this.
__device__ inline u64 pass_in_counts(const DispatchLlParams& p, u64 epoch, u32 source) {
    const auto half = [&](u32 expert) {
        return ptx::load_relaxed_sys_16(count_word(p, p.peers.rank, epoch & 1, source, expert)).low >> 32;
    };
    return half(0) << 32 | half(p.local);
}

// Waits for the counts that hold passes, fills the rows with NaN if the passes differ, and reports that. All threads of
// the last block out call this. The other blocks of an SM that places have waited for the same counts.
__device__ inline bool compare_passes_ll(const DispatchLlParams& p, u64 epoch) {
    bool ok = true, same = true;
    if (threadIdx.x < p.peers.ranks) {
        for (u32 expert = 0; expert <= p.local; expert += p.local) {
            u64 came = 0;
            ok = wait_for_word(count_word(p, p.peers.rank, epoch & 1, threadIdx.x, expert), epoch,
                               Waiting{p.op, threadIdx.x, epoch}, p.watch, came) && ok;
        }
        same = ok && pass_in_counts(p, epoch, threadIdx.x) == pass_of(p);
    }
    if (!__syncthreads_and(ok)) {
        return false;
    }
    if (!__syncthreads_and(same)) {
        fill_rows_with_nan(p.out, static_cast<u64>(p.capacity) * p.out_row_bytes);
        if (threadIdx.x == 0) {
            report_passes(p, epoch, [&](u32 rank) { return pass_in_counts(p, epoch, rank); });
        }
    }
    return true;
}

}  // namespace raymoe
