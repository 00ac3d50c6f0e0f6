// Rows in lines that hold their epoch, for few tokens.
//
// A flag after a row costs three more trips: the wait until the row has arrived, a fence, and the flag. For small rows
// these trips are most of the time. So a row is cut into lines of 128 bytes, 120 of the row and 8 of the epoch, and the
// reader polls the lines themselves. A line arrives whole (ptx::store_line_part). A line of an older epoch has another
// number there, so nothing is reset. Only epochs are ever stored where epochs are.
//
// Single words are 16 bytes: {value, epoch}.
#pragma once

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

constexpr u32 LINE_BYTES = 128;
constexpr u32 LINE_WORDS = 15;  // of 8 bytes, that a line has of its row
constexpr u32 PARTS = 8;        // of a line, of 16 bytes: each is moved by one thread
constexpr u32 GROUP = 4;        // lines that a warp moves at a time
constexpr u32 GROUP_WORDS = GROUP * LINE_WORDS;

#ifndef FEW_PROBES
#define FEW_PROBES 1  // 1: a warp that waits for several groups polls one until it has come. 0: it polls all of them
#endif
constexpr bool PROBES = FEW_PROBES;

__device__ __forceinline__ u32 lines_of(u32 row_bytes) {
    return (row_bytes / 8 + LINE_WORDS - 1) / LINE_WORDS;
}

__device__ __forceinline__ u32 groups_of(u32 row_bytes) {
    return (lines_of(row_bytes) + GROUP - 1) / GROUP;
}

// A thread's part of a group of lines, and of the groups `ahead` of it in the row: words `first` and `first` + 1 of the
// row, if these are less than `words`. The last part of a line has one word, and the epoch.
//
// In a plain row the same words are moved 16 bytes at a time. The four lines of a group are 60 words, or 30 pieces of
// 16 bytes. In the first and the third line, a thread's piece is its two words; the last thread's piece is the line's
// last word and the next line's first. In the other lines a piece begins one word later, and the last thread has none.
// So between row and lines a word moves to the neighbouring thread.
struct Part {
    u32 line;
    u32 part;
    u32 first;
    u32 words;
    u32 lines;
    bool odd;  // the line is the second of a group, or the fourth

    __device__ __forceinline__ Part(u32 group, u32 row_bytes)
        : line(group * GROUP + threadIdx.x % 32 / PARTS), part(threadIdx.x % PARTS),
          first(line * LINE_WORDS + part * 2), words(row_bytes / 8), lines(lines_of(row_bytes)),
          odd(threadIdx.x / PARTS % 2 == 1) {}

    __device__ __forceinline__ bool has_epoch() const { return part == PARTS - 1; }

    __device__ __forceinline__ bool has_low(u32 ahead) const { return first + ahead * GROUP_WORDS < words; }

    __device__ __forceinline__ bool has_high(u32 ahead) const {
        return !has_epoch() && first + ahead * GROUP_WORDS + 1 < words;
    }

    // The first word of this thread's piece.
    __device__ __forceinline__ u32 piece() const { return odd ? first + 1 : first; }

    __device__ __forceinline__ bool has_piece(u32 ahead) const {
        return piece() + ahead * GROUP_WORDS < words && !(odd && has_epoch());
    }

    // Loads a piece of a plain row, whose address and size are multiples of 16; zeros if not wanted.
    __device__ __forceinline__ ptx::Bytes16 load(bool wanted, const u8* row, u32 ahead) const {
        const u8* at = row + piece() * 8ull + ahead * GROUP_WORDS * 8;
        return ptx::load_16_if(wanted && has_piece(ahead), at, {0, 0});
    }

    __device__ __forceinline__ void store(u8* row, u32 ahead, const ptx::Bytes16& value) const {
        if (has_piece(ahead)) {
            ptx::store_16(row + piece() * 8ull + ahead * GROUP_WORDS * 8, value);
        }
    }

    // Converts pieces to words of lines. All threads of the warp call this. The 8 bytes beside a line's last word are
    // unused.
    __device__ __forceinline__ ptx::Bytes16 to_lines(const ptx::Bytes16& value) const {
        const u64 before = __shfl_up_sync(0xFFFFFFFF, value.high, 1);
        return {odd ? before : value.low, odd ? value.low : value.high};
    }

    // Converts words of lines to pieces. All threads of the warp call this.
    __device__ __forceinline__ ptx::Bytes16 to_pieces(const ptx::Bytes16& value) const {
        const u64 next = __shfl_sync(0xFFFFFFFF, value.low, (threadIdx.x + 1) % 32);
        return {odd ? value.high : value.low, odd || has_epoch() ? next : value.high};
    }

