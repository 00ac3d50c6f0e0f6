// Rows in lines that say themselves of which epoch they are: the way of few tokens.
//
// A flag that follows a row costs three trips after it: the row's arrival is awaited, a fence, the flag. Where a row is
// little, these trips are most of the time. So here a row is cut into lines of 128 bytes, 120 of the row and 8 of the
// epoch, and whoever waits for the row looks at the lines themselves. A line arrives whole (ptx::store_line_part). What
// it holds of older epochs is not of this one, so nothing is reset; nothing but epochs is ever stored where epochs are.
//
// Words that come alone are 16 bytes, {value, epoch}.
#pragma once

#include "raymoe/ptx.cuh"
#include "raymoe/sync.cuh"

namespace raymoe {

constexpr u32 LINE_BYTES = 128;
constexpr u32 LINE_WORDS = 15;  // of 8 bytes, that a line holds of its row
constexpr u32 PARTS = 8;        // of a line, of 16 bytes: one for each of as many threads
constexpr u32 GROUP = 4;        // lines that a warp moves at a time

__device__ __forceinline__ u32 lines_of(u32 row_bytes) {
    return (row_bytes / 8 + LINE_WORDS - 1) / LINE_WORDS;
}

__device__ __forceinline__ u32 groups_of(u32 row_bytes) {
    return (lines_of(row_bytes) + GROUP - 1) / GROUP;
}

// What a thread of a warp has to do with a group of lines: words `first` and the next of the row, where those are less
// than `words`; the last part of a line has one word, and the epoch.
struct Part {
    u32 line;
    u32 part;
    u32 first;
    u32 words;
    bool real;  // there is such a line

    __device__ __forceinline__ Part(u32 group, u32 row_bytes)
        : line(group * GROUP + threadIdx.x % 32 / PARTS), part(threadIdx.x % PARTS),
          first(line * LINE_WORDS + part * 2), words(row_bytes / 8), real(line < lines_of(row_bytes)) {}

    __device__ __forceinline__ bool has_epoch() const { return part == PARTS - 1; }

    __device__ __forceinline__ bool has_low() const { return first < words; }

    __device__ __forceinline__ bool has_high() const { return !has_epoch() && first + 1 < words; }

    // Out of a plain row.
    __device__ __forceinline__ ptx::Bytes16 load(const u8* row) const {
        return {has_low() ? ptx::load_8(row + first * 8ull) : 0, has_high() ? ptx::load_8(row + first * 8ull + 8) : 0};
    }

    // Into a plain row.
    __device__ __forceinline__ void store(u8* row, const ptx::Bytes16& value) const {
        if (has_low()) {
            ptx::store_8(row + first * 8ull, value.low);
        }
        if (has_high()) {
            ptx::store_8(row + first * 8ull + 8, value.high);
        }
    }

    // Into the lines of a row at a peer.
    __device__ __forceinline__ void send(u8* lines, ptx::Bytes16 value, u64 epoch) const {
        if (real) {
            value.high = has_epoch() ? epoch : value.high;
            ptx::store_line_part(lines + line * static_cast<u64>(LINE_BYTES), part, value);
        }
    }

    // Out of lines that a peer may still be storing; `complete` judges what came.
    __device__ __forceinline__ ptx::Bytes16 look(const u8* lines) const {
        return real ? ptx::load_line_part(lines + line * static_cast<u64>(LINE_BYTES), part) : ptx::Bytes16{0, 0};
    }

    // Of a whole warp: whether all of its lines are of this epoch.
    __device__ __forceinline__ bool complete(const ptx::Bytes16& value, u64 epoch) const {
        return __all_sync(0xFFFFFFFF, !real || !has_epoch() || value.high == epoch);
    }
};

// By one thread: until a {value, epoch} is of this epoch. False: the wait failed.
__device__ __forceinline__ bool wait_for_word(const u8* at, u64 epoch, const Waiting& who, const Watch& watch,
                                              u64& value) {
    auto look = [&](u64& seen) {
        const ptx::Bytes16 found = ptx::load_relaxed_sys_16(at);
        value = found.low;
        seen = found.high;
        return seen == epoch;
    };
    return wait_until(look, epoch, who, watch);
}

// By a whole warp: until `look()` is true, which is the same for all of its threads. False: the wait failed. The first
// thread's patience is that of all.
template <class Look>
__device__ __forceinline__ bool wait_as_warp(Look look, u64 epoch, const Waiting& who, const Watch& watch) {
    if (look()) {
        return true;
    }
    Patience patience(watch);
    while (true) {
        for (u32 poll = 0; poll < POLLS_PER_CLOCK; ++poll) {
            if (look()) {
                return true;
            }
        }
        const bool on = threadIdx.x % 32 != 0 || patience.goes_on(epoch, 0, who);
        if (!__all_sync(0xFFFFFFFF, on)) {
            return false;
        }
    }
}

// By a whole warp: until the lines of a group are of this epoch. False: the wait failed.
__device__ __forceinline__ bool wait_for_lines(const Part& part, const u8* lines, u64 epoch, const Waiting& who,
                                               const Watch& watch, ptx::Bytes16& value) {
    auto look = [&] {
        value = part.look(lines);
        return part.complete(value, epoch);
    };
    return wait_as_warp(look, epoch, who, watch);
}

// How a row's groups are dealt out: units of `each` groups, so that `tokens` rows are work for `warps`, and no unit is
// longer than need be.
struct Dealing {
    u32 groups;  // of a row
    u32 each;    // of a unit
    u32 units;   // of a row

    __device__ __forceinline__ Dealing(u32 row_bytes, u32 rows, u32 warps) : groups(groups_of(row_bytes)) {
        const u64 all = static_cast<u64>(rows) * groups;
        const u64 share = (all + warps - 1) / warps;
        each = share < 1 ? 1 : share < groups ? static_cast<u32>(share) : groups;
        units = (groups + each - 1) / each;
    }

    __device__ __forceinline__ u32 end(u32 unit) const {
        const u32 next = (unit + 1) * each;
        return next < groups ? next : groups;
    }
};

}  // namespace raymoe
