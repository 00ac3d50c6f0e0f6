// Eight elements of a row, held by one thread: in registers, in a stage, in global memory.
#pragma once

#include "raymoe/base/scaling.cuh"
#include "raymoe/base/vectors.cuh"
#include "raymoe/rows/pipe.cuh"

namespace raymoe {

template <class Type>
struct Elements {
    static constexpr u32 COUNT = Type::COUNT;
    static constexpr u32 PARTS = 8 / COUNT;
    static constexpr u32 BYTES = 8 * Type::BYTES;

    ptx::Bytes16 parts[PARTS];

    // Calls `load(offset)` for each 16 bytes.
    template <class Load>
    static __device__ __forceinline__ Elements loaded_by(Load load) {
        Elements loaded;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            loaded.parts[i] = load(i * 16);
        }
        return loaded;
    }

    // Loads give zeros if not `wanted`.
    static __device__ __forceinline__ Elements load_if(bool wanted, const u8* at) {
        return loaded_by([&](u32 offset) { return ptx::load_16_if(wanted, at + offset, {0, 0}); });
    }

    // For memory that is not read again soon.
    static __device__ __forceinline__ Elements load_once_if(bool wanted, const u8* at) {
        return loaded_by([&](u32 offset) { return ptx::load_16_once_if(wanted, at + offset, {0, 0}); });
    }

    // For a vector that all rows use.
    static __device__ __forceinline__ Elements load_constant_if(bool wanted, const u8* at) {
        return loaded_by([&](u32 offset) { return ptx::load_16_constant_if(wanted, at + offset, {0, 0}); });
    }

    static __device__ __forceinline__ Elements shared_load_if(bool wanted, u32 at) {
        return loaded_by([&](u32 offset) { return ptx::shared_load_16_if(wanted, at + offset, {0, 0}); });
    }

    static __device__ __forceinline__ Elements pack(const float (&from)[8]) {
        Elements packed;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            packed.parts[i] = Type::pack(from + i * COUNT);
        }
        return packed;
    }

    __device__ __forceinline__ void unpack(float (&into)[8]) const {
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            Type::unpack(parts[i], into + i * COUNT);
        }
    }

    // Returns the same elements, so that the compiler unpacks them at each use.
    __device__ __forceinline__ Elements unknown() const {
        Elements same;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            same.parts[i] = ptx::unknown(parts[i]);
        }
        return same;
    }

    __device__ __forceinline__ void store(u8* at) const {
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            ptx::store_16(at + i * 16, parts[i]);
        }
    }

    __device__ __forceinline__ void shared_store(u32 at) const {
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            ptx::shared_store_16(at + i * 16, parts[i]);
        }
    }
};

// Loads eight elements of row `r` of a tile, `eight` from its left edge; zeros if not `there`.
template <class Type>
__device__ __forceinline__ Elements<Type> take(const PipeRows& from, const Tile& tile, u32 r, u32 eight, bool there) {
    if constexpr (!STAGED) {
        const u8* const at = in_global(from, tile) + r * from.stride + eight * Elements<Type>::BYTES;
        return PIPE_ONCE ? Elements<Type>::load_once_if(there, at) : Elements<Type>::load_if(there, at);
    } else {
        const u32 row = tile.stage + from.offset + r * tile.eights * Elements<Type>::BYTES;
        return Elements<Type>::shared_load_if(there, row + eight * Elements<Type>::BYTES);
    }
}

// Stores eight elements: into the stage, where `take` loads from, or, without stages, into `out`.
template <class Type>
__device__ __forceinline__ void put(const Elements<Type>& elements, const PipeRows& out, const Tile& tile, u32 r,
                                    u32 eight) {
    if constexpr (!STAGED) {
        elements.store(in_global(out, tile) + r * out.stride + eight * Elements<Type>::BYTES);
    } else {
        elements.shared_store(tile.stage + out.offset + (r * tile.eights + eight) * Elements<Type>::BYTES);
    }
}

