// Whole rows in the registers of a group of warps: each thread holds VECTORS times eight elements. So a row is read
// from its stage once, and used twice: for its sums, and for its results.
//
// Eight number e of a row belongs to thread e % GROUP_THREADS of the group. So half a warp holds 128 neighbouring
// elements, a block of 8-bit floats. The 16-byte accesses of a warp to a stage meet no bank twice.
#pragma once

#include "raymoe/pipe/elements.cuh"

#ifndef HIDDEN
#define HIDDEN 128
#endif
#ifndef ROW_TYPE
#define ROW_TYPE Bf16
#endif
#ifndef WEIGHT_TYPE
#define WEIGHT_TYPE ROW_TYPE
#endif

namespace raymoe {

static_assert(HIDDEN % 8 == 0, "rows are moved eight elements at a time");
constexpr u32 ROW_EIGHTS = HIDDEN / 8;
constexpr u32 VECTORS = (ROW_EIGHTS + GROUP_THREADS - 1) / GROUP_THREADS;  // of a thread
constexpr float ONE_OVER_HIDDEN = 1.0f / HIDDEN;

__device__ __forceinline__ u32 eight_of(u32 i) { return i * GROUP_THREADS + thread_in_group(); }
__device__ __forceinline__ bool is_there(u32 i) { return eight_of(i) < ROW_EIGHTS; }

// The part of a row that a thread holds. Elements after the row's end are zero.
template <class Type>
struct Part {
    Elements<Type> eights[VECTORS];

    static __device__ __forceinline__ Part of_row(const PipeRows& from, const Tile& tile, u32 r) {
        Part part;
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            part.eights[i] = take<Type>(from, tile, r, eight_of(i), is_there(i));
        }
        return part;
    }

    static __device__ __forceinline__ Part of_vector(const u8* vector) {
        Part part;
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            const u64 at = static_cast<u64>(eight_of(i)) * Elements<Type>::BYTES;
            part.eights[i] = Elements<Type>::load_if(is_there(i), vector + at);
        }
        return part;
    }

    // Unpacks elements that have been unpacked before. Of a long row, the compiler may not keep the first numbers: they
    // would be twice as many registers.
    __device__ __forceinline__ void again(u32 i, float (&into)[8]) const {
        if constexpr (VECTORS > 6 && Type::BYTES < 4) {
            eights[i].unknown().unpack(into);
        } else {
            eights[i].unpack(into);
        }
    }
};

// A vector that multiplies every row, such as a weight: kept in registers if it fits beside a row, else loaded again
// for each row, from the L1 cache.
template <class Type>
class Vector {
  public:
    __device__ __forceinline__ explicit Vector(const u8* at) : at_(at) {
        if constexpr (KEPT) {
            part_ = Part<Type>::of_vector(at);
        }
    }

    __device__ __forceinline__ void unpack(u32 i, float (&into)[8]) const {
        if constexpr (KEPT) {
            part_.eights[i].unknown().unpack(into);
        } else {
            Elements<Type>::load_if(is_there(i), at_ + static_cast<u64>(eight_of(i)) * Elements<Type>::BYTES)
                .unpack(into);
        }
    }

  private:
    static constexpr bool KEPT = sizeof(Part<Type>) <= 96;

    const u8* at_;
    Part<Type> part_;
};

// Sums over the threads of a group, a row at a time, always in the same order. The warps' sums alternate between two
// places, so one barrier a row is enough: a thread writes a place again after a barrier that all pass after reading it.
class GroupSums {
  public:
    static constexpr u32 MOST = 4;  // values that are summed at once

    __device__ __forceinline__ explicit GroupSums(u32 memory) : memory_(memory) {}

    // Replaces each value by its sum. All threads of the group call this.
    template <u32 COUNT>
    __device__ __forceinline__ void add(float (&values)[COUNT]) {
        static_assert(COUNT <= MOST, "");
#pragma unroll
        for (u32 bit = 16; bit != 0; bit /= 2) {
#pragma unroll
            for (u32 k = 0; k < COUNT; ++k) {
                values[k] += __shfl_xor_sync(0xFFFFFFFF, values[k], bit);
            }
        }
        if constexpr (GROUP_WARPS != 1) {
            const u32 place = memory_ + parity_ * GROUP_WARPS * MOST * 4;
            if (threadIdx.x % 32 == 0) {
#pragma unroll
                for (u32 k = 0; k < COUNT; ++k) {
                    ptx::shared_store_4(place + (thread_in_group() / 32 * MOST + k) * 4, __float_as_uint(values[k]));
                }
            }
            group_barrier();
#pragma unroll
            for (u32 k = 0; k < COUNT; ++k) {
                values[k] = 0.0f;
#pragma unroll
                for (u32 warp = 0; warp < GROUP_WARPS; ++warp) {
                    values[k] += __uint_as_float(ptx::shared_load_4(place + (warp * MOST + k) * 4));
                }
            }
            parity_ ^= 1;
        }
    }

  private:
    u32 memory_;
    u32 parity_ = 0;
};
static_assert(SUMS_BYTES == 2 * GROUP_WARPS * GroupSums::MOST * 4, "");

}  // namespace raymoe