    // Stores the value in a line of a row at a peer.
    __device__ __forceinline__ void send(u8* into, u32 ahead, ptx::Bytes16 value, u64 epoch) const {
        if (line + ahead * GROUP < lines) {
            value.high = has_epoch() ? epoch : value.high;
            u8* at = into + line * static_cast<u64>(LINE_BYTES) + ahead * GROUP * LINE_BYTES;
            ptx::store_line_part(at, part, value);
        }
    }

    // Loads from a line that a peer may still be storing; `Gathering` checks the epoch. Returns `otherwise` if not
    // wanted, or if the row has no such line.
    __device__ __forceinline__ ptx::Bytes16 look(bool wanted, const u8* from, u32 ahead,
                                                 const ptx::Bytes16& otherwise) const {
        const u8* at = from + line * static_cast<u64>(LINE_BYTES) + ahead * GROUP * LINE_BYTES;
        return ptx::load_line_part_if(wanted && line + ahead * GROUP < lines, at, part, otherwise);
    }
};

// Groups of lines that a warp waits for together: one trip to memory looks at many.
//
// The polling loads of a waiting warp slow others. So after a first look at all groups, the warp polls only one missing
// group. The other groups were sent at the same time, and the warp looks at them again when that one has come.
template <u32 MOST>
struct Gathering {
    ptx::Bytes16 value[MOST];
    u32 missing = 0;  // bit i: group i does not have this epoch yet
    u32 asked = 0;    // the missing groups that the next look loads

    // Begins to wait for these groups. All other lines count as being of this epoch.
    __device__ __forceinline__ void begin(u32 groups, u64 epoch) {
        missing = asked = groups;
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            value[i] = {0, epoch};
        }
    }

    // Loads the asked groups, from that of `part` on.
    __device__ __forceinline__ void ask(const Part& part, const u8* from) {
        ask([&](bool wanted, u32 i, const ptx::Bytes16& otherwise) { return part.look(wanted, from, i, otherwise); });
    }

    // Loads the asked groups; `look(wanted, i, otherwise)` loads group i.
    template <class Look>
    __device__ __forceinline__ void ask(Look look) {
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            value[i] = look(asked >> i & 1, i, value[i]);
        }
    }

    // For the lines whose epoch this thread has loaded: bit i if that of group i is not this epoch.
    __device__ __forceinline__ u32 stale(u64 epoch) const {
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            found |= value[i].high == epoch ? 0 : 1u << i;
        }
        return threadIdx.x % PARTS == PARTS - 1 ? found & asked : 0;
    }

    // Takes the stale groups that all threads of the warp found. Returns true if nothing is missing.
    __device__ __forceinline__ bool settle(u32 stale) {
        missing = (missing & ~asked) | stale;
        asked = PROBES && stale != 0 ? missing & (0 - missing) : missing;
        return missing == 0;
    }
};

// The first of `count` epochs, `stride` bytes apart, that is not this one; else this one. One thread calls this after a
// wait has failed.
__device__ __forceinline__ u64 first_stale(const u8* at, u32 count, u32 stride, u64 epoch) {
    u64 seen = epoch;
#pragma unroll 1
    for (u32 i = 0; i < count && seen == epoch; ++i, at += stride) {
        seen = ptx::load_relaxed_sys(reinterpret_cast<const u64*>(at));
    }
    return seen;
}

// The same for the epochs of a row's lines: `count` groups of them from group `first` on.
__device__ __forceinline__ u64 first_stale_line(const u8* lines, u32 first, u32 count, u32 row_bytes, u64 epoch) {
    const u32 begin = first * GROUP, end = min(begin + count * GROUP, lines_of(row_bytes));
    return first_stale(lines + begin * static_cast<u64>(LINE_BYTES) + LINE_BYTES - 8, end - begin, LINE_BYTES, epoch);
}

// Waits until a {value, epoch} has this epoch. One thread calls this. Returns false if the wait failed.
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

// Waits until `look()` is true, which must be the same in all threads of the warp. All threads of the warp call this.
// The first thread's deadline is that of all. If the wait fails, that thread calls `missed(seen)`, which returns the
// rank that has not sent and stores the epoch found instead. So nothing that only the report needs is kept while
// waiting. Returns false if the wait failed.
template <class Look, class Missed>
__device__ __forceinline__ bool wait_as_warp(Look look, Missed missed, u64 epoch, u32 op, const Watch& watch) {
    Deadline deadline(watch);
    while (true) {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS_PER_CLOCK; ++poll) {
            if (look()) {
                return true;
            }
        }
        const u64 failure = threadIdx.x % 32 == 0 ? deadline.failure() : 0;
        if (failure != 0) {
            u64 seen = 0;
            const u32 peer = missed(seen);
            deadline.report(failure, epoch, seen, Waiting{op, peer, epoch});
        }
        if (!__all_sync(0xFFFFFFFF, failure == 0)) {
            return false;
        }
    }
}

}  // namespace raymoe
