// How dispatch_few.cu sends rows that cross as 8-bit floats: quantised on the way, unless they are already.
#pragma once

#include "raymoe/few_quantised.cuh"
#include "raymoe/quantising.cuh"

namespace raymoe {

// Four elements in the registers of a thread; quantised already, or of this type.
template <class Type, u32 BYTES = Type::BYTES>
struct Four {
    u64 words = 0;

    __device__ __forceinline__ void load(const u8* at) { words = ptx::load_8(at); }

    __device__ __forceinline__ void load_quantised(const u8* at) { words = ptx::load_4(at); }

    __device__ __forceinline__ void put(u32 shared) const { ptx::shared_store_8(shared, words); }

    __device__ __forceinline__ void get(u32 shared) { words = ptx::shared_load_8(shared); }

    __device__ __forceinline__ u32 quantised() const { return static_cast<u32>(words); }

    __device__ __forceinline__ void unpack(float* into) const {
        float eight[8];
        Type::unpack({words, 0}, eight);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            into[i] = eight[i];
        }
    }
};

template <class Type>
struct Four<Type, 4> {
    ptx::Bytes16 words{0, 0};

    __device__ __forceinline__ void load(const u8* at) { words = ptx::load_16(at); }

    __device__ __forceinline__ void load_quantised(const u8* at) { words.low = ptx::load_4(at); }

    __device__ __forceinline__ void put(u32 shared) const { ptx::shared_store_16(shared, words); }

    __device__ __forceinline__ void get(u32 shared) { words = ptx::shared_load_16(shared); }

    __device__ __forceinline__ u32 quantised() const { return static_cast<u32>(words.low); }

    __device__ __forceinline__ void unpack(float* into) const { Type::unpack(words, into); }
};

// The largest of a warp's floats as fmaxf would have it, which none of them is below zero: one that is no number is
// less than all that are.
__device__ __forceinline__ float largest_of_warp(float value) {
    const int bits = value == value ? static_cast<int>(__float_as_uint(value)) : -1;
    return __uint_as_float(static_cast<u32>(__reduce_max_sync(0xFFFFFFFF, bits)));
}

template <class Type>
class QuantisedLeaving {
  public:
    // Whether there are registers for a unit that waits for the epoch.
    static constexpr bool EARLY = Type::BYTES < 4;

    __device__ QuantisedLeaving(const DispatchParams& p, u8* stages, u32) : p_(p), units_(p, stages) {}

    __device__ __forceinline__ u32 units() const { return units_.count(); }

    __device__ __forceinline__ void begin(u32 token, u32 unit) {
        const u32 lane = threadIdx.x % 32, first = unit * UNIT_BLOCKS * BLOCK + lane * 4;
        const u32 bytes = p_.x_scales == nullptr ? Type::BYTES : 1;  // of an element
        const u8* at = p_.x + static_cast<u64>(token) * p_.x_bytes() + static_cast<u64>(first) * bytes;
#pragma unroll
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            four_[i] = {};
            if (first + i * BLOCK < p_.hidden) {
                if (p_.x_scales == nullptr) {
                    four_[i].load(at + i * BLOCK * Type::BYTES);
                } else {
                    four_[i].load_quantised(at + i * BLOCK);
                }
            }
        }
        if (p_.x_scales != nullptr && lane < units_.blocks(unit)) {
            const u64 block = static_cast<u64>(token) * p_.blocks() + unit * UNIT_BLOCKS + lane;
            scale_ = __uint_as_float(ptx::load_4(p_.x_scales + block * 4));
        }
    }

    __device__ __forceinline__ void send(u64 epoch, u32 token, u32 unit, u32 mask) {
        const u32 lane = threadIdx.x % 32, blocks = units_.blocks(unit), bytes = units_.bytes(unit);
#pragma unroll
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            four_[i].put(own(i));
        }
        const float factor = p_.x_scales == nullptr ? find_scales() : 1.0f;
#pragma unroll 3
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            const u32 four = quantised(i, factor);
            if (i < blocks) {
                ptx::shared_store_4(units_.stage + i * BLOCK_WORDS * 8 + lane * 4, four);
            }
        }
        if (lane < blocks) {
            ptx::shared_store_8(units_.scale_at(lane), __float_as_uint(scale_));
        }
        __syncwarp();  // hands the words to the threads that send them
        const Part part(0, bytes);
        ptx::Bytes16 value[UNIT_GROUPS];
#pragma unroll
        for (u32 i = 0; i < UNIT_GROUPS; ++i) {
            const u32 at = units_.stage + part.first * 8 + i * GROUP_WORDS * 8;
            value[i].low = part.has_low(i) ? ptx::shared_load_8(at) : 0;
            value[i].high = part.has_high(i) ? ptx::shared_load_8(at + 8) : 0;
        }
        for_each_rank(p_.peers, mask, [&](u32 peer) {
            u8* lines = units_.lines(peer, epoch, p_.peers.rank, token, unit);
#pragma unroll
            for (u32 i = 0; i < UNIT_GROUPS; ++i) {
                part.send(lines, i, value[i], epoch);
            }
        });
        __syncwarp();  // the next unit's words come where these were
    }

  private:
    // Shared memory of this thread alone, for four elements of block i. They go there so that loops over blocks need
    // not be unrolled: where instructions are in no cache, their number is what such a loop takes.
    __device__ __forceinline__ u32 own(u32 i) const {
        return units_.stage + WORDS_BYTES + (i * 32 + threadIdx.x % 32) * static_cast<u32>(sizeof(Four<Type>));
    }

    __device__ __forceinline__ Four<Type> its_four(u32 i) const {
        Four<Type> four;
        four.get(own(i));
        return four;
    }

    // Thread i finds the scale of block i, so that a warp divides twice, not twice for each block. What the elements
    // are to be multiplied by is given.
    __device__ __forceinline__ float find_scales() {
        float mine = 0;
#pragma unroll 3
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            float values[4];
            its_four(i).unpack(values);
            const float largest = largest_of_warp(
                fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3]))));
            mine = threadIdx.x % 32 == i ? largest : mine;
        }
        scale_ = mine == 0.0f ? 1.0f : mine / LARGEST_E4M3;
        return mine == 0.0f ? 1.0f : LARGEST_E4M3 / mine;
    }

    // Block i, whose factor thread i has where it is not quantised yet.
    __device__ __forceinline__ u32 quantised(u32 i, float factor) const {
        const float its_factor = __shfl_sync(0xFFFFFFFF, factor, i);
        const Four<Type> four = its_four(i);
        if (p_.x_scales != nullptr) {
            return four.quantised();
        }
        float values[4];
        four.unpack(values);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            values[j] *= its_factor;
        }
        return ptx::to_e4m3x4(values);
    }

    const DispatchParams& p_;
    QuantisedUnits units_;
    Four<Type> four_[UNIT_BLOCKS];
    float scale_ = 1.0f;  // of block i of the unit, in thread i
};

}  // namespace raymoe
