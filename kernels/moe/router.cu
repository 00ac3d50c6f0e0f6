// Chooses the experts of each token, best first, and computes their weights.
//
// A warp has a token. Its registers hold the scores of all experts, and no memory is shared. Each of TOPK rounds takes
// the best score that is left: each lane finds its best, then one instruction on integers the best of the warp. Among
// equal scores the lowest id wins. Lane k holds the choice of round k. NaN counts as larger than every number; the
// weights of such a token are NaN, its ids are as distinct and as valid as those of any other.
//
// With GROUPS > 1, the experts of the best TOPK_GROUPS groups compete; a group's score is the sum of its two best. All
// others then count as -infinity.

#define ANY_GPU

#include "raymoe/moe/scores.cuh"

#ifndef TOPK
#define TOPK 8
#endif
#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef TOPK_GROUPS
#define TOPK_GROUPS GROUPS
#endif
#ifndef SCORE
#define SCORE SOFTMAX
#endif

namespace raymoe {

enum Score : u32 { SOFTMAX, SIGMOID, CHOSEN };  // CHOSEN: softmax over the chosen experts alone

#ifdef BIASED
constexpr bool HAS_BIAS = true;
#else
constexpr bool HAS_BIAS = false;
#endif
#ifdef NORMALISED
constexpr bool NORMALISES = true;
#else
constexpr bool NORMALISES = false;
#endif

constexpr u32 GROUP_LANES = EXPERTS / GROUPS / PER_LANE;
static_assert(GROUPS == 1 || (GROUP_LANES * PER_LANE * GROUPS == EXPERTS && (GROUP_LANES & (GROUP_LANES - 1)) == 0),
              "a group has whole lanes, and their number is a power of two");
static_assert(TOPK <= 32 && TOPK <= EXPERTS && TOPK_GROUPS <= GROUPS, "a lane holds one choice");

struct RouterParams {
    const u8* logits;  // [tokens][EXPERTS]
    const u8* bias;    // [EXPERTS] f32; counts for the choice alone
    u8* topk_idx;      // [tokens][TOPK] i64
    u8* topk_weights;  // [tokens][TOPK] f32
    u32 tokens;
    float scale;
};

struct Choice {
    u32 expert;
    float score;
};

// Adds the bias of each expert to its score, and gives the orders of the sums. A place without an expert is LEAST.
__device__ __forceinline__ void order_scores(const u8* bias, const float (&scores)[PER_LANE], int (&orders)[PER_LANE]) {
    const u32 first = threadIdx.x % 32 * PER_LANE;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        const bool there = first + i < EXPERTS;
        float value = scores[i];
        if constexpr (HAS_BIAS) {
            value += __uint_as_float(ptx::load_4_if(there, bias + static_cast<u64>(first + i) * 4, 0));
        }
        orders[i] = there ? order_of(value) : LEAST;
    }
}

// Finds the two best scores of this lane's group.
__device__ __forceinline__ void best_two(const int (&orders)[PER_LANE], int& first, int& second) {
    first = orders[0];
    second = LEAST;
#pragma unroll
    for (u32 i = 1; i < PER_LANE; ++i) {
        second = max(second, min(first, orders[i]));
        first = max(first, orders[i]);
    }
#pragma unroll
    for (u32 bit = 1; bit < GROUP_LANES; bit *= 2) {
        const int other = __shfl_xor_sync(ALL_LANES, first, bit);
        const int next = __shfl_xor_sync(ALL_LANES, second, bit);
        second = max(min(first, other), max(second, next));
        first = max(first, other);
    }
}

// Leaves out the experts of all groups but the best. Among equal groups those with the lowest numbers stay.
__device__ __forceinline__ void keep_groups(int (&orders)[PER_LANE]) {
    int first, second;
    best_two(orders, first, second);
    const int own = order_of(float_of(first) + float_of(second));
    const u32 group = threadIdx.x % 32 / GROUP_LANES;
    u32 better = 0;
#pragma unroll
    for (u32 other = 0; other < GROUPS; ++other) {
        const int its = __shfl_sync(ALL_LANES, own, other * GROUP_LANES);
        better += its > own || (its == own && other < group);
    }
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        orders[i] = better < TOPK_GROUPS || group >= GROUPS ? orders[i] : INFINITELY_LOW;
    }
}

// Takes the best choice that is left out of `orders`; among equal ones that with the lowest id.
__device__ __forceinline__ Choice take_best(const float (&scores)[PER_LANE], int (&orders)[PER_LANE]) {
    int own = orders[0];
#pragma unroll
    for (u32 i = 1; i < PER_LANE; ++i) {
        own = max(own, orders[i]);
    }
    const int best = __reduce_max_sync(ALL_LANES, own);
    const u32 from = __ffs(__ballot_sync(ALL_LANES, own == best)) - 1;
    Choice choice{0, 0.0f};
    bool open = threadIdx.x % 32 == from;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        const bool here = open && orders[i] == best;
        open = open && !here;
        choice.expert = here ? from * PER_LANE + i : choice.expert;
        choice.score = here ? scores[i] : choice.score;
        orders[i] = here ? LEAST : orders[i];
    }
    return {__shfl_sync(ALL_LANES, choice.expert, from), __shfl_sync(ALL_LANES, choice.score, from)};
}

// Converts the chosen experts' scores to weights. Lane k holds the score of choice k.
__device__ __forceinline__ float weight_of(float score, bool chosen) {
    if constexpr (SCORE == CHOSEN) {
        const float most = float_of(__reduce_max_sync(ALL_LANES, chosen ? order_of(score) : LEAST));
        const float part = chosen ? expf(score - most) : 0.0f;
        return part / warp_sum(part);
    } else if constexpr (NORMALISES) {
        return score / (warp_sum(chosen ? score : 0.0f) + 1e-20f);
    } else {
        return score;
    }
}

// All threads of a warp call this.
__device__ __forceinline__ void route_token(const RouterParams& p, u32 token) {
    const u32 lane = threadIdx.x % 32;
    float scores[PER_LANE];
    load_logits(p.logits + static_cast<u64>(token) * EXPERTS * LOGIT_TYPE::BYTES, scores);
    if constexpr (SCORE == SOFTMAX) {
        to_softmax(scores);
    } else if constexpr (SCORE == SIGMOID) {
        to_sigmoid(scores);
    }
    int orders[PER_LANE];
    order_scores(p.bias, scores, orders);
    if constexpr (GROUPS > 1) {
        keep_groups(orders);
    }
    Choice choice{0, 0.0f};
#pragma unroll 1
    for (u32 k = 0; k < TOPK; ++k) {
        const Choice best = take_best(scores, orders);
        choice = lane == k ? best : choice;
    }
    const float weight = weight_of(choice.score, lane < TOPK) * p.scale;
    if (lane < TOPK) {
        const u64 entry = static_cast<u64>(token) * TOPK + lane;
        ptx::store_8(p.topk_idx + entry * 8, choice.expert);
        ptx::store_4(p.topk_weights + entry * 4, __float_as_uint(weight));
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(128) router(const __grid_constant__ raymoe::RouterParams p) {
    using namespace raymoe;
    const u32 warps = blockDim.x / 32;
    for (u32 token = blockIdx.x * warps + threadIdx.x / 32; token < p.tokens; token += gridDim.x * warps) {
        route_token(p, token);
    }
}