// Rows as 8-bit floats, with a scale for each 128 elements. The strides of the scales make them lie by rows or by
// columns.
struct PipeFp8 {
    u8* values;
    u64 stride;  // bytes
    u8* scales;
    u64 scale_row;    // bytes from a row's scale to the next row's
    u64 scale_block;  // bytes from a block's scale to the next block's
};

// The largest magnitude of eight values, as the bits of a float. NaN does not count, nor an infinity if `finite`.
__device__ __forceinline__ u32 reach_of(const float (&values)[8], bool finite) {
    float largest = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        const float size = fabsf(values[j]);
        largest = fmaxf(largest, finite && __float_as_uint(size) == INFINITE ? 0.0f : size);
    }
    return __float_as_uint(largest);
}

// Replaces the reaches of a thread's vectors by those of their blocks, each of which half a warp holds.
template <u32 COUNT>
__device__ __forceinline__ void join_reaches(u32 (&reaches)[COUNT]) {
#pragma unroll
    for (u32 bit = 8; bit != 0; bit /= 2) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            reaches[i] = max(reaches[i], __shfl_xor_sync(0xFFFFFFFF, reaches[i], bit));
        }
    }
}

// Results that are used twice. Registers hold them if they suffice; else they are computed again.
template <u32 COUNT, class Value>
class Twice {
  public:
    __device__ __forceinline__ explicit Twice(Value value) : value_(value) {
        if constexpr (HELD) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                value(i, held_[i]);
            }
        }
    }

    __device__ __forceinline__ void get(u32 i, float (&into)[8]) const {
        if constexpr (HELD) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                into[j] = held_[i][j];
            }
        } else {
            value_(i, into);
        }
    }

  private:
    static constexpr bool HELD = COUNT <= 6;

    Value value_;
    float held_[HELD ? COUNT : 1][8];
};

// Quantises and stores COUNT times eight elements of row `row`. Elements number i are eight `first + i * step`, if that
// is less than `width`. All threads of a warp call this, with `first` one more from thread to thread; half a warp has a
// block. `value(i, into)` computes the elements.
template <u32 COUNT, class Value>
__device__ __forceinline__ void quantise_row(const PipeFp8& out, u64 row, u32 first, u32 step, u32 width, Value value) {
    static_assert(COUNT <= 16, "each of 16 threads computes the scale of one block");
    const Twice<COUNT, Value> results(value);
    const auto join = [&](u32(&reaches)[COUNT], bool finite) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            float values[8];
            results.get(i, values);
            reaches[i] = first + i * step < width ? reach_of(values, finite) : 0;
        }
        join_reaches(reaches);
    };
    u32 reaches[COUNT];
    join(reaches, false);
    const u32 half = threadIdx.x % 32 / 16 * 16, block = threadIdx.x % 16;
    u32 reach = 0;
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        reach = block == i ? reaches[i] : reach;
    }
    if (__any_sync(0xFFFFFFFF, reach == INFINITE)) {  // seldom, so it may cost a second pass
        join(reaches, true);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            reach = block == i ? reaches[i] : reach;
        }
    }
    const Scaling scaling(__uint_as_float(reach));  // of this half warp's block number `block`
    const u32 begins = first - block + block * step;
    if (block < COUNT && begins < width) {
        ptx::store_4(out.scales + row * out.scale_row + begins / 16 * out.scale_block, __float_as_uint(scaling.scale));
    }
    u8* const into = out.values + row * out.stride;
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        const float factor = __shfl_sync(0xFFFFFFFF, scaling.factor, half + i);
        float values[8];
        results.get(i, values);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            values[j] *= factor;
        }
        const u32 low = ptx::to_e4m3x4(values), high = ptx::to_e4m3x4(values + 4);
        if (first + i * step < width) {
            ptx::store_8(into + (first + i * step) * 8ull, static_cast<u64>(high) << 32 | low);
        }
    }
}

}  // namespace raymoe
