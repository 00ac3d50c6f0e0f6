// Converts rows to 8-bit floats, and back. base/scaling.cuh computes the scale of each BLOCK. A slot holds the elements
// of a row, then its scales.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/base/scaling.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

static_assert(BLOCK == SCALED_ELEMENTS, "");

// Eight elements of a row, loaded from shared memory by one thread. Half a warp has a BLOCK.
template <class Type>
struct Eight {
    static constexpr u32 COUNT = Type::COUNT;
    static constexpr u32 PARTS = 8 / COUNT;

    ptx::Bytes16 parts[PARTS];

    // Loads from element `first` on. After the row's end it repeats the last elements, which belong to the same block.
    __device__ __forceinline__ void load(u32 row, u32 first, u32 hidden) {
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            const u32 at = first + i * COUNT, last = hidden - COUNT;
            parts[i] = ptx::shared_load_16(row + (at < last ? at : last) * Type::BYTES);
        }
    }

    // A word with the element furthest from zero.
    __device__ __forceinline__ u32 furthest() const {
        u32 found[PARTS];
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            const u64 low = parts[i].low, high = parts[i].high;
            found[i] = Type::further(Type::further(static_cast<u32>(low), static_cast<u32>(low >> 32)),
                                     Type::further(static_cast<u32>(high), static_cast<u32>(high >> 32)));
        }
        return PARTS == 1 ? found[0] : Type::further(found[0], found[PARTS - 1]);
    }

    // `Type::order` of all eight elements.
    __device__ __forceinline__ u32 order() const {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            const u64 low = parts[i].low, high = parts[i].high;
            const u32 first = max(Type::order(static_cast<u32>(low)), Type::order(static_cast<u32>(low >> 32)));
            const u32 second = max(Type::order(static_cast<u32>(high)), Type::order(static_cast<u32>(high >> 32)));
            largest = max(largest, max(first, second));
        }
        return largest;
    }

    // Stores the elements times `factor` as 8-bit floats in shared memory at `into`.
    __device__ __forceinline__ void quantise(float factor, u32 into, u32 first, u32 hidden) const {
        float values[8];
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            Type::unpack(parts[i], values + i * COUNT);
        }
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            values[i] *= factor;
        }
        const u32 low = ptx::to_e4m3x4(values), high = ptx::to_e4m3x4(values + 4);
        if (COUNT == 8) {
            if (first < hidden) {
                ptx::shared_store_8(into + first, static_cast<u64>(high) << 32 | low);
            }
            return;
        }
        if (first < hidden) {
            ptx::shared_store_4(into + first, low);
        }
        if (first + 4 < hidden) {
            ptx::shared_store_4(into + first + 4, high);
        }
    }
};

// Finds the reach of 32 blocks. All threads of the warp call this. In each half warp, `furthest[b]` holds the thread's
// furthest element (or pair) of block b of that half. Thread i of a half gets the largest magnitude of its block i.
// Each step halves the blocks that a thread still has, so 15 values are exchanged and not 4 for each block.
template <class Type>
__device__ __forceinline__ float reach_of_blocks(u32 (&furthest)[16]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 step = 8 >> i;
        const bool upper = threadIdx.x & step;
        u32 others[8];
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            if (j < step) {
                others[j] = upper ? furthest[j] : furthest[j + step];
                furthest[j] = upper ? furthest[j + step] : furthest[j];
            }
        }
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            if (j < step) {
                others[j] = __shfl_xor_sync(0xFFFFFFFF, others[j], step);
            }
        }
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            if (j < step) {
                furthest[j] = Type::further(furthest[j], others[j]);
            }
        }
    }
    return fmaxf(Type::reach(furthest[0]), 0.0f);
}

