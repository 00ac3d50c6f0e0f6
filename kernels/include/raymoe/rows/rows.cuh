// Whole rows in the registers of a group of warps: each thread holds VECTORS times eight elements. So a row is read
// from its stage once, and used twice: for its sums, and for its results.
//
// Eight number e of a row belongs to thread e % GROUP_THREADS of the group. So half a warp holds 128 neighbouring
// elements, a block of 8-bit floats. The 16-byte accesses of a warp to a stage meet no bank twice.
#pragma once

#include "raymoe/rows/elements.cuh"
#include "raymoe/rows/sums.cuh"

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
constexpr u32 VECTORS = (ROW_EIGHTS + GROUP_THREADS - 1) / GROUP_THREADS;  // vectors of a thread
constexpr float ONE_OVER_HIDDEN = 1.0f / HIDDEN;

__device__ __forceinline__ u32 eight_of(u32 i) { return i * GROUP_THREADS + thread_in_group(); }
__device__ __forceinline__ bool is_there(u32 i) {
    constexpr bool ALWAYS = LOADING == Loading::ROW && ROW_EIGHTS % GROUP_THREADS == 0;
    return ALWAYS || eight_of(i) < ROW_EIGHTS;
}

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
            part.eights[i] = Elements<Type>::load_constant_if(is_there(i), vector + at);
        }
        return part;
    }

    // Unpacks elements that have been unpacked before. For a long row, the compiler must not hold the numbers of the
    // first time, which need twice as many registers.
    __device__ __forceinline__ void again(u32 i, float (&into)[8]) const {
        if constexpr (VECTORS > 6 && Type::BYTES < 4) {
            eights[i].unknown().unpack(into);
        } else {
            eights[i].unpack(into);
        }
    }
};

// A vector that multiplies every row, such as a weight. Registers hold it if it fits beside a row; else it is loaded
// for each row, from the L1 cache.
template <class Type, bool MAY_HOLD = true>
class Vector {
  public:
    __device__ __forceinline__ explicit Vector(const u8* at) : at_(at) {
        if constexpr (HELD) {
            part_ = Part<Type>::of_vector(at);
        }
    }

    __device__ __forceinline__ void unpack(u32 i, float (&into)[8]) const {
        if constexpr (HELD) {
            part_.eights[i].unknown().unpack(into);
        } else {
            const u8* const at = at_ + static_cast<u64>(eight_of(i)) * Elements<Type>::BYTES;
            if constexpr (VECTORS <= 7) {
                Elements<Type>::load_constant_if(is_there(i), at).unpack(into);
            } else {  // for a longer row, loads that the compiler moves forward would take too many registers
                Elements<Type>::load_if(is_there(i), at).unpack(into);
            }
        }
    }

  private:
    static constexpr bool HELD = MAY_HOLD && sizeof(Part<Type>) <= 96;

    const u8* at_;
    Part<Type> part_;
};

// The number of elements of a row that a warp of the group holds: those of its VECTORS times 32 eights before the end.
__device__ __forceinline__ constexpr u32 elements_of(u32 warp) {
    u32 eights = 0;
    for (u32 i = 0; i < VECTORS; ++i) {
        const u32 begin = i * GROUP_THREADS + warp * 32;
        eights += begin >= ROW_EIGHTS ? 0 : ROW_EIGHTS - begin < 32 ? ROW_EIGHTS - begin : 32;
    }
    return eights * 8;
}

// The mean of a row, and sums that need it, with one barrier. At first a warp takes its own mean, and corrects its sums
// when it has the means of the others. No sum is the difference of two large ones. With d = the warp's mean - mean:
//   sum of (x - mean)^2 = sum of (x - the warp's mean)^2 + elements * d^2
//   sum of g * (x - mean) = sum of g * (x - the warp's mean) + d * sum of g
struct Moments {
    float mean;
    float squares;  // the sum of (x - mean)^2
    float along;    // the sum of g * (x - mean)
    float of_g;     // the sum of g

    // `sum` is that of this thread's elements. `add(mean, parts)` adds this thread's (x - mean)^2, and, if COUNT is 3,
    // g * (x - mean) and g. All threads of the group call this.
    template <u32 COUNT, class Add>
    static __device__ __forceinline__ Moments of(GroupSums& sums, float sum, Add add) {
        float own[1] = {sum}, parts[COUNT] = {};
        add_in_warp(own);
        add(own[0] * one_over(elements_of(thread_in_group() / 32)), parts);
        add_in_warp(parts);
        float values[COUNT + 1] = {own[0]}, of_warps[GROUP_WARPS][COUNT + 1];
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
            values[k + 1] = parts[k];
        }
        sums.gather(values, of_warps);
        Moments row = {};
#pragma unroll
        for (u32 warp = 0; warp < GROUP_WARPS; ++warp) {
            row.mean += of_warps[warp][0];
        }
        // The quotient is rounded once, so the mean of equal 16-bit elements is exact, and their results are the bias.
        const float near = row.mean * ONE_OVER_HIDDEN;
        row.mean = fmaf(fmaf(-near, HIDDEN, row.mean), ONE_OVER_HIDDEN, near);
#pragma unroll
        for (u32 warp = 0; warp < GROUP_WARPS; ++warp) {
            const float count = elements_of(warp);
            const float distance = of_warps[warp][0] * one_over(elements_of(warp)) - row.mean;
            row.squares += of_warps[warp][1] + count * distance * distance;
            if constexpr (COUNT == 3) {
                row.along += of_warps[warp][2] + distance * of_warps[warp][3];
                row.of_g += of_warps[warp][3];
            }
        }
        return row;
    }

  private:
    static __device__ __forceinline__ float one_over(u32 elements) { return elements == 0 ? 0.0f : 1.0f / elements; }
};

}  // namespace raymoe
