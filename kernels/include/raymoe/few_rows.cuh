// How dispatch_few.cu carries the rows of few tokens: as they are, or as 8-bit floats. A row is cut into units; a warp
// sends a unit of a row, and places a unit of a row.
#pragma once

#include "raymoe/dispatch.cuh"
#include "raymoe/lines.cuh"
#include "raymoe/quantising.cuh"
#include "raymoe/vectors.cuh"

namespace raymoe {

// A row to be placed: where it comes from, and to which places.
struct Arriving {
    u32 source;
    u32 token;
    u32 unit;
    u32 place;  // of thread k: of entry k
    u32 hits;   // bit k: entry k has one
};

// Where a row's lines lie at a rank.
__device__ __forceinline__ u8* few_slot(const DispatchParams& p, u32 peer, u64 epoch, u32 source, u32 token,
                                        u32 lines) {
    const u64 row = static_cast<u64>(source) * p.slot_tokens + token;
    return p.peers.slot(peer, p.few_rows[epoch & 1], row, lines * static_cast<u64>(LINE_BYTES));
}

// As they are. Units are groups of lines, more or fewer so that all warps have work. Rows of this rank itself come out
// of x.
class PlainUnits {
  public:
    static __device__ __forceinline__ u32 shared_bytes() { return 0; }

    __device__ PlainUnits(const DispatchParams& p, u64 epoch, u8*, u32 rows, u32 warps)
        : p_(p), epoch_(epoch), dealing_(p.row_bytes, rows, warps), lines_(lines_of(p.row_bytes)) {}

    __device__ __forceinline__ u32 units() const { return dealing_.units; }

    // The first load of a unit: under way while the caller finds out where the row goes.
    __device__ __forceinline__ void begin(u32 token, u32 unit) {
        row_ = p_.x + static_cast<u64>(token) * p_.row_bytes;
        first_ = Part(unit * dealing_.each, p_.row_bytes).load(row_);
    }

    __device__ __forceinline__ void send(u32 token, u32 unit, u32 mask) {
        for (u32 group = unit * dealing_.each; group < dealing_.end(unit); ++group) {
            const Part part(group, p_.row_bytes);
            const ptx::Bytes16 value = group == unit * dealing_.each ? first_ : part.load(row_);
            for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
                const u32 peer = p_.peers.in_turn(step);
                if (mask >> peer & 1) {
                    part.send(few_slot(p_, peer, epoch_, p_.peers.rank, token, lines_), value, epoch_);
                }
            }
        }
    }

    // False: a wait failed.
    __device__ __forceinline__ bool place(const Arriving& row, const Waiting& who) {
        const u8* lines = few_slot(p_, p_.peers.rank, epoch_, row.source, row.token, lines_);
        for (u32 group = row.unit * dealing_.each; group < dealing_.end(row.unit); ++group) {
            const Part part(group, p_.row_bytes);
            ptx::Bytes16 value;
            if (row.source == p_.peers.rank) {
                value = part.load(p_.x + static_cast<u64>(row.token) * p_.row_bytes);
            } else if (!wait_for_lines(part, lines, epoch_, who, p_.watch, value)) {
                return false;
            }
            for (u32 left = row.hits; left != 0; left &= left - 1) {
                const u32 at = __shfl_sync(0xFFFFFFFF, row.place, __ffs(left) - 1);
                part.store(p_.out + static_cast<u64>(at) * p_.out_row_bytes, value);
            }
        }
        return true;
    }

  private:
    const DispatchParams& p_;
    u64 epoch_;
    Dealing dealing_;
    u32 lines_;
    const u8* row_ = nullptr;
    ptx::Bytes16 first_{};
};

// As 8-bit floats. In lines a block of 128 elements is 17 words: 16 of elements, one of the scale. Fifteen blocks are
// 255 words, which fill 17 lines: that is a unit, so that no line has two writers. Rows of this rank itself go through
// lines too, so that all rows are what they are by one piece of code.
template <class Type>
class QuantisedUnits {
  public:
    static constexpr u32 BLOCKS = 15;
    static constexpr u32 BLOCK_WORDS = 17;
    static constexpr u32 LINES = BLOCKS * BLOCK_WORDS / LINE_WORDS;
    static constexpr u32 STAGE_BYTES = 2048;  // of a warp

    static __device__ __forceinline__ u32 shared_bytes() { return WARPS * STAGE_BYTES; }

    __device__ QuantisedUnits(const DispatchParams& p, u64 epoch, u8* shared, u32, u32)
        : p_(p), epoch_(epoch), stage_(ptx::shared_address(shared) + threadIdx.x / 32 * STAGE_BYTES),
          units_((p.blocks() + BLOCKS - 1) / BLOCKS) {}

    __device__ __forceinline__ u32 units() const { return units_; }

    __device__ __forceinline__ void begin(u32, u32) {}

