// How many rows go to each rank and come from each, out of what all runs have counted.
#pragma once

#include "raymoe/collective/runs.cuh"

namespace raymoe {

struct NumberParams {
    DispatchMemory memory;
    u8* kept;          // memory of the dispatch; all ranks have told
    const u32* stats;  // of count_entries, by as many blocks

    u8* out_weights;     // f32[capacity]
    u8* expert_offsets;  // i32[local + 1]
    u8* expert_counts;   // i32[local]
    u8* index;           // i64[capacity]: the table's row of each place, with layout rank; else null

    // Null, or words of the host: the number of the dispatch, then rows to each rank, then rows from each. Writer:
    // block 0, the number last, by a release at system scope. Reader: the host, the number first, until it is that of
    // its dispatch; so the next dispatch writes only after that.
    u64* heard;

    u32 runs;      // of each source
    u32 given;     // rows of x
    u32 capacity;
    u32 alignment;
    u32 zero_row;  // of the table
    u32 unused;
};

// The sum over the threads of a warp.
__device__ __forceinline__ u32 warp_sum(u32 value) {
#pragma unroll
    for (u32 bits = 16; bits != 0; bits /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFF, value, bits);
    }
    return value;
}

// By a whole warp: the sum of one word of the stats over the first `count` runs of a source.
__device__ __forceinline__ u32 over_runs(const NumberParams& p, u32 source, u32 count, u32 word) {
    const u32 words = stats_words(p.memory);
    u32 sum = 0;
    for (u32 run = threadIdx.x % 32; run < count; run += 32) {
        sum += ptx::load_4(p.stats + (source * p.runs + run) * words + word);
    }
    return warp_sum(sum);
}

// By a whole block: rows to and from each rank, for the combine and for the host.
__device__ inline void tell_traffic(const NumberParams& p) {
    const DispatchMemory& memory = p.memory;
    DispatchRecord* record = memory.record_of(p.kept);
    for (u32 i = threadIdx.x / 32; i < 2 * memory.ranks; i += blockDim.x / 32) {
        const u32 rank = i < memory.ranks ? i : i - memory.ranks;
        const bool here = i >= memory.ranks;
        u32 rows = memory.tokens;
        if (memory.compact) {
            rows = here ? over_runs(p, rank, p.runs, memory.local + memory.ranks)
                        : over_runs(p, memory.rank, p.runs, memory.local + rank);
        }
        if (threadIdx.x % 32 == 0) {
            ptx::store_4((here ? record->came : record->went) + rank, rows);
            if (p.heard != nullptr) {
                ptx::store_relaxed_sys(p.heard + 1 + i, rows);
            }
        }
    }
    __syncthreads();
    if (p.heard != nullptr && threadIdx.x == 0) {
        // Orders the rows, stored by all warps ahead of the barrier, before the number that announces them.
        ptx::store_release_sys(p.heard, ptx::load_8(&record->number));
    }
}

}  // namespace raymoe
