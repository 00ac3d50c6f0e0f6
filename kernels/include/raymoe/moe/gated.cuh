// The gated activation of an expert: h = gate * sigmoid(alpha * gate) * (up + up_plus), after `limit` has clamped gate
// from above and up from both sides. With alpha 1, up_plus 0 and an infinite limit it is SwiGLU.
//
// INTERLEAVED: gate and up take turns in the columns; else all of gate comes first. BIASED: a bias of the row's expert
// is added to both before. Everything is computed in float32, from bfloat16 numbers.
#pragma once

#include "raymoe/moe/expert_rows.cuh"

#ifdef INTERLEAVED_COLUMNS
#define INTERLEAVED true
#else
#define INTERLEAVED false
#endif
#ifdef BIASED_ROWS
#define BIASED true
#else
#define BIASED false
#endif

namespace raymoe {

struct GatedForm {
    float alpha;
    float limit;
    float up_plus;
    u32 width;  // places of eight elements in a row of h
};

// 16 bytes of gate and up each, from which one place of h follows. INTERLEAVED: the first and second half of these
// columns, in which they take turns.
struct GatePair {
    ptx::Bytes16 first, second;

    // The places of the pair in a row of gate and up.
    static __device__ __forceinline__ u64 first_place(u32 place) { return INTERLEAVED ? 2 * place : place; }
    static __device__ __forceinline__ u64 second_place(u32 place, u32 width) {
        return INTERLEAVED ? 2 * place + 1 : static_cast<u64>(place) + width;
    }

    static __device__ __forceinline__ GatePair load_if(bool wanted, const u8* row, u32 place, u32 width) {
        return {ptx::load_16_if(wanted, row + first_place(place) * 16, {0, 0}),
                ptx::load_16_if(wanted, row + second_place(place, width) * 16, {0, 0})};
    }

    static __device__ __forceinline__ GatePair load_constant_if(bool wanted, const u8* row, u32 place, u32 width) {
        return {ptx::load_16_constant_if(wanted, row + first_place(place) * 16, {0, 0}),
                ptx::load_16_constant_if(wanted, row + second_place(place, width) * 16, {0, 0})};
    }

    __device__ __forceinline__ void store(u8* row, u32 place, u32 width) const {
        ptx::store_16(row + first_place(place) * 16, first);
        ptx::store_16(row + second_place(place, width) * 16, second);
    }

    __device__ __forceinline__ void unpack(float (&gate)[8], float (&up)[8]) const {
        if constexpr (INTERLEAVED) {
            float both[16];
            Bf16::unpack(first, both);
            Bf16::unpack(second, both + 8);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                gate[j] = both[2 * j];
                up[j] = both[2 * j + 1];
            }
        } else {
            Bf16::unpack(first, gate);
            Bf16::unpack(second, up);
        }
    }

    static __device__ __forceinline__ GatePair pack(const float (&gate)[8], const float (&up)[8]) {
        if constexpr (INTERLEAVED) {
            float both[16];
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                both[2 * j] = gate[j];
                both[2 * j + 1] = up[j];
            }
            return {Bf16::pack(both), Bf16::pack(both + 8)};
        } else {
            return {Bf16::pack(gate), Bf16::pack(up)};
        }
    }
};

// Unpacks a pair, and adds its bias.
__device__ __forceinline__ void unpack_biased(const GatePair& pair, const GatePair& bias, float (&gate)[8],
                                              float (&up)[8]) {
    pair.unpack(gate, up);
    if constexpr (BIASED) {
        float of_gate[8], of_up[8];
        bias.unpack(of_gate, of_up);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            gate[j] += of_gate[j];
            up[j] += of_up[j];
        }
    }
}

// A NaN stays one: fminf would give the limit for it.
__device__ __forceinline__ float clamped_above(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float clamped(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// The logistic function, with an error of some units in the last place of a float.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

}  // namespace raymoe
