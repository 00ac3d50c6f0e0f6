// Computes the gradient of a router's logits from that of its weights.
//
// A warp has a token, and its registers hold a number for each expert, as in router.cu. Lane k has the gradient of the
// k-th choice. Only chosen experts have a gradient, except in the softmax over all experts that is not normalised.
// Normalised, that softmax is the softmax over the chosen ones.

#define ANY_GPU

#include "raymoe/moe/scores.cuh"

#ifndef TOPK
#define TOPK 8
#endif
#ifndef SCORE
#define SCORE SOFTMAX
#endif

namespace raymoe {

enum Score : u32 { SOFTMAX, SIGMOID, CHOSEN };  // CHOSEN: softmax over the chosen experts alone

#ifdef NORMALISED
constexpr bool NORMALISES = true;
#else
constexpr bool NORMALISES = false;
#endif
constexpr bool OVER_ALL = SCORE == SOFTMAX && !NORMALISES;
static_assert(TOPK <= 32 && TOPK <= EXPERTS, "a lane holds one choice");

struct RouterBackwardParams {
    const u8* dweights;  // [tokens][TOPK] f32
    const u8* logits;    // [tokens][EXPERTS]
    const u8* topk_idx;  // [tokens][TOPK] i64, all of them experts
    u8* dlogits;         // [tokens][EXPERTS], of the type of the logits
    u32 tokens;
    float scale;
};

// Returns the number of an expert, which another lane may hold.
__device__ __forceinline__ float number_of(const float (&numbers)[PER_LANE], u32 expert) {
    float number = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        const float other = __shfl_sync(ALL_LANES, numbers[i], expert / PER_LANE);
        number = expert % PER_LANE == i ? other : number;
    }
    return number;
}

// Converts the gradient of a choice's weight to that of its logit. All lanes call this; those without a choice give 0.
__device__ __forceinline__ float chosen_gradient(float logit, float dweight, bool chosen) {
    if constexpr (SCORE == SIGMOID) {
        const float score = chosen ? 1.0f / (1.0f + expf(-logit)) : 0.0f;
        if constexpr (NORMALISES) {
            const float total = warp_sum(score) + 1e-20f;
            dweight = (dweight - warp_sum(dweight * score) / total) / total;
        }
        return dweight * score * (1.0f - score);
    } else {
        const float most = float_of(__reduce_max_sync(ALL_LANES, chosen ? order_of(logit) : LEAST));
        const float part = chosen ? expf(logit - most) : 0.0f;
        const float score = part / warp_sum(part);
        return score * (dweight - warp_sum(score * dweight));
    }
}

// Adds the gradient of each choice to the number of its expert.
__device__ __forceinline__ void add_choices(float (&numbers)[PER_LANE], u32 expert, float gradient) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 k = 0; k < TOPK; ++k) {
        const u32 its = __shfl_sync(ALL_LANES, expert, k);
        const float more = __shfl_sync(ALL_LANES, gradient, k);
#pragma unroll
        for (u32 i = 0; i < PER_LANE; ++i) {
            numbers[i] += its == lane * PER_LANE + i ? more : 0.0f;
        }
    }
}

// Stores a row as load_logits reads one.
__device__ __forceinline__ void store_row(u8* row, const float (&numbers)[PER_LANE]) {
    constexpr u32 PER_LOAD = LOAD_BYTES / LOGIT_TYPE::BYTES;
    const u32 first = threadIdx.x % 32 * PER_LANE;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i += PER_LOAD) {
        float wide[LOGIT_TYPE::COUNT] = {};
#pragma unroll
        for (u32 j = 0; j < PER_LOAD; ++j) {
            wide[j] = numbers[i + j];
        }
        const ptx::Bytes16 packed = LOGIT_TYPE::pack(wide);
        u8* const at = row + static_cast<u64>(first + i) * LOGIT_TYPE::BYTES;
        if (first + i >= EXPERTS) {
            return;
        }
        if constexpr (LOAD_BYTES == 16) {
            ptx::store_16(at, packed);
        } else if constexpr (LOAD_BYTES == 8) {
            ptx::store_8(at, packed.low);
        } else {
            ptx::store_4(at, static_cast<u32>(packed.low));
        }
    }
}

// All threads of a warp call this.
__device__ __forceinline__ void differentiate_token(const RouterBackwardParams& p, u32 token) {
    const u32 lane = threadIdx.x % 32;
    const bool chosen = lane < TOPK;
    const u64 row = static_cast<u64>(token) * EXPERTS * LOGIT_TYPE::BYTES;
    const u64 entry = static_cast<u64>(token) * TOPK + lane;
    const u32 expert = static_cast<u32>(ptx::load_8_if(chosen, p.topk_idx + entry * 8, 0));
    const float dweight = __uint_as_float(ptx::load_4_if(chosen, p.dweights + entry * 4, 0)) * p.scale;
    float numbers[PER_LANE];
    load_logits(p.logits + row, numbers);
    float gradient;
    if constexpr (OVER_ALL) {
        to_softmax(numbers);
        const float score = number_of(numbers, expert);
        gradient = chosen ? score * dweight : 0.0f;
        const float along = warp_sum(gradient);
#pragma unroll
        for (u32 i = 0; i < PER_LANE; ++i) {
            numbers[i] *= -along;
        }
    } else {
        gradient = chosen_gradient(number_of(numbers, expert), dweight, chosen);
#pragma unroll
        for (u32 i = 0; i < PER_LANE; ++i) {
            numbers[i] = 0.0f;
        }
    }
    add_choices(numbers, expert, gradient);
    store_row(p.dlogits + row, numbers);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(128)
    router_backward(const __grid_constant__ raymoe::RouterBackwardParams p) {
    using namespace raymoe;
    const u32 warps = blockDim.x / 32;
    for (u32 token = blockIdx.x * warps + threadIdx.x / 32; token < p.tokens; token += gridDim.x * warps) {
        differentiate_token(p, token);
    }
}
