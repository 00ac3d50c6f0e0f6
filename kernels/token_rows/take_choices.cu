// Layout `token`: makes the ids, weights and sources of the rows that came from the choices that came with them, and
// counts the entries of this rank's experts. raymoe/exchange/token_rows.py computes the same on CPUs.
//
// A thread has an entry (row, k). Rows that did not come are never read. It waits for nothing.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct TakeChoicesParams {
    const u8* brought;         // f32[rows][width]: ids, weights, source rank, the token's number there
    const u8* expert_offsets;  // i32: the second is the number of rows that came
    u8* topk_idx;              // i32[rows][topk]: the number among this rank's experts, or -1
    u8* weights;               // f32[rows][topk]: zero without an expert here
    u8* sources;               // i32[rows][2]: -1 of a row that did not come
    u32* counts;               // i32[local]: the entries of each expert; zeros before
    u32 entries;
    u32 topk;
    u32 width;
    u32 first;  // of this rank's experts
    u32 local;  // experts of this rank
    u32 unused;
};

__device__ __forceinline__ float number_at(const u8* row, u32 at) { return __uint_as_float(ptx::load_4(row + at * 4)); }

__device__ __forceinline__ void take_entry(const TakeChoicesParams& p, u32 entry, u32 came) {
    const u32 row = entry / p.topk, k = entry % p.topk;
    const bool there = row < came;
    const u8* choices = p.brought + static_cast<u64>(row) * p.width * 4;
    const float expert = there ? number_at(choices, k) - static_cast<float>(p.first) : -1.0f;
    const bool here = expert >= 0.0f && expert < static_cast<float>(p.local);
    ptx::store_4(p.topk_idx + entry * 4ull, here ? static_cast<u32>(expert) : ~0u);
    ptx::store_4(p.weights + entry * 4ull, here ? ptx::load_4(choices + (p.topk + k) * 4) : 0);
    if (here) {
        ptx::atomic_add_32(p.counts + static_cast<u32>(expert), 1);
    }
    for (u32 i = k; i < 2; i += p.topk) {
        const u32 source = there ? static_cast<u32>(number_at(choices, 2 * p.topk + i)) : ~0u;
        ptx::store_4(p.sources + (row * 2ull + i) * 4, source);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256) take_choices(const __grid_constant__ raymoe::TakeChoicesParams p) {
    const raymoe::u32 stride = gridDim.x * blockDim.x, came = raymoe::ptx::load_4(p.expert_offsets + 4);
    for (raymoe::u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < p.entries; entry += stride) {
        raymoe::take_entry(p, entry, came);
    }
}
