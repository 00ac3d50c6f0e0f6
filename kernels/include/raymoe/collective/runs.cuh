// The runs of tokens that blocks count and number, and what each block finds of its own.
#pragma once

#include "raymoe/collective/rounds.cuh"

namespace raymoe {

struct CountParams {
    DispatchMemory memory;
    u8* kept;    // memory of the dispatch; all ranks have told
    u32* stats;  // [blocks][stats_words]
    u32 runs;    // of each source; blocks: runs for each rank
    u32 unused;
};

// Words that a block leaves: entries for each local expert; then, with compact rows, tokens that go to each rank, of
// this rank's own runs, and tokens that come here.
__device__ __forceinline__ u32 stats_words(const DispatchMemory& memory) { return memory.local + memory.ranks + 1; }

// The tokens of a block, all of one source.
struct Run {
    u32 source;
    u32 number;  // among the runs of its source
    u32 first;
    u32 last;

    __device__ __forceinline__ Run(const DispatchMemory& memory, u32 runs) {
        source = blockIdx.x / runs;
        number = blockIdx.x - source * runs;
        const u32 each = (memory.tokens + runs - 1) / runs;
        first = number * each < memory.tokens ? number * each : memory.tokens;
        last = first + each < memory.tokens ? first + each : memory.tokens;
    }
};

// The number of an expert on this rank; NOWHERE for one that is elsewhere, and for none.
__device__ __forceinline__ u32 local_of(const DispatchMemory& memory, u32 id) {
    const u32 expert = id - memory.rank * memory.local;
    return id != NOWHERE && expert < memory.local ? expert : NOWHERE;
}

// Bit r: the token goes to rank r, only where it is this rank's `own`. Bit `ranks`: it comes here.
__device__ __forceinline__ u32 ways_of(const DispatchMemory& memory, const u8* ids, u32 token, bool own) {
    u32 ways = 0;
#pragma unroll 4
    for (u32 k = 0; k < memory.topk; ++k) {
        const u32 id = ptx::load_4(ids + (static_cast<u64>(token) * memory.topk + k) * 4);
        if (own && id != NOWHERE) {
            ways |= 1u << id / memory.local;
        }
        if (local_of(memory, id) != NOWHERE) {
            ways |= 1u << memory.ranks;
        }
    }
    return ways;
}

}  // namespace raymoe
