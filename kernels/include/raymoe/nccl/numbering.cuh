// The numbering of tokens and entries by a block of number_entries.cu.
#pragma once

#include "raymoe/nccl/traffic.cuh"

namespace raymoe {

class Numbering {
  public:
    // Shared memory: (warps + 2) * local words, then (warps + 1) * (ranks + 1), then a word for each warp.
    // raymoe/exchange/nccl/rounds.py has the same sum.
    __device__ Numbering(const NumberParams& p, u32* shared)
        : p_(p), memory_(p.memory), run_(p.memory, p.runs), warps_(blockDim.x / 32), warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32), totals_(shared), begins_(totals_ + p.memory.local),
          counters_(begins_ + p.memory.local), marks_(counters_ + warps_ * p.memory.local),
          before_(marks_ + warps_ * (p.memory.ranks + 1)), sums_(before_ + p.memory.ranks + 1),
          topk_idx_(p.memory.topk_idx_of(p.saved, run_.source)) {}

    // Finds the number of entries of each expert, its start, and its entries before this block's run.
    __device__ __forceinline__ void find_experts() {
        for (u32 i = threadIdx.x; i < 2 * memory_.local; i += blockDim.x) {
            totals_[i] = 0;  // and begins_, which follow totals_
        }
        __syncthreads();
        for (u32 first = 0; first < memory_.local; first += 32) {
            add_runs(first + lane_);
        }
        __syncthreads();
        // Whole groups, so that every thread's sum is a multiple of the alignment.
        const u32 experts = multiple((memory_.local + blockDim.x - 1) / blockDim.x, p_.group);
        const u32 first = threadIdx.x * experts;
        u32 rows = 0;  // of this thread's experts
        for (u32 expert = first; expert < first + experts && expert < memory_.local; ++expert) {
            begins_[expert] += rows;
            rows += totals_[expert];
            if ((expert + 1) % p_.group == 0) {
                rows = multiple(rows, p_.alignment);
            }
        }
        const u32 begin = begin_of(rows);
        for (u32 expert = first; expert < first + experts && expert < memory_.local; ++expert) {
            begins_[expert] += begin;
        }
        fits_ = total_ <= p_.capacity;  // the barriers in `count` order begins_ before other threads read them
    }

    // Writes the row of each token in the table, and the row of its sums among those that are returned.
    __device__ __forceinline__ void number_tokens() {
        const bool own = run_.source == memory_.rank;
        const u32 first_way = own ? 0 : memory_.ranks;
        for (u32 way = first_way + warp_; way <= memory_.ranks; way += warps_) {
            const u32 rows = memory_.compact ? over_runs(p_, run_.source, run_.number, memory_.local + way) : 0;
            if (lane_ == 0) {
                before_[way] = rows;
            }
        }
        for (u32 first = run_.first; first < run_.last; first += blockDim.x) {
            const u32 token = first + threadIdx.x;
            const u32 ways = token < run_.last ? ways_of(memory_, topk_idx_, token, own) : 0;
            mark(ways, first_way);
            __syncthreads();
            for (u32 way = first_way; way <= memory_.ranks; ++way) {
                const u32 row = row_of(ways, way, token);
                if (token < run_.last) {
                    store_row(token, way, ways >> way & 1 ? row : NOWHERE);
                }
            }
            __syncthreads();
            for (u32 way = first_way + threadIdx.x; way <= memory_.ranks; way += blockDim.x) {
                for (u32 warp = 0; warp < warps_; ++warp) {
                    before_[way] += marks_[way * warps_ + warp];
                }
            }
            __syncthreads();  // orders these reads before the next tokens' marks
        }
    }

    __device__ __forceinline__ void number_entries() {
        const u32 entries = (run_.last - run_.first) * memory_.topk;
        const u32 share = (entries + blockDim.x - 1) / blockDim.x * 32;  // entries of a warp, a multiple of 32
        const u32 from = warp_ * share < entries ? warp_ * share : entries;
        const u32 until = from + share < entries ? from + share : entries;
        const u32 base = run_.first * memory_.topk;
        count(base + from, base + until);
        for (u32 first = base + from; first < base + until; first += 32) {
            const u32 entry = first + lane_;
            const bool there = entry < base + until;
            const u32 expert = local_of(memory_, ptx::load_4_if(there, topk_idx_ + entry * 4ull, NOWHERE));
            const u32 place = next_of(expert);
            if (there) {
                place_entry(entry, expert != NOWHERE && fits_ ? place : NOWHERE);
            }
        }
    }

