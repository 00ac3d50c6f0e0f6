// Rows as 8-bit floats, and back.
//
// Each BLOCK of 128 elements has a float32 scale, its largest element divided by the largest 8-bit float; a block of
// zeros has scale 1. A slot holds the elements of a row, then its scales.
#pragma once

#include "raymoe/dispatch.cuh"
#include "raymoe/vectors.cuh"

namespace raymoe {

constexpr float LARGEST_E4M3 = 448.0f;
// Elements of a thread whose conversions are under way at a time: each of them waits for what its neighbours find.
constexpr u32 EIGHTS = 4;

// By a whole warp, each half of which has blocks of its own, eight elements a thread: elements and scales.
__device__ __forceinline__ void quantise_eights(float (*values)[8], float* scales) {
#pragma unroll
    for (u32 i = 0; i < EIGHTS; ++i) {
        scales[i] = 0;
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            scales[i] = fmaxf(scales[i], fabsf(values[i][j]));
        }
    }
#pragma unroll
    for (u32 step = 8; step != 0; step /= 2) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
            scales[i] = fmaxf(scales[i], __shfl_xor_sync(0xFFFFFFFF, scales[i], step));
        }
    }
#pragma unroll
    for (u32 i = 0; i < EIGHTS; ++i) {
        const float inverse = scales[i] == 0.0f ? 1.0f : LARGEST_E4M3 / scales[i];
        scales[i] = scales[i] == 0.0f ? 1.0f : scales[i] / LARGEST_E4M3;
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            values[i][j] *= inverse;
        }
    }
}

// By a whole warp: the row in shared memory at `row` becomes elements and scales at `into`. `hidden` is a multiple of
// 4, and of 8 unless elements have four bytes.
template <class Type>
__device__ __forceinline__ void quantise(u32 row, u32 into, u32 hidden, u32 blocks) {
    const u32 lane = threadIdx.x % 32;
    for (u32 begin = 0; begin < hidden; begin += EIGHTS * 32 * 8) {
        float values[EIGHTS][8];
        float scales[EIGHTS];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
            const u32 first = begin + (i * 32 + lane) * 8;
#pragma unroll
            for (u32 part = 0; part < 8; part += Type::COUNT) {
                ptx::Bytes16 loaded{0, 0};
                if (first + part < hidden) {
                    loaded = ptx::shared_load_16(row + (first + part) * Type::BYTES);
                }
                Type::unpack(loaded, values[i] + part);
            }
        }
        quantise_eights(values, scales);
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
            const u32 first = begin + (i * 32 + lane) * 8, block = first / BLOCK;
#pragma unroll
            for (u32 part = 0; part < 8; part += 4) {
                if (first + part < hidden) {
                    ptx::shared_store_4(into + first + part, ptx::to_e4m3x4(values[i] + part));
                }
            }
            if (lane % 16 == 0 && block < blocks) {
                ptx::shared_store_4(into + hidden + block * 4, __float_as_uint(scales[i]));
            }
        }
    }
}

// By a whole warp: a row that is quantised already, in shared memory at `row`, and its scales become elements and
// scales at `into`.
__device__ __forceinline__ void take_quantised(const DispatchParams& p, u32 token, u32 row, u32 into) {
    for (u32 at = threadIdx.x % 32 * 16; at < p.hidden; at += 32 * 16) {
        ptx::shared_store_16(into + at, ptx::shared_load_16(row + at));
    }
    const u8* scales = p.x_scales + static_cast<u64>(token) * p.blocks() * 4;
    for (u32 block = threadIdx.x % 32; block < p.blocks(); block += 32) {
        ptx::shared_store_4(into + p.hidden + block * 4, ptx::load_4(scales + block * 4));
    }
}

// By a whole warp: the opposite, into a row of `Type`.
template <class Type>
__device__ __forceinline__ void dequantise(u32 slot, u32 row, u32 hidden) {
    for (u32 four = threadIdx.x % 32; four * 4 < hidden; four += 32) {
        const float scale = __uint_as_float(ptx::shared_load_4(slot + hidden + four / 32 * 4));
        float values[4];
        ptx::from_e4m3x4(ptx::shared_load_4(slot + four * 4), values);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[i] *= scale;
        }
        store_four<Type>(row, four, values);
    }
}

}  // namespace raymoe
