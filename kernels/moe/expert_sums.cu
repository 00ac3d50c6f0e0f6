// Sums the rows of each expert: the gradient of its bias. WEIGHTED: each row times its weight.
//
// The rows of an expert are cut into SLICES slices of equal length, which depends on their number alone. A block sums
// COLUMNS columns of a slice in float32: warp w takes its rows w, w + 8, ... in order, and then the sums of the warps
// are added in order. The caller adds the slices of an expert in a fixed order too. So results are the same in every
// run, on any number of SMs. A slice without rows has the sum 0.
//
// Only rows of experts are read: not those in gaps, and none from the last offset on.

#include "raymoe/moe/expert_rows.cuh"

namespace raymoe {

constexpr u32 COLUMNS = 256;  // columns of a block, eight for each lane; COLUMNS of raymoe/moe/expert_kernels.py

struct ExpertSumsParams {
    const u8* source;   // bfloat16 [capacity][width * 8]
    const u8* weights;  // float32 [capacity], with WEIGHTED
    u8* sums;           // float32 [experts][slices][width * 8]
    ExpertLayout rows;
    u32 width;   // places of eight elements in a row
    u32 slices;  // slices of each expert
    u32 parts;   // parts of COLUMNS columns
    u32 unused;
};

// Adds rows `begin` + warp, `begin` + warp + 8, ... before `end`, eight columns of them.
__device__ __forceinline__ void add_rows(const ExpertSumsParams& p, u64 begin, u64 end, u32 place,
                                         float (&sums)[8]) {
    constexpr u32 TOGETHER = 4;  // rows of a warp whose loads overlap
    const bool there = place < p.width;
#pragma unroll 1
    for (u64 first = begin + threadIdx.x / 32; first < end; first += TOGETHER * ROWS_WARPS) {
        ptx::Bytes16 loaded[TOGETHER];
        float weights[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const u64 row = first + k * ROWS_WARPS;
            loaded[k] = ptx::load_16_if(there && row < end, p.source + (row * p.width + place) * 16, {0, 0});
            weights[k] = 1.0f;
            if constexpr (WEIGHTED) {
                weights[k] = __uint_as_float(ptx::load_4_if(row < end, p.weights + row * 4, 0));
            }
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            float values[8];
            Bf16::unpack(loaded[k], values);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                sums[j] += values[j] * weights[k];
            }
        }
    }
}

// Sums one part of a slice. All threads of the block call this.
__device__ __forceinline__ void sum_part(const ExpertSumsParams& p, u32 expert, u32 slice, u32 part, u32 shared) {
    const u32 lane = threadIdx.x % 32, first = first_row_of(p.rows, expert);
    const u32 count = ptx::load_4(p.rows.expert_counts + expert * 4ull);
    const u32 length = (count + p.slices - 1) / p.slices;
    const u32 begin = min(slice * length, count), end = min(begin + length, count);
    float sums[8] = {};
    add_rows(p, static_cast<u64>(first) + begin, min(p.rows.capacity, static_cast<u64>(first) + end), part * 32 + lane,
             sums);
    const u32 own = shared + (threadIdx.x / 32 * COLUMNS + lane * 8) * 4;
    ptx::shared_store_16(own, F32::pack(sums));
    ptx::shared_store_16(own + 16, F32::pack(sums + 4));
    __syncthreads();  // hands the sums of the warps to a thread for each column
    const u32 column = part * COLUMNS + threadIdx.x;
    float sum = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < ROWS_WARPS; ++warp) {
        sum += __uint_as_float(ptx::shared_load_4(shared + (warp * COLUMNS + threadIdx.x) * 4));
    }
    if (column < p.width * 8) {
        const u64 row = static_cast<u64>(expert) * p.slices + slice;
        ptx::store_4(p.sums + (row * p.width * 8 + column) * 4, __float_as_uint(sum));
    }
    __syncthreads();  // all have read the sums, and the next part may overwrite them
}

static_assert(COLUMNS == ROWS_THREADS, "a thread for each column");

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROWS_THREADS)
    expert_sums(const __grid_constant__ raymoe::ExpertSumsParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) u8 shared[];  // float32 [ROWS_WARPS][COLUMNS]
    const u32 units = p.rows.experts * p.slices * p.parts;
    for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const u32 slice = unit / p.parts;
        sum_part(p, slice / p.slices, slice % p.slices, unit % p.parts, ptx::shared_address(shared));
    }
}