    __device__ __forceinline__ void send(u32 token, u32 unit, u32 mask) {
        const u8* row = p_.x + static_cast<u64>(token) * p_.x_bytes();
        const u32 lane = threadIdx.x % 32, words = words_of(unit);
        for (u32 block = 0; block < blocks_of(unit); ++block) {
            const u32 element = (unit * BLOCKS + block) * BLOCK + lane * 4;
            const u32 at = stage_ + block * BLOCK_WORDS * 8;
            u32 four = 0, scale;
            if (p_.x_scales != nullptr) {
                four = element < p_.hidden ? ptx::load_4(row + element) : 0;
                scale = ptx::load_4(p_.x_scales + (static_cast<u64>(token) * p_.blocks() + unit * BLOCKS + block) * 4);
            } else {
                float values[4] = {};
                if (element < p_.hidden) {
                    load_elements(row, element, values);
                }
                scale = __float_as_uint(quantise_four(values));
                four = ptx::to_e4m3x4(values);
            }
            ptx::shared_store_4(at + lane * 4, four);
            if (lane == 0) {
                ptx::shared_store_8(at + BLOCK, scale);
            }
        }
        __syncwarp();  // hands the words to the threads that send them
        for (u32 line = lane / PARTS; line < (lines_of_words(words) + GROUP - 1) / GROUP * GROUP; line += GROUP) {
            const u32 part = lane % PARTS, first = line * LINE_WORDS + part * 2;
            if (line >= lines_of_words(words)) {
                continue;
            }
            const bool has_epoch = part == PARTS - 1;
            ptx::Bytes16 value{0, has_epoch ? epoch_ : 0};
            if (first < words) {
                value.low = ptx::shared_load_8(stage_ + first * 8);
            }
            if (!has_epoch && first + 1 < words) {
                value.high = ptx::shared_load_8(stage_ + first * 8 + 8);
            }
            for (u32 step = 0; step < p_.peers.ranks; ++step) {
                const u32 peer = p_.peers.in_turn(step);
                if (mask >> peer & 1) {
                    u8* lines = few_slot(p_, peer, epoch_, p_.peers.rank, token, row_lines());
                    ptx::store_line_part(lines + (unit * LINES + line) * static_cast<u64>(LINE_BYTES), part, value);
                }
            }
        }
        __syncwarp();  // the next unit's words come where these were
    }

    __device__ __forceinline__ bool place(const Arriving& row, const Waiting& who) {
        const u8* lines = few_slot(p_, p_.peers.rank, epoch_, row.source, row.token, row_lines()) +
                          row.unit * static_cast<u64>(LINES * LINE_BYTES);
        const u32 words = words_of(row.unit), lane = threadIdx.x % 32;
        // The unit as a row of its own, whose lines begin here.
        for (u32 group = 0; group < (lines_of_words(words) + GROUP - 1) / GROUP; ++group) {
            const Part part(group, words * 8);
            ptx::Bytes16 value;
            if (!wait_for_lines(part, lines, epoch_, who, p_.watch, value)) {
                return false;
            }
            if (part.has_low()) {
                ptx::shared_store_8(stage_ + part.first * 8, value.low);
            }
            if (part.has_high()) {
                ptx::shared_store_8(stage_ + part.first * 8 + 8, value.high);
            }
        }
        __syncwarp();  // hands the words to the threads that place them
        for (u32 left = row.hits; left != 0; left &= left - 1) {
            const u32 at = __shfl_sync(0xFFFFFFFF, row.place, __ffs(left) - 1);
            for (u32 block = 0; block < blocks_of(row.unit); ++block) {
                place_block(row.unit * BLOCKS + block, stage_ + block * BLOCK_WORDS * 8, at, lane);
            }
        }
        __syncwarp();  // the next unit's words come where these were
        return true;
    }

  private:
    __device__ __forceinline__ u32 blocks_of(u32 unit) const {
        const u32 left = p_.blocks() - unit * BLOCKS;
        return left < BLOCKS ? left : BLOCKS;
    }

    __device__ __forceinline__ u32 words_of(u32 unit) const { return blocks_of(unit) * BLOCK_WORDS; }

    static __device__ __forceinline__ u32 lines_of_words(u32 words) { return (words + LINE_WORDS - 1) / LINE_WORDS; }

    __device__ __forceinline__ u32 row_lines() const { return lines_of_words(p_.blocks() * BLOCK_WORDS); }

    static __device__ __forceinline__ void load_elements(const u8* row, u32 element, float* into) {
        if constexpr (Type::BYTES == 4) {
            Type::unpack(ptx::load_16(row + element * 4ull), into);
        } else {
            float eight[8];
            Type::unpack({ptx::load_8(row + element * 2ull), 0}, eight);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                into[i] = eight[i];
            }
        }
    }

    // One block of a row, whose words are in shared memory at `words`.
    __device__ __forceinline__ void place_block(u32 block, u32 words, u32 place, u32 lane) const {
        const u32 element = block * BLOCK + lane * 4;
        const u32 scale = ptx::shared_load_4(words + BLOCK);
        if (p_.scales != nullptr) {
            if (element < p_.hidden) {
                const u32 four = ptx::shared_load_4(words + lane * 4);
                ptx::store_4(p_.out + static_cast<u64>(place) * p_.hidden + element, four);
            }
            if (lane == 0) {
                ptx::store_4(p_.scales + (static_cast<u64>(block) * p_.scale_stride + place) * 4, scale);
            }
            return;
        }
        if (element < p_.hidden) {
            float values[8] = {};
            ptx::from_e4m3x4(ptx::shared_load_4(words + lane * 4), values);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                values[i] *= __uint_as_float(scale);
            }
            u8* at = p_.out + static_cast<u64>(place) * p_.row_bytes + element * static_cast<u64>(Type::BYTES);
            const ptx::Bytes16 packed = Type::pack(values);
            if constexpr (Type::BYTES == 4) {
                ptx::store_16(at, packed);
            } else {
                ptx::store_8(at, packed.low);
            }
        }
    }

    const DispatchParams& p_;
    u64 epoch_;
    u32 stage_;  // shared memory of this warp
    u32 units_;
};

}  // namespace raymoe
