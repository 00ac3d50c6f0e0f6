// Sums over the threads of a group of warps, always in the same order.
#pragma once

#include "raymoe/rows/pipe.cuh"

namespace raymoe {

// Replaces each value by its sum over the threads of a warp.
template <u32 COUNT>
__device__ __forceinline__ void add_in_warp(float (&values)[COUNT]) {
#pragma unroll
    for (u32 bit = 16; bit != 0; bit /= 2) {
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
            values[k] += __shfl_xor_sync(0xFFFFFFFF, values[k], bit);
        }
    }
}

// Sums over the threads of a group, a row at a time, always in the same order. The warps' sums alternate between two
// places, so one barrier a row is enough: a thread writes a place again after a barrier that all pass after reading it.
class GroupSums {
  public:
    static constexpr u32 MOST = 4;  // the most values that are summed at once

    __device__ __forceinline__ explicit GroupSums(u32 memory) : memory_(memory) {}

    // Replaces each value by its sum. All threads of the group call this.
    template <u32 COUNT>
    __device__ __forceinline__ void add(float (&values)[COUNT]) {
        add_in_warp(values);
        float of_warps[GROUP_WARPS][COUNT];
        gather(values, of_warps);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
            values[k] = 0.0f;
#pragma unroll
            for (u32 warp = 0; warp < GROUP_WARPS; ++warp) {
                values[k] += of_warps[warp][k];
            }
        }
    }

    // Gives every thread the values of all warps of the group. All its threads call this; those of a warp have the same
    // values.
    template <u32 COUNT>
    __device__ __forceinline__ void gather(const float (&values)[COUNT], float (&of_warps)[GROUP_WARPS][COUNT]) {
        static_assert(COUNT <= MOST, "");
        const u32 place = memory_ + parity_ * GROUP_WARPS * MOST * 4;
        if (GROUP_WARPS != 1 && threadIdx.x % 32 == 0) {
#pragma unroll
            for (u32 k = 0; k < COUNT; ++k) {
                ptx::shared_store_4(place + (thread_in_group() / 32 * MOST + k) * 4, __float_as_uint(values[k]));
            }
        }
        if (GROUP_WARPS != 1) {
            group_barrier();
        }
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
#pragma unroll
            for (u32 warp = 0; warp < GROUP_WARPS; ++warp) {
                const u32 at = place + (warp * MOST + k) * 4;
                of_warps[warp][k] = GROUP_WARPS == 1 ? values[k] : __uint_as_float(ptx::shared_load_4(at));
            }
        }
        parity_ ^= 1;
    }

  private:
    u32 memory_;
    u32 parity_ = 0;
};
static_assert(SUMS_BYTES == 2 * GROUP_WARPS * GroupSums::MOST * 4, "");

}  // namespace raymoe
