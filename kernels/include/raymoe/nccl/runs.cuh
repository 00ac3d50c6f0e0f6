// The runs of tokens that blocks count and number, and the statistics that each block writes.
#pragma once

#include "raymoe/nccl/rounds.cuh"

namespace raymoe {

struct CountParams {
    DispatchMemory memory;
    u8* saved;    // memory of the dispatch, with the ids and weights of all ranks
    u32* stats;  // [blocks][stats_words]
    u32 runs;    // of each source; the grid has `runs` blocks for each rank
    u32 unused;
};

// The words that a block writes. First the entries of each local expert. With compact rows then the tokens of this
// rank's own runs that go to each rank, and last the tokens that come here.
__device__ __forceinline__ u32 stats_words(const DispatchMemory& memory) { return memory.local + memory.ranks + 1; }

// The run of tokens that a block works on, all of one source.
struct Run {
    u32 source;
    u32 number;  // index among the runs of its source
    u32 first;
    u32 last;

    __device__ __forceinline__ Run(const DispatchMemory& memory, u32 runs) {
        source = blockIdx.x / runs;
        number = blockIdx.x - source * runs;
        const u32 tokens = (memory.tokens + runs - 1) / runs;
        first = number * tokens < memory.tokens ? number * tokens : memory.tokens;
        last = first + tokens < memory.tokens ? first + tokens : memory.tokens;
    }
};

// The local number of an expert; NOWHERE for an expert of another rank and for no expert.
__device__ __forceinline__ u32 local_of(const DispatchMemory& memory, u32 id) {
    const u32 expert = id - memory.rank * memory.local;
    return id != NOWHERE && expert < memory.local ? expert : NOWHERE;
}

// Bit r: the token goes to rank r, only where it is this rank's `own`. Bit `ranks`: it comes here.
__device__ __forceinline__ u32 ways_of(const DispatchMemory& memory, const u8* topk_idx, u32 token, bool own) {
    u32 ways = 0;
#pragma unroll 4
    for (u32 k = 0; k < memory.topk; ++k) {
        const u32 id = ptx::load_4(topk_idx + (static_cast<u64>(token) * memory.topk + k) * 4);
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
