// A token's logits in the registers of a warp, the scores of its experts, and numbers that order them.
//
// Lane l holds experts l * PER_LANE to (l + 1) * PER_LANE - 1: the order of lanes is the order of experts. The last
// lanes may hold no experts.
#pragma once

#include "raymoe/base/vectors.cuh"

#ifndef EXPERTS
#define EXPERTS 256
#endif
#ifndef PER_LANE
#define PER_LANE ((EXPERTS + 31) / 32)
#endif
#ifndef LOGIT_TYPE
#define LOGIT_TYPE F32
#endif

namespace raymoe {

constexpr u32 ALL_LANES = 0xFFFFFFFF;
static_assert(PER_LANE * 32 >= EXPERTS && PER_LANE <= 32, "every expert needs a place in a register");

// The bytes of a load: the largest power of two, up to 16, that divides both the bytes of a lane and those of a row.
constexpr u32 SHARED_BITS = PER_LANE * LOGIT_TYPE::BYTES | EXPERTS * LOGIT_TYPE::BYTES | 16;
constexpr u32 LOAD_BYTES = SHARED_BITS & (0 - SHARED_BITS);
static_assert(LOAD_BYTES >= 4, "a lane and a row have an even number of 16-bit logits");

__device__ __forceinline__ ptx::Bytes16 load_if(bool wanted, const u8* at) {
    if constexpr (LOAD_BYTES == 16) {
        return ptx::load_16_if(wanted, at, {0, 0});
    } else if constexpr (LOAD_BYTES == 8) {
        return {ptx::load_8_if(wanted, at, 0), 0};
    } else {
        return {ptx::load_4_if(wanted, at, 0), 0};
    }
}

// Loads a row of EXPERTS numbers. A place without an expert becomes -infinity. The row begins at a multiple of
// LOAD_BYTES.
__device__ __forceinline__ void load_logits(const u8* row, float (&into)[PER_LANE]) {
    constexpr u32 PER_LOAD = LOAD_BYTES / LOGIT_TYPE::BYTES;
    const u32 first = threadIdx.x % 32 * PER_LANE;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i += PER_LOAD) {
        const bool there = first + i < EXPERTS;
        float wide[LOGIT_TYPE::COUNT];
        LOGIT_TYPE::unpack(load_if(there, row + static_cast<u64>(first + i) * LOGIT_TYPE::BYTES), wide);
#pragma unroll
        for (u32 j = 0; j < PER_LOAD; ++j) {
            into[i + j] = there ? wide[j] : __uint_as_float(0xFF800000);
        }
    }
}

// An integer that orders floats: equal for both zeros, and for NaN above all. LEAST is below every float.
constexpr int LEAST = -2147483647 - 1;
constexpr int HIGHEST = 2147483647;
constexpr int INFINITELY_LOW = static_cast<int>(0xFF800000u ^ 0x7FFFFFFFu);

__device__ __forceinline__ int order_of(float value) {
    const int bits = static_cast<int>(__float_as_uint(value + 0.0f));  // -0 + 0 is +0
    return value != value ? HIGHEST : bits ^ (bits >> 31 & HIGHEST);
}

__device__ __forceinline__ float float_of(int order) {
    return __uint_as_float(static_cast<u32>(order ^ (order >> 31 & HIGHEST)));
}

// The sum over the lanes of a warp, the same bits in all lanes and in every run.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 bit = 16; bit != 0; bit /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, bit);
    }
    return value;
}

// Replaces logits by their softmax over all experts. Places without an expert become 0.
__device__ __forceinline__ void to_softmax(float (&values)[PER_LANE]) {
    float most = values[0];
#pragma unroll
    for (u32 i = 1; i < PER_LANE; ++i) {
        most = fmaxf(most, values[i]);  // without NaN, which the sum then has
    }
    most = float_of(__reduce_max_sync(ALL_LANES, order_of(most)));
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        values[i] = expf(values[i] - most);
        sum += values[i];
    }
    const float share = 1.0f / warp_sum(sum);
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        values[i] *= share;
    }
}

// Replaces each logit by its sigmoid. Places without an expert become 0.
__device__ __forceinline__ void to_sigmoid(float (&values)[PER_LANE]) {
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) {
        values[i] = 1.0f / (1.0f + expf(-values[i]));
    }
}

}  // namespace raymoe