    __device__ __forceinline__ void store_counts() {
        for (u32 expert = threadIdx.x; expert < memory_.local; expert += blockDim.x) {
            ptx::store_4(p_.expert_counts + expert * 4ull, fits_ ? totals_[expert] : 0);
            // begins_ also counts the expert's entries in earlier runs, but block 0 has no earlier run.
            ptx::store_4(p_.expert_offsets + expert * 4ull, fits_ ? begins_[expert] : 0);
        }
        if (threadIdx.x == 0) {
            ptx::store_4(p_.expert_offsets + memory_.local * 4ull, fits_ ? total_ : 0);
            DispatchRecord* record = memory_.record_of(p_.saved);
            if (!fits_ && load_status(&record->refusal).cause == CAUSE_NONE) {
                store_status(&record->refusal, {CAUSE_CAPACITY, 0, total_});
            }
        }
    }

    // Writes weights and index of this block's share of the gaps. The index after the last row is written too, so that
    // a gather by the whole index reads inside the table.
    __device__ __forceinline__ void fill_gaps() {
        const u32 groups = memory_.local / p_.group;
        for (u32 group = blockIdx.x * warps_ + warp_; fits_ && group < groups; group += gridDim.x * warps_) {
            const u32 last = (group + 1) * p_.group - 1;
            u32 rows = 0;
            for (u32 i = 0; i < p_.group; ++i) {
                rows += totals_[last - i];
            }
            const u32 begin = begins_[last] - entries_before(last) + totals_[last];
            const u32 gap = multiple(rows, p_.alignment) - rows;
            for (u32 i = lane_; i < gap; i += 32) {
                ptx::store_4(p_.out_weights + (begin + i) * 4ull, 0);
                if (p_.index != nullptr) {
                    ptx::store_8(p_.index + (begin + i) * 8ull, p_.zero_row);
                }
            }
        }
        for (u32 place = (fits_ ? total_ : 0) + blockIdx.x * blockDim.x + threadIdx.x;
             p_.index != nullptr && place < p_.capacity; place += gridDim.x * blockDim.x) {
            ptx::store_8(p_.index + place * 8ull, p_.zero_row);
        }
    }

  private:
    // The least multiple of `step` that is not below `number`.
    static __device__ __forceinline__ u32 multiple(u32 number, u32 step) { return (number + step - 1) / step * step; }

