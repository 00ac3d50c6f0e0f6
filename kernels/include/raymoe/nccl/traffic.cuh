// The number of rows to each rank and from each rank, summed from the counts of all runs.
#pragma once

#include "raymoe/nccl/runs.cuh"

namespace raymoe {

struct NumberParams {
    DispatchMemory memory;
    u8* saved;          // memory of the dispatch, with the ids and weights of all ranks
    const u32* stats;  // of count_entries, whose grid was the same

    u8* out_weights;     // f32[capacity]
    u8* expert_offsets;  // i32[local + 1]
    u8* expert_counts;   // i32[local]
    u8* index;           // i64[capacity]: the table's row of each place, with layout rank; else null

    // Null, or words in host memory: the number of the dispatch, then rows to each rank, then rows from each rank.
    // Writer: block 0, the number last, by a release at system scope. Reader: the host, which polls the number until it
    // is that of its dispatch, then reads the rest. It does so before it launches the next dispatch.
    u64* host_counts;

    u32 runs;      // of each source
    u32 x_rows;
    u32 capacity;
    u32 alignment;
    u32 zero_row;  // of the table
    u32 group;     // experts, neighbours in number, of which only the first is aligned
};

// The sum over the threads of a warp.
__device__ __forceinline__ u32 warp_sum(u32 value) {
#pragma unroll
    for (u32 bits = 16; bits != 0; bits /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFF, value, bits);
    }
    return value;
}

// All threads of a warp call this: the sum of one word of the stats over the first `count` runs of a source.
__device__ __forceinline__ u32 over_runs(const NumberParams& p, u32 source, u32 count, u32 word) {
    const u32 words = stats_words(p.memory);
    u32 sum = 0;
    for (u32 run = threadIdx.x % 32; run < count; run += 32) {
        sum += ptx::load_4(p.stats + (source * p.runs + run) * words + word);
    }
    return warp_sum(sum);
}

// All threads of a block call this. Writes the rows to and from each rank for the combine and for the host.
__device__ inline void store_traffic(const NumberParams& p) {
    const DispatchMemory& memory = p.memory;
    DispatchRecord* record = memory.record_of(p.saved);
    for (u32 i = threadIdx.x / 32; i < 2 * memory.ranks; i += blockDim.x / 32) {
        const u32 rank = i < memory.ranks ? i : i - memory.ranks;
        const bool here = i >= memory.ranks;
        u32 rows = memory.tokens;
        if (memory.compact) {
            rows = here ? over_runs(p, rank, p.runs, memory.local + memory.ranks)
                        : over_runs(p, memory.rank, p.runs, memory.local + rank);
        }
        if (threadIdx.x % 32 == 0) {
            ptx::store_4((here ? record->rows_from : record->rows_to) + rank, rows);
            if (p.host_counts != nullptr) {
                ptx::store_relaxed_sys(p.host_counts + 1 + i, rows);
            }
        }
    }
    __syncthreads();
    if (p.host_counts != nullptr && threadIdx.x == 0) {
        // Orders the counts, which all warps stored before the barrier, before the number that announces them.
        ptx::store_release_sys(p.host_counts, ptx::load_8(&record->number));
    }
}

}  // namespace raymoe
