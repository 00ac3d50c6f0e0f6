// Rows of experts, one expert after the other, for kernels in which a warp works on a row at a time.
//
// The number of rows is on the device: it is the last offset. The memory has places for many more rows, which no
// kernel reads or writes.
#pragma once

#define ANY_GPU

#include "raymoe/base/vectors.cuh"

#ifdef WEIGHTED_ROWS  // each row is multiplied by a weight
#define WEIGHTED true
#else
#define WEIGHTED false
#endif

namespace raymoe {

constexpr u32 ROWS_WARPS = 8, ROWS_THREADS = ROWS_WARPS * 32;  // WARPS of raymoe/moe/expert_kernels.py

struct ExpertLayout {
    const u8* expert_offsets;  // int32[experts + 1]: the first row of each expert
    const u8* expert_counts;   // int32[experts]: its rows
    u64 capacity;              // rows that fit into the memory
    u32 experts;
    u32 unused;
};

__device__ __forceinline__ u32 first_row_of(const ExpertLayout& p, u32 expert) {
    return ptx::load_4(p.expert_offsets + expert * 4ull);
}

// The number of rows from the first one to the last offset.
__device__ __forceinline__ u64 end_of_rows(const ExpertLayout& p) {
    return min(p.capacity, static_cast<u64>(first_row_of(p, p.experts)));
}

// The expert of a row. Rows in the gap after an expert's last row have none.
struct Place {
    u32 expert;
    bool in_gap;
};

// All threads of a warp call this, with a row before the last offset.
__device__ __forceinline__ Place place_of(const ExpertLayout& p, u64 row) {
    const u32 lane = threadIdx.x % 32;
    u32 expert = 0;  // the experts that end at this row or before
    for (u32 first = 0; first < p.experts; first += 32) {
        const u32 next = first + lane + 1;
        const bool wanted = next <= p.experts;
        const u32 end = ptx::load_4_if(wanted, p.expert_offsets + next * 4ull, 0);
        expert += __popc(__ballot_sync(0xFFFFFFFF, wanted && end <= row));
    }
    return {expert, row - first_row_of(p, expert) >= ptx::load_4(p.expert_counts + expert * 4ull)};
}

// Calls `compute(row)` for the rows of this warp.
template <class Compute>
__device__ __forceinline__ void for_each_row(u64 end, Compute compute) {
    const u64 warps = static_cast<u64>(gridDim.x) * ROWS_WARPS;
#pragma unroll 1
    for (u64 row = static_cast<u64>(blockIdx.x) * ROWS_WARPS + threadIdx.x / 32; row < end; row += warps) {
        compute(row);
    }
}

// Calls `compute(places, there)` for COUNT 16-byte places of each lane at a time, of `width` in a row.
template <u32 COUNT, class Compute>
__device__ __forceinline__ void for_each_place(u32 width, Compute compute) {
#pragma unroll 1
    for (u32 begin = threadIdx.x % 32; begin < width; begin += COUNT * 32) {
        u32 places[COUNT];
        bool there[COUNT];
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
            places[k] = begin + k * 32;
            there[k] = places[k] < width;
        }
        compute(places, there);
    }
}

// The weight of a row, of float32[rows]; 1 without WEIGHTED. A row in a gap has weight 0, which is not read, so
// products with it are 0 too.
__device__ __forceinline__ float weight_of(const u8* weights, u64 row, const Place& place) {
    if (place.in_gap) {
        return 0.0f;
    }
    return WEIGHTED ? __uint_as_float(ptx::load_4(weights + row * 4)) : 1.0f;
}

// The sum of a value over the lanes of a warp, always in the same order.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (u32 bit = 16; bit != 0; bit /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFF, value, bit);
    }
    return value;
}

}  // namespace raymoe
