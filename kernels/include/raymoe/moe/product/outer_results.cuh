// The results of a tile of outer_product.cu: how threads exchange them, and where they go.
#pragma once

#include "raymoe/moe/product/outer.cuh"

namespace raymoe {

// Exchanges 4 x 4 words between four neighbouring threads: thread c gets word c of each of them.
__device__ __forceinline__ void exchange_in_fours(u32 (&words)[4]) {
    const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFF, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? other : words[i];
        words[i + 1] = odd ? words[i + 1] : other;
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFF, upper ? words[i] : words[i + 2], 2);
        words[i] = upper ? other : words[i];
        words[i + 2] = upper ? words[i + 2] : other;
    }
}

// Stores a row's sums of 32 columns, as four neighbouring threads have them: a thread stores 8 columns, four threads
// 64 bytes in a row.
__device__ __forceinline__ void store_32_columns(u8* row, u32 column, u32 columns, bool wanted, u32 (&pairs)[4]) {
    exchange_in_fours(pairs);
    column += threadIdx.x % 4 * 8;
    if (wanted && column < columns) {
        ptx::store_16(row + column * 2ull, {pairs[0] | static_cast<u64>(pairs[1]) << 32,
                                            pairs[2] | static_cast<u64>(pairs[3]) << 32});
    }
}

constexpr u32 LOADS = 8;  // of 16 bytes that a thread has under way where it adds

// Adds to two floats.
__device__ __forceinline__ u64 added(u64 two, float first, float second) {
    first += __uint_as_float(static_cast<u32>(two));
    second += __uint_as_float(static_cast<u32>(two >> 32));
    return __float_as_uint(first) | static_cast<u64>(__float_as_uint(second)) << 32;
}

// Stores the sums of a tile, as wgmma leaves them, or adds them.
template <u32 N>
__device__ __forceinline__ void store_results(const OuterParams& p, const OuterTile& tile, const float (&sums)[N / 2]) {
    constexpr u64 ELEMENT_BYTES = ADDS ? 4 : 2;
    const u32 output = tile.output + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const u64 row_bytes = p.columns * ELEMENT_BYTES;
    u8* row = p.d_weight + (static_cast<u64>(tile.expert) * p.outputs + output) * row_bytes;
    if constexpr (ADDS) {
        // Neighbouring threads swap, so that one has four columns of this row, the other those of the row 8 further.
        const bool odd = threadIdx.x % 2 != 0, wanted = output + (odd ? 8 : 0) < p.outputs;
        row += odd ? 8 * row_bytes : 0;
        const u32 first = tile.column + threadIdx.x % 4 / 2 * 4;
#pragma unroll
        for (u32 group = 0; group < N / 8; group += LOADS) {
            ptx::Bytes16 before[LOADS];
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                const u32 column = first + (group + i) * 8;
                before[i] = ptx::load_16_if(wanted && column < p.columns, row + column * 4ull, {0, 0});
            }
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                const float* four = sums + (group + i) * 4;
                const float low = __shfl_xor_sync(0xFFFFFFFF, odd ? four[0] : four[2], 1);
                const float high = __shfl_xor_sync(0xFFFFFFFF, odd ? four[1] : four[3], 1);
                const u32 column = first + (group + i) * 8;
                if (wanted && column < p.columns) {
                    ptx::store_16(row + column * 4ull,
                                  {added(before[i].low, odd ? low : four[0], odd ? high : four[1]),
                                   added(before[i].high, odd ? four[2] : low, odd ? four[3] : high)});
                }
            }
        }
    } else {
#pragma unroll
        for (u32 quarter = 0; quarter < N / 32; ++quarter) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u32 pairs[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 at = (quarter * 4 + i) * 4 + half * 2;
                    pairs[i] = packed(sums[at], sums[at + 1]);
                }
                store_32_columns(row + half * 8 * row_bytes, tile.column + quarter * 32, p.columns,
                                 output + half * 8 < p.outputs, pairs);
            }
        }
    }
}

}  // namespace raymoe
