// What the products share: the elements of their operands, and how these lie in shared memory.
#pragma once

#ifdef HALF_FLOATS
#define WGMMA_TYPE "f16"
#endif
#include "raymoe/base/ptx_matrix.cuh"

namespace raymoe {

using u16 = unsigned short;

constexpr u32 MULTIPLYING_WARPS = 8, LOADING_WARP = 8, PRODUCT_THREADS = 384;
constexpr u32 MULTIPLYING_REGISTERS = 232, OTHER_REGISTERS = 40;
constexpr u32 PIECE = 64, PIECE_BYTES = PIECE * 2;  // elements that are neighbours in shared memory

#ifdef HALF_FLOATS
__device__ __forceinline__ u32 packed(float low, float high) { return ptx::to_f16x2(low, high); }
#else
__device__ __forceinline__ u32 packed(float low, float high) { return ptx::to_bf16x2(low, high); }
#endif

__device__ __forceinline__ u32 rounded_up(u32 rows, u32 step) { return (rows + step - 1) / step * step; }

__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    while (!ptx::barrier_try_wait(barrier, parity)) {
    }
}

// Describes pieces of 64 elements of 16 bits in shared memory, as a load with the 128-byte swizzle stores them: groups
// of 8 pieces, 1024 bytes each, at a multiple of 1024 bytes. A piece of 8-bit elements has 128 of them, and its next 32
// columns are at descriptor + NEXT_COLUMNS. It has no transposed form.
//
//                        a piece                the next 16 columns
//   operand              64 columns of a row    at descriptor + NEXT_COLUMNS
//   transposed operand   64 rows of a column    at descriptor + NEXT_COLUMNS_TRANSPOSED
//
// An operand has rows in groups of 8, one after the other. A transposed one has columns so. Where it has more than 64
// rows, the next 64 are `rows_stride` bytes further.
constexpr u64 NEXT_COLUMNS = 16 * 2 / 16, NEXT_COLUMNS_TRANSPOSED = 16 * PIECE_BYTES / 16;

__device__ __forceinline__ u64 operand_descriptor(u32 shared, u32 rows_stride = 16) {
    constexpr u64 SWIZZLE_128 = 1ull << 62, GROUP_STRIDE = static_cast<u64>(1024 / 16) << 32;
    return SWIZZLE_128 | GROUP_STRIDE | static_cast<u64>(rows_stride / 16) << 16 |
           static_cast<u64>(shared / 16 & 0x3FFF);
}

}  // namespace raymoe
