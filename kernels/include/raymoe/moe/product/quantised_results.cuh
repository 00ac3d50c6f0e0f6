// Results of a gated product as 8-bit floats: 128 outputs of a token, which are a tile's, have one scale.
#pragma once

#include "raymoe/moe/product/scaled.cuh"
#include "raymoe/moe/product/results.cuh"

namespace raymoe {

static_assert(!QUANTISES || OUTPUTS == SCALED_ELEMENTS, "without a gate a tile has the outputs of two scales");

constexpr u32 QUANTISING_BARRIER = 1;  // of all multiplying warps

__device__ __forceinline__ float finite_magnitude(float value) {
    const float size = fabsf(value);
    return size < __uint_as_float(INFINITE) ? size : 0.0f;  // zero for NaN too
}

// The same as `four_in_a_row` of bytes: two of each eight in half a word.
__device__ __forceinline__ u32 four_bytes_in_a_row(u32 own) {
    const bool odd = threadIdx.x % 2 != 0;
    const u32 other = __shfl_xor_sync(0xFFFFFFFF, odd ? own & 0xFFFF : own >> 16, 1);
    return odd ? other | (own & 0xFFFF0000) : (own & 0xFFFF) | other << 16;
}

// Turns 16 outputs of 8 tokens into four bytes of token lane / 4: outputs `four_outputs()` on.
__device__ __forceinline__ u32 bytes_by_token(const float (&values)[4]) {
    // Before: outputs lane / 4 and lane / 4 + 8 of two tokens, a pair of bytes for each token.
    const float in_pairs[4] = {values[0], values[2], values[1], values[3]};
    const u32 transposed = ptx::transposed_8x8(ptx::to_e4m3x4(in_pairs));
    // After: outputs 2 c and 2 c + 8, then 2 c + 1 and 2 c + 9 of one token, c = lane % 4.
    const u32 own = __byte_perm(transposed, 0, 0x3120);
    return four_bytes_in_a_row(own);
}

// Computes the results of a tile, and stores them as 8-bit floats with a scale for each token. The multiplying warps
// call this. Two barriers separate the maxima of the warps, the factors of the tokens, and their use.
template <u32 N>
__device__ __forceinline__ void store_quantised(const ScaledProductParams& p, const Memory& memory,
                                                const Results& results, float (&sums)[2][N / 2]) {
    const ProductTile& tile = results.tile;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float(&values)[N / 2] = sums[0];
#pragma unroll
    for (u32 eight = 0; eight < N / 8; ++eight) {
        float low[4], high[4], reach[2];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            low[i] = values[eight * 4 + i];
            high[i] = sums[1][eight * 4 + i];
        }
        results.add_biases(low, high);
        results.gate_and_weigh(eight, low, high);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[eight * 4 + i] = low[i];
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            reach[i] = fmaxf(finite_magnitude(low[i]), finite_magnitude(low[i + 2]));
#pragma unroll
            for (u32 step = 4; step < 32; step *= 2) {
                reach[i] = fmaxf(reach[i], __shfl_xor_sync(0xFFFFFFFF, reach[i], step));
            }
            reach[i] = results.there[0] ? reach[i] : 0.0f;  // outputs after the last have biases of others
        }
        if (lane < 4) {
            const u64 both = static_cast<u64>(__float_as_uint(reach[1])) << 32 | __float_as_uint(reach[0]);
            ptx::shared_store_8(maxima_of(memory, warp) + (eight * 8 + lane * 2) * 4, both);
        }
    }
    ptx::barrier_of_warps(QUANTISING_BARRIER, MULTIPLYING_WARPS * 32);  // hands over the maxima
    if (threadIdx.x < N) {
        const u32 token = threadIdx.x;
        float reach = 0.0f;
#pragma unroll
        for (u32 i = 0; i < MULTIPLYING_WARPS; ++i) {
            reach = fmaxf(reach, __uint_as_float(ptx::shared_load_4(maxima_of(memory, i) + token * 4)));
        }
        const Scaling scaling(reach);
        ptx::shared_store_4(factors_in(memory) + token * 4, __float_as_uint(scaling.factor));
        if (token < tile.rows) {
            const u64 at = tile.output / SCALED_ELEMENTS * p.y_scale_stride + tile.row + token;
            ptx::store_4(p.y_scales + at * 4, __float_as_uint(scaling.scale));
        }
    }
    ptx::barrier_of_warps(QUANTISING_BARRIER, MULTIPLYING_WARPS * 32);  // hands over the factors
#pragma unroll
    for (u32 eight = 0; eight < N / 8; ++eight) {
        const Floats2 factors(factors_in(memory) + (eight * 8 + lane % 4 * 2) * 4);
        float scaled[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            scaled[i] = values[eight * 4 + i] * (i % 2 == 0 ? factors.first : factors.second);
        }
        const u32 bytes = bytes_by_token(scaled), token = eight * 8 + lane / 4;
        if (token < tile.rows && results.there[0]) {
            const u64 row = static_cast<u64>(tile.row) + token;
            ptx::store_4(p.product.y + row * p.product.outputs + results.first + four_outputs(), bytes);
        }
    }
}

}  // namespace raymoe
