// Rows in lines that say themselves of which epoch they are: the way of few tokens.
//
// A flag that follows a row costs three trips after it: the row's arrival is awaited, a fence, the flag. Where a row is
// little, these trips are most of the time. So here a row is cut into lines of 128 bytes, 120 of the row and 8 of the
// epoch, and whoever waits for the row looks at the lines themselves. A line arrives whole (ptx::store_line_part). What
// it holds of older epochs is not of this one, so nothing is reset; nothing but epochs is ever stored where epochs are.
//
// Words that come alone are 16 bytes, {value, epoch}.
#pragma once

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

constexpr u32 LINE_BYTES = 128;
constexpr u32 LINE_WORDS = 15;  // of 8 bytes, that a line holds of its row
constexpr u32 PARTS = 8;        // of a line, of 16 bytes: one for each of as many threads
constexpr u32 GROUP = 4;        // lines that a warp moves at a time
constexpr u32 GROUP_WORDS = GROUP * LINE_WORDS;

#ifndef FEW_PROBES
#define FEW_PROBES 1  // 1: who waits for several groups looks at one of them until it is there. 0: at all of them
#endif
constexpr bool PROBES = FEW_PROBES;

__device__ __forceinline__ u32 lines_of(u32 row_bytes) {
    return (row_bytes / 8 + LINE_WORDS - 1) / LINE_WORDS;
}

__device__ __forceinline__ u32 groups_of(u32 row_bytes) {
    return (lines_of(row_bytes) + GROUP - 1) / GROUP;
}

// What a thread of a warp has to do with a group of lines, and with those `ahead` of it in the row: words `first` and
// the next of the row, where those are less than `words`; the last part of a line has one word, and the epoch.
//
// In a plain row the same words are moved 16 bytes at a time. The four lines of a group are 60 words, 30 such pieces:
// in the first line and the third a thread's piece is its two words, the last thread's the line's last word and the
// next line's first; in the others it begins one word further on, and the last thread has none. So a word goes to the
// neighbour on the way between row and lines.
struct Part {
    u32 line;
    u32 part;
    u32 first;
    u32 words;
    u32 lines;
    bool odd;  // it is of the second line of a group, or of the fourth

    __device__ __forceinline__ Part(u32 group, u32 row_bytes)
        : line(group * GROUP + threadIdx.x % 32 / PARTS), part(threadIdx.x % PARTS),
          first(line * LINE_WORDS + part * 2), words(row_bytes / 8), lines(lines_of(row_bytes)),
          odd(threadIdx.x / PARTS % 2 == 1) {}

    __device__ __forceinline__ bool has_epoch() const { return part == PARTS - 1; }

    __device__ __forceinline__ bool has_low(u32 ahead) const { return first + ahead * GROUP_WORDS < words; }

    __device__ __forceinline__ bool has_high(u32 ahead) const {
        return !has_epoch() && first + ahead * GROUP_WORDS + 1 < words;
    }

    // The word that this thread's piece begins with.
    __device__ __forceinline__ u32 piece() const { return odd ? first + 1 : first; }

    __device__ __forceinline__ bool has_piece(u32 ahead) const {
        return piece() + ahead * GROUP_WORDS < words && !(odd && has_epoch());
    }

    // A piece of a plain row, whose bytes and whose place are a multiple of 16; zeros where it is not wanted.
    __device__ __forceinline__ ptx::Bytes16 load(bool wanted, const u8* row, u32 ahead) const {
        const u8* at = row + piece() * 8ull + ahead * GROUP_WORDS * 8;
        return ptx::load_16_if(wanted && has_piece(ahead), at, {0, 0});
    }

    __device__ __forceinline__ void store(u8* row, u32 ahead, const ptx::Bytes16& value) const {
        if (has_piece(ahead)) {
            ptx::store_16(row + piece() * 8ull + ahead * GROUP_WORDS * 8, value);
        }
    }

    // By a whole warp: pieces become words of lines. What stands beside a line's last word is nobody's.
    __device__ __forceinline__ ptx::Bytes16 to_lines(const ptx::Bytes16& value) const {
        const u64 before = __shfl_up_sync(0xFFFFFFFF, value.high, 1);
        return {odd ? before : value.low, odd ? value.low : value.high};
    }

    // By a whole warp: the opposite.
    __device__ __forceinline__ ptx::Bytes16 to_pieces(const ptx::Bytes16& value) const {
        const u64 next = __shfl_sync(0xFFFFFFFF, value.low, (threadIdx.x + 1) % 32);
        return {odd ? value.high : value.low, odd || has_epoch() ? next : value.high};
    }

