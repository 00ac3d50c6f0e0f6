// Carries and places rows that cross as 8-bit floats, for dispatch_ll.cu. quantising_ll.cuh sends them.
//
// In lines a block of 128 elements is 17 words: 16 of elements, one of the scale. Fifteen blocks are 255 words, which
// fill 17 lines. That is a unit, so that no line has two writers. Rows of this rank itself go through lines too, so
// that one piece of code makes all rows.
#pragma once

#include "raymoe/peer/ll/rows_ll.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

constexpr u32 UNIT_BLOCKS = 15;
constexpr u32 BLOCK_WORDS = 17;
constexpr u32 UNIT_LINES = UNIT_BLOCKS * BLOCK_WORDS / LINE_WORDS;
constexpr u32 UNIT_GROUPS = (UNIT_LINES + GROUP - 1) / GROUP;
constexpr u32 STAGE_BYTES = 2048;  // of a warp, for the words of a unit

// The layout of a row's units, for sender warps and placement warps.
struct QuantisedUnits {
    const DispatchLlParams& p;
    u32 stage;  // shared memory of this warp

    __device__ __forceinline__ QuantisedUnits(const DispatchLlParams& p, u8* stages)
        : p(p), stage(ptx::shared_address(stages) + threadIdx.x / 32 * STAGE_BYTES) {}

    __device__ __forceinline__ u32 blocks(u32 unit) const {
        const u32 left = p.blocks() - unit * UNIT_BLOCKS;
        return left < UNIT_BLOCKS ? left : UNIT_BLOCKS;
    }

    // The bytes of a unit, which is a row of lines of its own.
    __device__ __forceinline__ u32 bytes(u32 unit) const { return blocks(unit) * BLOCK_WORDS * 8; }

    // The address of an element of the unit in the stage.
    __device__ __forceinline__ u32 at(u32 element) const {
        return stage + element / BLOCK * BLOCK_WORDS * 8 + element % BLOCK;
    }

    __device__ __forceinline__ u32 scale_at(u32 block) const { return stage + block * BLOCK_WORDS * 8 + BLOCK; }

    __device__ __forceinline__ u8* lines(u32 peer, u64 epoch, u32 source, u32 token, u32 unit) const {
        const u32 row_lines = lines_of(p.blocks() * BLOCK_WORDS * 8);
        return ll_slot(p, peer, epoch, source, token, row_lines) + unit * static_cast<u64>(UNIT_LINES * LINE_BYTES);
    }
};

template <class Type>
class QuantisedArriving {
  public:
    static constexpr bool BRIEF = false;

    __device__ QuantisedArriving(const DispatchLlParams& p, u64 epoch, u8* stages)
        : p_(p), epoch_(epoch), units_(p, stages) {}

    __device__ __forceinline__ void begin(const Arriving& row) {
        bytes_ = units_.bytes(row.unit);
        lines_ = units_.lines(p_.peers.rank, epoch_, row.source, row.token, row.unit);
        gathering_.begin((1u << groups_of(bytes_)) - 1, epoch_);
    }

    __device__ __forceinline__ void ask() { gathering_.ask(Part(0, bytes_), lines_); }

    __device__ __forceinline__ u32 stale() const { return gathering_.stale(epoch_); }

    __device__ __forceinline__ bool settle(u32 stale) { return gathering_.settle(stale); }

    // The epoch found in a unit that a peer has not sent.
    __device__ __forceinline__ u64 seen(const Arriving&) const {
        return first_stale_line(lines_, 0, groups_of(bytes_), bytes_, epoch_);
    }

    __device__ __forceinline__ void place(const Arriving& row, u32 place) {
        const Part part(0, bytes_);
#pragma unroll
        for (u32 i = 0; i < UNIT_GROUPS; ++i) {
            const u32 at = units_.stage + part.first * 8 + i * GROUP_WORDS * 8;
            ptx::shared_store_8_if(part.has_low(i), at, gathering_.value[i].low);
            ptx::shared_store_8_if(part.has_high(i), at + 8, gathering_.value[i].high);
        }
        __syncwarp();  // hands the words to the threads that place them
        if (p_.scales != nullptr) {
            place_raw(row.unit, place);
        } else {
            place_dequantised(row.unit, place);
        }
        __syncwarp();  // the next unit's words overwrite these
    }

