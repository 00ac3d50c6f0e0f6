// Converts 16 bytes of a row to floats and back, and four elements to a row in shared memory.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct Bf16 {
    static constexpr u32 COUNT = 8;
    static constexpr u32 BYTES = 2;
    static constexpr u64 NANS = 0x7FC07FC07FC07FC0;

    static __device__ __forceinline__ void unpack(const ptx::Bytes16& from, float* into) {
        const u32 words[4] = {static_cast<u32>(from.low), static_cast<u32>(from.low >> 32),
                              static_cast<u32>(from.high), static_cast<u32>(from.high >> 32)};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {  // a bfloat16 is the upper half of a float
            into[2 * i] = __uint_as_float(words[i] << 16);
            into[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
        }
    }

    static __device__ __forceinline__ ptx::Bytes16 pack(const float* from) {
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            words[i] = ptx::to_bf16x2(from[2 * i], from[2 * i + 1]);
        }
        return {static_cast<u64>(words[1]) << 32 | words[0], static_cast<u64>(words[3]) << 32 | words[2]};
    }

    // Of each pair of elements of two words, the one further from zero, with either sign.
    static __device__ __forceinline__ u32 further(u32 a, u32 b) { return ptx::further_bf16x2(a, b); }

    // The largest magnitude of the word's elements.
    static __device__ __forceinline__ float reach(u32 word) {
        return fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word & 0xFFFF0000)));
    }

    // A number that orders words by their largest finite magnitude. It is below LEAST_ORDER if no element is finite.
    // The sign is shifted out, and the sum overflows if all bits of the exponent are set.
    static constexpr u32 LEAST_ORDER = 1u << 24;
    static __device__ __forceinline__ u32 order(u32 word) {
        return max((word << 17) + LEAST_ORDER, (word << 1) + LEAST_ORDER);
    }

    // The magnitude that such a number stands for. The bits of the other element are below it.
    static __device__ __forceinline__ float magnitude(u32 order) {
        return order < LEAST_ORDER ? 0.0f : __uint_as_float((order - LEAST_ORDER) >> 1 & 0xFFFF0000);
    }
};

struct F16 {
    static constexpr u32 COUNT = 8;
    static constexpr u32 BYTES = 2;
    static constexpr u64 NANS = 0x7E007E007E007E00;

    static __device__ __forceinline__ void unpack(const ptx::Bytes16& from, float* into) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u64 word = i < 4 ? from.low : from.high;
            into[i] = ptx::from_f16(static_cast<u32>(word >> (i % 4 * 16)) & 0xFFFF);
        }
    }

    static __device__ __forceinline__ ptx::Bytes16 pack(const float* from) {
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            words[i] = ptx::to_f16x2(from[2 * i], from[2 * i + 1]);
        }
        return {static_cast<u64>(words[1]) << 32 | words[0], static_cast<u64>(words[3]) << 32 | words[2]};
    }

    static __device__ __forceinline__ u32 further(u32 a, u32 b) { return ptx::further_f16x2(a, b); }

    static __device__ __forceinline__ float reach(u32 word) {
        return fmaxf(fabsf(ptx::from_f16(word & 0xFFFF)), fabsf(ptx::from_f16(word >> 16)));
    }

    static constexpr u32 LEAST_ORDER = 1u << 27;
    static __device__ __forceinline__ u32 order(u32 word) {
        return max((word << 17) + LEAST_ORDER, (word << 1) + LEAST_ORDER);
    }

    static __device__ __forceinline__ float magnitude(u32 order) {
        return order < LEAST_ORDER ? 0.0f : ptx::from_f16((order - LEAST_ORDER) >> 17);
    }
};

struct F32 {
    static constexpr u32 COUNT = 4;
    static constexpr u32 BYTES = 4;
    static constexpr u64 NANS = 0x7FC000007FC00000;

    static __device__ __forceinline__ void unpack(const ptx::Bytes16& from, float* into) {
        into[0] = __uint_as_float(static_cast<u32>(from.low));
        into[1] = __uint_as_float(static_cast<u32>(from.low >> 32));
        into[2] = __uint_as_float(static_cast<u32>(from.high));
        into[3] = __uint_as_float(static_cast<u32>(from.high >> 32));
    }

