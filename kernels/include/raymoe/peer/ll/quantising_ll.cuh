// Sends rows that cross as 8-bit floats, for dispatch_ll.cu. It quantises them on the way, unless x is quantised
// already.
#pragma once

#include "raymoe/peer/ll/quantised_rows_ll.cuh"
#include "raymoe/peer/dispatch/quantising.cuh"

namespace raymoe {

// Four elements in the registers of a thread, of this type or already quantised.
template <class Type, u32 BYTES = Type::BYTES>
struct Four {
    u64 words = 0;

    // Loads four elements; zeros if not wanted.
    __device__ __forceinline__ void load(bool wanted, const u8* at) { words = ptx::load_8_if(wanted, at, 0); }

    __device__ __forceinline__ void load_quantised(bool wanted, const u8* at) {
        words = ptx::load_4_if(wanted, at, 0);
    }

    __device__ __forceinline__ u32 quantised() const { return static_cast<u32>(words); }

    // `Type::order` of all four elements.
    __device__ __forceinline__ u32 order() const {
        return max(Type::order(static_cast<u32>(words)), Type::order(static_cast<u32>(words >> 32)));
    }

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

    __device__ __forceinline__ void load(bool wanted, const u8* at) { words = ptx::load_16_if(wanted, at, {0, 0}); }

    __device__ __forceinline__ void load_quantised(bool wanted, const u8* at) {
        words.low = ptx::load_4_if(wanted, at, 0);
    }

    __device__ __forceinline__ u32 quantised() const { return static_cast<u32>(words.low); }

    __device__ __forceinline__ u32 order() const {
        return max(max(Type::order(static_cast<u32>(words.low)), Type::order(static_cast<u32>(words.low >> 32))),
                   max(Type::order(static_cast<u32>(words.high)), Type::order(static_cast<u32>(words.high >> 32))));
    }

    __device__ __forceinline__ void unpack(float* into) const { Type::unpack(words, into); }
};

template <class Type>
class QuantisedLeaving {
  public:
    // Whether there are registers for a unit that is loaded before the epoch is known.
    static constexpr bool EARLY = Type::BYTES < 4;

    __device__ QuantisedLeaving(const DispatchLlParams& p, u8* stages) : p_(p), units_(p, stages) {}

    __device__ __forceinline__ void begin(u32 token, u32 unit) {
        const u32 lane = threadIdx.x % 32, first = unit * UNIT_BLOCKS * BLOCK + lane * 4;
        const u8* row = p_.x + static_cast<u64>(token) * p_.x_bytes();
        if (p_.x_scales == nullptr) {
#pragma unroll
            for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
                const u32 at = first + i * BLOCK;
                four_[i].load(at < p_.hidden, row + at * static_cast<u64>(Type::BYTES));
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            four_[i].load_quantised(first + i * BLOCK < p_.hidden, row + first + i * BLOCK);
        }
        const u64 block = static_cast<u64>(token) * p_.blocks() + unit * UNIT_BLOCKS + lane;
        scale_ = __uint_as_float(ptx::load_4_if(lane < units_.blocks(unit), p_.x_scales + block * 4, 0));
    }

    __device__ __forceinline__ void send(u64 epoch, const Unit& unit, u32 mask) {
        const u32 lane = threadIdx.x % 32, blocks = units_.blocks(unit.number), bytes = units_.bytes(unit.number);
        if (p_.x_scales == nullptr) {
            quantise();
        } else {
#pragma unroll
            for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
                put(i, four_[i].quantised());
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
            u8* lines = units_.lines(peer, epoch, p_.peers.rank, unit.token, unit.number);
#pragma unroll
            for (u32 i = 0; i < UNIT_GROUPS; ++i) {
                part.send(lines, i, value[i], epoch);
            }
        });
        __syncwarp();  // the next unit's words overwrite these
    }

  private:
    // Stores four quantised elements of a block in the stage. No thread reads elements that the unit does not have.
    __device__ __forceinline__ void put(u32 block, u32 four) const {
        ptx::shared_store_4(units_.stage + block * BLOCK_WORDS * 8 + threadIdx.x % 32 * 4, four);
    }

    // Thread i computes the scale of block i, so that a warp divides twice, not twice for each block.
    __device__ __forceinline__ void quantise() {
        u32 mine = 0;
#pragma unroll
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            const u32 largest = __reduce_max_sync(0xFFFFFFFF, four_[i].order());
            mine = threadIdx.x % 32 == i ? largest : mine;
        }
        const Scaling scaling(Type::magnitude(mine));
        scale_ = scaling.scale;
#pragma unroll
        for (u32 i = 0; i < UNIT_BLOCKS; ++i) {
            const float its_factor = __shfl_sync(0xFFFFFFFF, scaling.factor, i);
            float values[4];
            four_[i].unpack(values);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                values[j] *= its_factor;
            }
            put(i, ptx::to_e4m3x4(values));
        }
    }

    const DispatchLlParams& p_;
    QuantisedUnits units_;
    Four<Type> four_[UNIT_BLOCKS];
    float scale_ = 1.0f;  // of block i of the unit, in thread i
};

}  // namespace raymoe