    // All threads of a warp call this, each with its expert. Adds the counts of the warp's share of the runs.
    __device__ __forceinline__ void add_runs(u32 expert) {
        constexpr u32 TOGETHER = 20;  // loads in flight: with 8 warps all runs of a GPU of up to 160 SMs
        const u32 words = stats_words(memory_);
        u32 total = 0, before = 0;
        for (u32 first = warp_; first < gridDim.x; first += warps_ * TOGETHER) {
            u32 counts[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                const u32 block = first + i * warps_;
                counts[i] = ptx::load_4_if(expert < memory_.local && block < gridDim.x,
                                           p_.stats + block * words + expert, 0);
            }
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                total += counts[i];
                before += first + i * warps_ < blockIdx.x ? counts[i] : 0;
            }
        }
        if (expert < memory_.local) {
            atomicAdd(totals_ + expert, total);
            atomicAdd(begins_ + expert, before);
        }
    }

    // Returns the expert's entries in the runs before this block's. All threads of a warp call this, with one expert.
    __device__ __forceinline__ u32 entries_before(u32 expert) const {
        const u32 words = stats_words(memory_);
        u32 before = 0;
        for (u32 block = lane_; block < blockIdx.x; block += 32) {
            before += ptx::load_4(p_.stats + block * words + expert);
        }
        return warp_sum(before);
    }

    // Returns the sum of `own` over the threads before this one. The sum over all threads becomes the total.
    __device__ __forceinline__ u32 begin_of(u32 own) {
        u32 through = own;
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xFFFFFFFF, through, step);
            through += lane_ >= step ? other : 0;
        }
        if (lane_ == 31) {
            sums_[warp_] = through;
        }
        __syncthreads();
        u32 begin = through - own;
        total_ = 0;
        for (u32 warp = 0; warp < warps_; ++warp) {
            begin += warp < warp_ ? sums_[warp] : 0;
            total_ += sums_[warp];
        }
        return begin;
    }

    // Counts the tokens of each warp that go each way.
    __device__ __forceinline__ void mark(u32 ways, u32 first_way) {
        for (u32 way = first_way; way <= memory_.ranks; ++way) {
            const u32 votes = __ballot_sync(0xFFFFFFFF, ways >> way & 1);
            if (lane_ == 0) {
                marks_[way * warps_ + warp_] = __popc(votes);
            }
        }
    }

    // Returns the row of this thread's token in its block of rows, if the token goes this way. All threads of a warp
    // call this.
    __device__ __forceinline__ u32 row_of(u32 ways, u32 way, u32 token) const {
        const u32 votes = __ballot_sync(0xFFFFFFFF, ways >> way & 1);
        if (!memory_.compact) {
            return token;
        }
        u32 row = before_[way] + __popc(votes & ((1u << lane_) - 1));
        for (u32 warp = 0; warp < warp_; ++warp) {
            row += marks_[way * warps_ + warp];
        }
        return row;
    }

    __device__ __forceinline__ void store_row(u32 token, u32 way, u32 row) const {
        if (way == memory_.ranks) {
            const u32 first = run_.source * memory_.tokens;
            ptx::store_4(p_.saved + memory_.row_of + (first + token) * 4ull, row == NOWHERE ? row : first + row);
        } else if (token < p_.x_rows) {
            const u32 at = way * (memory_.tokens + 1) + row;
            ptx::store_4(p_.saved + memory_.returned_rows + (static_cast<u64>(token) * memory_.ranks + way) * 4,
                         row == NOWHERE ? row : at);
        }
    }

    // Sets each warp's counters to the place of its first entry of each expert.
    __device__ __forceinline__ void count(u32 from, u32 until) {
        for (u32 i = threadIdx.x; i < warps_ * memory_.local; i += blockDim.x) {
            counters_[i] = 0;
        }
        __syncthreads();
        u32* counters = counters_ + warp_ * memory_.local;
        for (u32 entry = from + lane_; entry < until; entry += 32) {
            const u32 expert = local_of(memory_, ptx::load_4(topk_idx_ + entry * 4ull));
            if (expert != NOWHERE) {
                atomicAdd(counters + expert, 1u);
            }
        }
        __syncthreads();
        for (u32 expert = threadIdx.x; expert < memory_.local; expert += blockDim.x) {
            u32 next = begins_[expert];
            for (u32 warp = 0; warp < warps_; ++warp) {
                u32& counter = counters_[warp * memory_.local + expert];
                const u32 here = counter;
                counter = next;
                next += here;
            }
        }
        __syncthreads();
    }

    // Returns the place of each thread's entry, after the same expert's entries of the lanes before it. All threads of
    // a warp call this.
    __device__ __forceinline__ u32 next_of(u32 expert) {
        u32* counters = counters_ + warp_ * memory_.local;
        const u32 alike = __match_any_sync(0xFFFFFFFF, expert);
        const u32 before = __popc(alike & ((1u << lane_) - 1));
        const u32 begin = expert == NOWHERE ? 0 : counters[expert];
        __syncwarp();  // orders the reads of all lanes before the write
        if (expert != NOWHERE && before == 0) {
            counters[expert] = begin + __popc(alike);
        }
        __syncwarp();
        return begin + before;
    }

    __device__ __forceinline__ void place_entry(u32 entry, u32 place) const {
        const u64 all = run_.source * memory_.entries() + entry;
        ptx::store_4(p_.saved + memory_.places + all * 4, place);
        if (place != NOWHERE) {
            ptx::store_4(p_.out_weights + place * 4ull,
                         ptx::load_4(memory_.topk_weights_of(p_.saved, run_.source) + entry * 4ull));
            if (p_.index != nullptr) {
                const u64 token = static_cast<u64>(run_.source) * memory_.tokens + entry / memory_.topk;
                ptx::store_8(p_.index + place * 8ull, ptx::load_4(p_.saved + memory_.row_of + token * 4));
            }
        }
    }

    const NumberParams& p_;
    const DispatchMemory& memory_;
    Run run_;
    u32 warps_, warp_, lane_;
    u32* totals_;    // [local]
    u32* begins_;    // [local] the start of each expert, plus its entries in runs before
    u32* counters_;  // [warp][local]
    u32* marks_;     // [way][warp]
    u32* before_;    // [way]
    u32* sums_;      // [warp]
    const u8* topk_idx_;
    u32 total_ = 0;
    bool fits_ = false;
};

}  // namespace raymoe