    static __device__ __forceinline__ ptx::Bytes16 pack(const float* from) {
        return {static_cast<u64>(__float_as_uint(from[1])) << 32 | __float_as_uint(from[0]),
                static_cast<u64>(__float_as_uint(from[3])) << 32 | __float_as_uint(from[2])};
    }

    static __device__ __forceinline__ u32 further(u32 a, u32 b) {
        return __float_as_uint(fmaxf(reach(a), reach(b)));
    }

    static __device__ __forceinline__ float reach(u32 word) { return fabsf(__uint_as_float(word)); }

    static constexpr u32 LEAST_ORDER = 1u << 24;
    static __device__ __forceinline__ u32 order(u32 word) { return (word << 1) + LEAST_ORDER; }

    static __device__ __forceinline__ float magnitude(u32 order) {
        return order < LEAST_ORDER ? 0.0f : __uint_as_float((order - LEAST_ORDER) >> 1);
    }
};

// The elements of 16 bytes of a row of Type, in the format of a row of Wire: 8, 16 or 32 bytes.
template <class Type, class Wire>
struct Crossing {
    static constexpr u32 COUNT = Type::COUNT;
    static constexpr u32 BYTES = COUNT * Wire::BYTES;
    static constexpr u32 PARTS = (BYTES + 15) / 16;

    ptx::Bytes16 parts[PARTS];

    static __device__ __forceinline__ Crossing load(const u8* at) {
        Crossing loaded;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            if constexpr (BYTES == 8) {
                loaded.parts[i] = {ptx::load_8(at), 0};
            } else {
                loaded.parts[i] = ptx::load_16(at + i * 16);
            }
        }
        return loaded;
    }

    static __device__ __forceinline__ Crossing shared_load(u32 at) {
        Crossing loaded;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            if constexpr (BYTES == 8) {
                loaded.parts[i] = {ptx::shared_load_8(at), 0};
            } else {
                loaded.parts[i] = ptx::shared_load_16(at + i * 16);
            }
        }
        return loaded;
    }

    static __device__ __forceinline__ Crossing pack(const float* from) {
        Crossing packed;
        if constexpr (Wire::COUNT > COUNT) {
            float padded[Wire::COUNT] = {};
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j) {
                padded[j] = from[j];
            }
            packed.parts[0] = Wire::pack(padded);
        } else {
#pragma unroll
            for (u32 i = 0; i < PARTS; ++i) {
                packed.parts[i] = Wire::pack(from + i * Wire::COUNT);
            }
        }
        return packed;
    }

    __device__ __forceinline__ void unpack(float* into) const {
        if constexpr (Wire::COUNT > COUNT) {
            float padded[Wire::COUNT];
            Wire::unpack(parts[0], padded);
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j) {
                into[j] = padded[j];
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < PARTS; ++i) {
                Wire::unpack(parts[i], into + i * Wire::COUNT);
            }
        }
    }

    __device__ __forceinline__ void store(u8* at) const {
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            if constexpr (BYTES == 8) {
                ptx::store_8(at, parts[i].low);
            } else {
                ptx::store_16(at + i * 16, parts[i]);
            }
        }
    }

    __device__ __forceinline__ void shared_store(u32 at) const {
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            if constexpr (BYTES == 8) {
                ptx::shared_store_8(at, parts[i].low);
            } else {
                ptx::shared_store_16(at + i * 16, parts[i]);
            }
        }
    }
};

// Stores elements 4 * i to 4 * i + 3 of a row in shared memory.
template <class Type>
__device__ __forceinline__ void store_four(u32 row, u32 i, const float* from) {
    if constexpr (Type::BYTES == 4) {
        ptx::shared_store_16(row + i * 16, Type::pack(from));
    } else {
        const float eight[8] = {from[0], from[1], from[2], from[3], 0, 0, 0, 0};
        ptx::shared_store_8(row + i * 8, Type::pack(eight).low);
    }
}

}  // namespace raymoe
