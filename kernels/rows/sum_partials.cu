// Adds the rows of partial sums that the groups of a backward kernel have stored, always in the same order.
//
// A block has COLUMNS columns of one vector. Its warps take every 16th row, each thread four columns; then the first
// warp adds their sums. The partials are so few that the L2 cache still has them.

#include "raymoe/base/vectors.cuh"

#ifndef WEIGHT_TYPE
#define WEIGHT_TYPE Bf16
#endif

namespace raymoe {

constexpr u32 SUM_WARPS = 16, COLUMNS = 128;  // COLUMNS of raymoe/rows/norm_kernels.py

struct SumPartialsParams {
    const u8* partials;  // float32 [vectors][rows][hidden]
    u8* out[2];          // [hidden], one for each vector
    u32 rows;
    u32 hidden;
    u32 parts;  // parts of each vector, of COLUMNS columns
    u32 vectors;
};

struct Four {
    float values[4];

    __device__ __forceinline__ void add(const ptx::Bytes16& row) {
        float wide[4];
        F32::unpack(row, wide);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            values[j] += wide[j];
        }
    }
};

// Adds rows `warp`, `warp` + SUM_WARPS, ... of four columns.
__device__ __forceinline__ Four sum_of_rows(const u8* partials, u32 warp, u32 rows, u64 row_bytes) {
    constexpr u32 UNROLL = 8;  // rows whose loads overlap
    Four sum = {};
#pragma unroll 1
    for (u32 begin = warp; begin < rows; begin += UNROLL * SUM_WARPS) {
        ptx::Bytes16 loaded[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            const u32 row = begin + k * SUM_WARPS;
            loaded[k] = ptx::load_16_if(row < rows, partials + row * row_bytes, {0, 0});
        }
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            sum.add(loaded[k]);
        }
    }
    return sum;
}

// Adds one part of a vector. All threads of the block call this.
__device__ __forceinline__ void sum_part(const SumPartialsParams& p, u32 vector, u32 part, u32 shared) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = part * COLUMNS + lane * 4;
    const bool there = column < p.hidden;
    const u64 row_bytes = p.hidden * 4ull;
    const u8* const first = p.partials + vector * p.rows * row_bytes + (there ? column : 0) * 4ull;
    const Four own = sum_of_rows(first, warp, p.rows, row_bytes);
    ptx::shared_store_16(shared + (warp * COLUMNS + lane * 4) * 4, F32::pack(own.values));
    __syncthreads();  // hands the warps' sums to the first warp
    if (warp == 0 && there) {
        Four sum = {};
        for (u32 other = 0; other < SUM_WARPS; ++other) {
            sum.add(ptx::shared_load_16(shared + (other * COLUMNS + lane * 4) * 4));
        }
        u8* const into = p.out[vector] + static_cast<u64>(column) * WEIGHT_TYPE::BYTES;
        if constexpr (WEIGHT_TYPE::BYTES == 4) {
            ptx::store_16(into, WEIGHT_TYPE::pack(sum.values));
        } else {
            const float eight[8] = {sum.values[0], sum.values[1], sum.values[2], sum.values[3], 0, 0, 0, 0};
            ptx::store_8(into, WEIGHT_TYPE::pack(eight).low);
        }
    }
    __syncthreads();  // the first warp has read the sums, and the next part may overwrite them
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::SUM_WARPS * 32, 1)
    sum_partials(const __grid_constant__ raymoe::SumPartialsParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) u8 shared[];  // a row of COLUMNS sums for each warp
    ptx::wait_for_kernel_before();  // it stores the partials
    for (u32 unit = blockIdx.x; unit < p.vectors * p.parts; unit += gridDim.x) {
        const u32 vector = unit / p.parts;
        sum_part(p, vector, unit - vector * p.parts, ptx::shared_address(shared));
    }
}