  private:
    // The number of elements of the row before the unit.
    static __device__ __forceinline__ u32 first_of(u32 unit) { return unit * UNIT_BLOCKS * BLOCK; }

    __device__ __forceinline__ bool has(u32 unit, u32 at) const {
        return at < UNIT_BLOCKS * BLOCK && first_of(unit) + at < p_.hidden;
    }

    // `hidden` is a multiple of 16.
    __device__ __forceinline__ void place_raw(u32 unit, u32 place) const {
        constexpr u32 STEPS = (UNIT_BLOCKS * BLOCK + 511) / 512;
        const u32 lane = threadIdx.x % 32;
        const bool has_scale = lane < units_.blocks(unit);
        const u32 scale = has_scale ? ptx::shared_load_4(units_.scale_at(lane)) : 0;
        ptx::Bytes16 value[STEPS];
#pragma unroll
        for (u32 i = 0; i < STEPS; ++i) {
            const u32 at = (i * 32 + lane) * 16;
            const bool wanted = has(unit, at);
            value[i].low = wanted ? ptx::shared_load_8(units_.at(at)) : 0;
            value[i].high = wanted ? ptx::shared_load_8(units_.at(at) + 8) : 0;
        }
        const u64 column = static_cast<u64>(unit * UNIT_BLOCKS + lane) * p_.scale_stride;
        for_each_place(place, [&](u32 into) {
            u8* row = p_.out + static_cast<u64>(into) * p_.hidden + first_of(unit) + lane * 16;
#pragma unroll
            for (u32 i = 0; i < STEPS; ++i) {
                if (has(unit, (i * 32 + lane) * 16)) {
                    ptx::store_16(row + i * 32 * 16, value[i]);
                }
            }
            if (has_scale) {
                ptx::store_4(p_.scales + (column + into) * 4, scale);
            }
        });
    }

    __device__ __forceinline__ void place_dequantised(u32 unit, u32 place) const {
        constexpr u32 STEPS = (UNIT_BLOCKS * BLOCK + 32 * Type::COUNT - 1) / (32 * Type::COUNT);
#pragma unroll 2
        for (u32 i = 0; i < STEPS; ++i) {
            const u32 at = (i * 32 + threadIdx.x % 32) * Type::COUNT;
            ptx::Bytes16 value{0, 0};
            if (has(unit, at)) {
                value = dequantised(at);
            }
            for_each_place(place, [&](u32 at_place) {
                if (has(unit, at)) {
                    const u64 element = first_of(unit) + at;
                    ptx::store_16(p_.out + static_cast<u64>(at_place) * p_.row_bytes + element * Type::BYTES, value);
                }
            });
        }
    }

    // The elements of the unit from `at` on that fill 16 bytes.
    __device__ __forceinline__ ptx::Bytes16 dequantised(u32 at) const {
        const float scale = __uint_as_float(ptx::shared_load_4(units_.scale_at(at / BLOCK)));
        float values[Type::COUNT];
#pragma unroll
        for (u32 j = 0; j < Type::COUNT; j += 4) {
            ptx::from_e4m3x4(ptx::shared_load_4(units_.at(at + j)), values + j);
        }
#pragma unroll
        for (u32 j = 0; j < Type::COUNT; ++j) {
            values[j] *= scale;
        }
        return Type::pack(values);
    }

    const DispatchLlParams& p_;
    u64 epoch_;
    QuantisedUnits units_;
    u32 bytes_ = 0;
    const u8* lines_ = nullptr;
    Gathering<UNIT_GROUPS> gathering_;
};

}  // namespace raymoe
