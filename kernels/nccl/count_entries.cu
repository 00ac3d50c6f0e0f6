// Counts, for each run of tokens, the entries (token, k) of each expert of this rank. With compact rows it also counts
// the tokens that come here and those that go to each rank. number_entries.cu adds the counts of all runs.
//
// Block b takes run b % runs of source b / runs: consecutive tokens of one source.

#define ANY_GPU

#include "raymoe/nccl/runs.cuh"

extern "C" __global__ void __launch_bounds__(256) count_entries(const __grid_constant__ raymoe::CountParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) u32 counts[];  // stats_words of them
    const DispatchMemory& memory = p.memory;
    const Run run(p.memory, p.runs);
    const u32 words = stats_words(memory);
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        counts[i] = 0;
    }
    __syncthreads();
    const u8* topk_idx = memory.topk_idx_of(p.saved, run.source);
    for (u32 entry = run.first * memory.topk + threadIdx.x; entry < run.last * memory.topk; entry += blockDim.x) {
        const u32 expert = local_of(memory, ptx::load_4(topk_idx + entry * 4ull));
        if (expert != NOWHERE) {
            atomicAdd(counts + expert, 1u);
        }
    }
    for (u32 token = run.first + threadIdx.x; memory.compact && token < run.last; token += blockDim.x) {
        u32 ways = ways_of(memory, topk_idx, token, run.source == memory.rank);
        for (; ways != 0; ways &= ways - 1) {
            atomicAdd(counts + memory.local + (__ffs(ways) - 1), 1u);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        ptx::store_4(p.stats + blockIdx.x * words + i, counts[i]);
    }
}
