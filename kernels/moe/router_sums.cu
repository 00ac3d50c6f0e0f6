// Sums over tokens that balance the load of experts: each expert's scores, and the entries (token, k) that chose it.
//
// A block takes a run of tokens at a time and writes the sums of this run, so two blocks never share a word. A warp
// adds up its own tokens in registers; the warps' sums meet in shared memory and are added in the order of warps. All
// sums have a fixed order, so results repeat bit for bit.
//
// A token's scores sum to 1: softmax over all experts, or its sigmoids divided by their sum (SIGMOID_SCORES).

#define ANY_GPU

#include "raymoe/moe/scores.cuh"

#ifndef TOPK
#define TOPK 8
#endif

namespace raymoe {

constexpr u32 WARPS = 8;  // warps of a block

struct RouterSumsParams {
    const u8* logits;    // [tokens][EXPERTS]
    const u8* topk_idx;  // [tokens][TOPK] i64; -1: no expert
    u8* score_sums;      // [runs][EXPERTS] f32
    u8* load;            // [runs][EXPERTS] u32
    u32 tokens;
    u32 run;  // tokens of a run
};

__device__ __forceinline__ void to_shares(float (&values)[PER_LANE]) {
#ifdef SIGMOID_SCORES
    to_sigmoid(values);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        sum += values[i];
    }
    const float share = 1.0f / (warp_sum(sum) + 1e-20f);  // all sigmoids can be zero
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        values[i] *= share;
    }
#else
    to_softmax(values);
#endif
}

// All threads of a block call this.
__device__ __forceinline__ void count_entries(const RouterSumsParams& p, u32 first, u32 last, u32* counts) {
    for (u32 entry = first * TOPK + threadIdx.x; entry < last * TOPK; entry += blockDim.x) {
        const u64 expert = ptx::load_8(p.topk_idx + static_cast<u64>(entry) * 8);
        if (expert < EXPERTS) {
            atomicAdd(counts + expert, 1u);
        }
    }
}

// All threads of a block call this. Stores the sums of each warp's tokens.
__device__ __forceinline__ void sum_scores(const RouterSumsParams& p, u32 first, u32 last, float* sums) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float own[PER_LANE] = {};
    for (u32 token = first + warp; token < last; token += WARPS) {
        float scores[PER_LANE];
        load_logits(p.logits + static_cast<u64>(token) * EXPERTS * LOGIT_TYPE::BYTES, scores);
        to_shares(scores);
#pragma unroll
        for (u32 i = 0; i < PER_LANE; ++i) {
            own[i] += scores[i];
        }
    }
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        if (lane * PER_LANE + i < EXPERTS) {
            sums[warp * EXPERTS + lane * PER_LANE + i] = own[i];
        }
    }
}

// All threads of a block call this. Adds the warps' sums, and stores them and the counts in the row of the run.
__device__ __forceinline__ void store_row(const RouterSumsParams& p, u32 run, const float* sums, const u32* counts) {
    for (u32 expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) {
        float sum = sums[expert];
#pragma unroll
        for (u32 warp = 1; warp < WARPS; ++warp) {
            sum += sums[warp * EXPERTS + expert];
        }
        const u64 place = static_cast<u64>(run) * EXPERTS + expert;
        ptx::store_4(p.score_sums + place * 4, __float_as_uint(sum));
        ptx::store_4(p.load + place * 4, counts[expert]);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256) router_sums(const __grid_constant__ raymoe::RouterSumsParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) float sums[];  // [WARPS][EXPERTS]; then the counts
    u32* const counts = reinterpret_cast<u32*>(sums + WARPS * EXPERTS);
    for (u32 run = blockIdx.x; run * p.run < p.tokens; run += gridDim.x) {
        const u32 first = run * p.run, last = min(first + p.run, p.tokens);
        for (u32 expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) {
            counts[expert] = 0;
        }
        __syncthreads();  // counts are zero before the first is added to
        count_entries(p, first, last, counts);
        sum_scores(p, first, last, sums);
        __syncthreads();  // all warps' sums and counts are there before they are read
        store_row(p, run, sums, counts);
        // The next run may begin: a thread zeroes only counts that it has read itself, and the barrier follows.
    }
}
