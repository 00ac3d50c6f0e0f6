// Copies by ordinary loads and stores, for bytes that bulk copies cannot move: those beside 16-byte boundaries, and all
// bytes where source and destination differ mod 16.
//
// A group of threads does a copy; each thread knows its number in the group. No byte outside [src, src + bytes) is
// read, and no byte outside [dst, dst + bytes) is written. These functions order nothing: the caller needs a barrier
// after.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct Span {
    u8* dst;
    const u8* src;
    u64 bytes;
};

struct Group {
    u64 thread;   // this thread's number
    u64 threads;  // of the group
};

// Byte `i` of the copy.
__device__ __forceinline__ void copy_byte(const Span& span, u64 i) {
    ptx::store_byte(span.dst + i, ptx::load_byte(span.src + i));
}

// Copies bytes [0, head) and [tail, bytes), one byte a thread; fewer than 32 bytes at either end.
__device__ __forceinline__ void copy_ends(const Span& span, u64 head, u64 tail, u64 thread) {
    if (thread < head) {
        copy_byte(span, thread);
    }
    if (thread < span.bytes - tail) {
        copy_byte(span, tail + thread);
    }
}

// The 16 bytes that begin `shift` bytes (1 to 15) into the 32 of `low` and `high`.
__device__ __forceinline__ ptx::Bytes16 shifted(const ptx::Bytes16& low, const ptx::Bytes16& high, u32 shift) {
    const bool far = shift >= 8;
    const u64 a = far ? low.high : low.low;
    const u64 b = far ? high.low : low.high;
    const u64 c = far ? high.high : high.low;
    const u32 bits = (shift & 7) * 8;
    return bits == 0 ? ptx::Bytes16{a, b}
                     : ptx::Bytes16{(a >> bits) | (b << (64 - bits)), (b >> bits) | (c << (64 - bits))};
}

// Copies where dst and src differ mod 16. Vector i goes to the i-th aligned 16 bytes of dst. It needs the aligned
// vectors i and i + 1 of src, and both must lie inside [src, src + bytes). Groups have at least 64 threads.
__device__ __forceinline__ void copy_by_shifting(const Span& span, const Group& group) {
    constexpr u32 UNROLL = 4;
    const u64 src = reinterpret_cast<u64>(span.src);
    u64 head = (0 - reinterpret_cast<u64>(span.dst)) & 15;
    const u32 shift = static_cast<u32>((src + head) & 15);
    if (head < shift) {
        head += 16;  // the first aligned vector of src would begin before src
    }
    // Vectors i with (i + 2) * 16 <= bytes - head + shift: those whose second load ends inside.
    const u64 reach = span.bytes < head ? 0 : span.bytes - head + shift;
    const u64 vectors = reach < 32 ? 0 : reach / 16 - 1;
    if (vectors == 0) {
        // Fewer than 63 bytes: head is at most 30, and reach below 32.
        if (group.thread < span.bytes) {
            copy_byte(span, group.thread);
        }
        return;
    }
    copy_ends(span, head, head + vectors * 16, group.thread);
    const u8* from = span.src + head - shift;
    u8* into = span.dst + head;
    const u64 stride = group.threads;
    for (u64 i = group.thread; i < vectors; i += UNROLL * stride) {
        ptx::Bytes16 value[UNROLL];
#pragma unroll
        for (u32 j = 0; j < UNROLL; ++j) {  // all loads first, so that they are in flight together
            const u64 at = (i + j * stride < vectors ? i + j * stride : vectors - 1) * 16;
            value[j] = shifted(ptx::load_16(from + at), ptx::load_16(from + at + 16), shift);
        }
#pragma unroll
        for (u32 j = 0; j < UNROLL; ++j) {
            if (i + j * stride < vectors) {
                ptx::store_16(into + (i + j * stride) * 16, value[j]);
            }
        }
    }
}

}  // namespace raymoe