// The same for 32 blocks without their infinite elements. Few blocks have some, so this code is small and slow.
template <class Type>
__device__ __forceinline__ float finite_reach_of_blocks(u32 row, u32 begin, u32 hidden) {
    const u32 lane = threadIdx.x % 32;
    u32 mine = 0;
#pragma unroll 1
    for (u32 i = 0; i < 16; ++i) {
        Eight<Type> eight;
        eight.load(row, begin + (i * 32 + lane) * 8, hidden);
        u32 largest = eight.order();
#pragma unroll 1
        for (u32 step = 8; step != 0; step /= 2) {
            largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        }
        mine = lane % 16 == i ? largest : mine;
    }
    return Type::magnitude(mine);
}

// Quantises the row in shared memory at `row` into elements and scales at `into`. All threads of the warp call this.
// `hidden` is a multiple of 4, and of 8 unless elements have four bytes.
//
// It works on 32 blocks at a time, and each thread computes one scale. Loads stand together before the work on any of
// them. An earlier version divided once for each block in all threads of its half warp, and took elements one after the
// other. The first row of 7168 bfloat16 then took a sender 6.2 us instead of 3.4 (cold L2 cache, H200, 2026-11-22).
template <class Type>
__device__ __forceinline__ void quantise(u32 row, u32 into, u32 hidden, u32 blocks) {
    constexpr u32 EIGHTS = 16, TOGETHER = 64 / sizeof(Eight<Type>);
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 begin = 0; begin < hidden; begin += EIGHTS * 32 * 8) {
        u32 furthest[EIGHTS];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i += EIGHTS / 2) {
            Eight<Type> eights[EIGHTS / 2];
#pragma unroll
            for (u32 j = 0; j < EIGHTS / 2; ++j) {
                eights[j].load(row, begin + ((i + j) * 32 + lane) * 8, hidden);
            }
#pragma unroll
            for (u32 j = 0; j < EIGHTS / 2; ++j) {
                furthest[i + j] = eights[j].furthest();
            }
        }
        float reach = reach_of_blocks<Type>(furthest);
        if (__any_sync(0xFFFFFFFF, __float_as_uint(reach) == INFINITE)) {
            reach = finite_reach_of_blocks<Type>(row, begin, hidden);
        }
        const Scaling scaling(reach);
        const u32 block = begin / BLOCK + lane % 16 * 2 + lane / 16;
        if (block < blocks) {
            ptx::shared_store_4(into + hidden + block * 4, __float_as_uint(scaling.scale));
        }
#pragma unroll 1
        for (u32 i = 0; i < EIGHTS && begin + i * 32 * 8 < hidden; i += TOGETHER) {
            Eight<Type> eights[TOGETHER];
            float factors[TOGETHER];
#pragma unroll
            for (u32 j = 0; j < TOGETHER; ++j) {
                eights[j].load(row, begin + ((i + j) * 32 + lane) * 8, hidden);
            }
#pragma unroll
            for (u32 j = 0; j < TOGETHER; ++j) {
                factors[j] = __shfl_sync(0xFFFFFFFF, scaling.factor, lane / 16 * 16 + i + j);
            }
#pragma unroll
            for (u32 j = 0; j < TOGETHER; ++j) {
                eights[j].quantise(factors[j], into, begin + ((i + j) * 32 + lane) * 8, hidden);
            }
        }
    }
}

// Copies a row that is already quantised, in shared memory at `row`, and its scales to `into`. All threads of the warp
// call this.
__device__ __forceinline__ void take_quantised(const DispatchCall& p, u32 token, u32 row, u32 into) {
    for (u32 at = threadIdx.x % 32 * 16; at < p.hidden; at += 32 * 16) {
        ptx::shared_store_16(into + at, ptx::shared_load_16(row + at));
    }
    const u8* scales = p.x_scales + static_cast<u64>(token) * p.blocks() * 4;
    for (u32 block = threadIdx.x % 32; block < p.blocks(); block += 32) {
        ptx::shared_store_4(into + p.hidden + block * 4, ptx::load_4(scales + block * 4));
    }
}

// Converts elements and scales at `slot` into a row of `Type`. All threads of the warp call this.
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