    // Into the lines of a row at a peer.
    __device__ __forceinline__ void send(u8* into, u32 ahead, ptx::Bytes16 value, u64 epoch) const {
        if (line + ahead * GROUP < lines) {
            value.high = has_epoch() ? epoch : value.high;
            u8* at = into + line * static_cast<u64>(LINE_BYTES) + ahead * GROUP * LINE_BYTES;
            ptx::store_line_part(at, part, value);
        }
    }

    // Out of lines that a peer may still be storing; `Gathering` judges what came. `otherwise` where it is not wanted
    // and where the row has no such line.
    __device__ __forceinline__ ptx::Bytes16 look(bool wanted, const u8* from, u32 ahead,
                                                 const ptx::Bytes16& otherwise) const {
        const u8* at = from + line * static_cast<u64>(LINE_BYTES) + ahead * GROUP * LINE_BYTES;
        return ptx::load_line_part_if(wanted && line + ahead * GROUP < lines, at, part, otherwise);
    }
};

// Groups of lines that a warp waits for together: a trip to memory looks at many.
//
// What waiting costs others is the loads. So after a first look at all, one of the missing groups stands for the
// others, which were sent when it was, and they are looked at again when that one is there.
template <u32 MOST>
struct Gathering {
    ptx::Bytes16 value[MOST];
    u32 missing = 0;  // bit i: group i is not of this epoch yet
    u32 asked = 0;    // those of them that are looked at next

    // A line that no group has is of this epoch.
    __device__ __forceinline__ void begin(u32 groups, u64 epoch) {
        missing = asked = groups;
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            value[i] = {0, epoch};
        }
    }

    // Loads, of the groups of lines from that of `part` on.
    __device__ __forceinline__ void ask(const Part& part, const u8* from) {
        ask([&](bool wanted, u32 i, const ptx::Bytes16& otherwise) { return part.look(wanted, from, i, otherwise); });
    }

    // Loads; `look(wanted, i, otherwise)` is that of group i.
    template <class Look>
    __device__ __forceinline__ void ask(Look look) {
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            value[i] = look(asked >> i & 1, i, value[i]);
        }
    }

    // Of the lines that this thread has the epoch of: bit i, that of group i is of another one.
    __device__ __forceinline__ u32 stale(u64 epoch) const {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            found |= value[i].high == epoch ? 0 : 1u << i;
        }
        return threadIdx.x % PARTS == PARTS - 1 ? found & asked : 0;
    }

    // Given what all threads of the warp have found. True: nothing is missing.
    __device__ __forceinline__ bool settle(u32 stale) {
        missing = (missing & ~asked) | stale;
        asked = PROBES && stale != 0 ? missing & (0 - missing) : missing;
        return missing == 0;
    }
};

// By one thread, of `count` epochs that lie `stride` bytes apart: the first that is not this one, if there is one. For
// waits that have failed.
__device__ __forceinline__ u64 first_stale(const u8* at, u32 count, u32 stride, u64 epoch) {
    u64 seen = epoch;
#pragma unroll 1
    for (u32 i = 0; i < count && seen == epoch; ++i, at += stride) {
        seen = ptx::load_relaxed_sys(reinterpret_cast<const u64*>(at));
    }
    return seen;
}

// The same of the epochs of a row's lines, `count` groups of them from group `first` on.
__device__ __forceinline__ u64 first_stale_line(const u8* lines, u32 first, u32 count, u32 row_bytes, u64 epoch) {
    const u32 begin = first * GROUP, end = min(begin + count * GROUP, lines_of(row_bytes));
    return first_stale(lines + begin * static_cast<u64>(LINE_BYTES) + LINE_BYTES - 8, end - begin, LINE_BYTES, epoch);
}

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
// thread's patience is that of all. Once it has failed, that thread asks `missed(seen)` which rank has not sent, and
// which epoch is there instead: nothing that only the answer needs is kept while others are waited for.
template <class Look, class Missed>
__device__ __forceinline__ bool wait_as_warp(Look look, Missed missed, u64 epoch, u32 op, const Watch& watch) {
    Patience patience(watch);
    while (true) {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS_PER_CLOCK; ++poll) {
            if (look()) {
                return true;
            }
        }
        const u64 failure = threadIdx.x % 32 == 0 ? patience.failure() : 0;
        if (failure != 0) {
            u64 seen = 0;
            const u32 peer = missed(seen);
            patience.tell(failure, epoch, seen, Waiting{op, peer, epoch});
        }
        if (!__all_sync(0xFFFFFFFF, failure == 0)) {
            return false;
        }
    }
}

}  // namespace raymoe
