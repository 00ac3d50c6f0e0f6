// Copies bytes: from anywhere to anywhere that this GPU can address, so a push and a pull are the same kernel.
//
// With an `operation` it also takes part in a protocol between two ranks, and every run of it has a number, the epoch:
//   1. every block waits, bounded, until the credit word in this rank's memory has come to the epoch (less `lag`)
//   2. the blocks move the bytes
//   3. the last block out releases the epoch into the signal word in the peer's memory, then makes it this rank's count
// Put: the sender runs it, the credit is the receiver's "ready", the signal its "sent". Get: the receiver runs it, the
// credit is the sender's "ready", the signal its "taken". A run of 0 bytes is a wait, a signal, or both.
//
// Who moves what. Let `head` be the bytes up to the first 16-byte boundary of dst.
//   dst and src lie alike mod 16:  thread 0 of every block drives a ring of bulk copies over the chunks; other threads
//                                  of block 0 move the up to 15 bytes at either end
//   they do not:                   bulk copies cannot do it; all threads load 16 aligned bytes twice and shift, and
//                                  those of block 0 move up to 31 bytes at either end. Right, not fast
// Nothing outside [src, src + bytes) is read and nothing outside [dst, dst + bytes) is written.
//
// Dynamic shared memory: the ring (ring.cuh). 128 threads a block; the grid is resident all at once.

#include "raymoe/ptx.cuh"
#include "raymoe/ring.cuh"
#include "raymoe/sync.cuh"

namespace raymoe {

struct CopyParams {
    u8* dst;
    const u8* src;
    u64 bytes;

    Operation* operation;  // null: copy only, no word below is touched

    // Writer: the peer, by a release at system scope of its own epoch, when this rank may begin (its buffer may be
    // written, or read). Reader: thread 0 of every block here, acquiring. Only grows, never reset: a replay finds its
    // next value by this rank's own count, and a peer that is one run ahead is as good. Null: nothing to wait for.
    const u64* credit;
    u64 lag;  // epochs that the credit may be behind: 0, or the number of buffers that need no credit at first

    // In the peer's memory. Writer: the last block out here. Reader: the peer, acquiring, by the same rules; it bulk
    // copies what the word announces only after a proxy fence. Null: nobody is told.
    u64* signal;

    Watch watch;  // poison is null: no wait, and nothing to be poisoned by
    u32 op;       // for the error record
    u32 peer;
    u32 stages;
    u32 stage_bytes;
};

constexpr u32 COPY_THREADS = 128;
constexpr u32 UNROLL = 4;

// Byte `i` of the copy, by an ordinary load and store.
__device__ __forceinline__ void copy_byte(const CopyParams& p, u64 i) {
    ptx::store_byte(p.dst + i, ptx::load_byte(p.src + i));
}

// Bytes [0, head) and [tail, bytes) of the copy; fewer than `threads` of either.
__device__ __forceinline__ void copy_ends(const CopyParams& p, u64 head, u64 tail, u32 thread) {
    if (thread < head) {
        copy_byte(p, thread);
    }
    if (thread < p.bytes - tail) {
        copy_byte(p, tail + thread);
    }
}

__device__ __forceinline__ u64 min_of(u64 a, u64 b) {
    return a < b ? a : b;
}

// dst and src lie alike mod 16.
__device__ __forceinline__ void copy_by_ring(const CopyParams& p, u8* shared) {
    const u64 head = min_of((0 - reinterpret_cast<u64>(p.dst)) & 15, p.bytes);
    const u64 body = (p.bytes - head) & ~15ull;
    if (threadIdx.x >= 32) {
        if (blockIdx.x == 0) {
            copy_ends(p, head, head + body, threadIdx.x - 32);
        }
        return;
    }
    const u64 chunks = (body + p.stage_bytes - 1) / p.stage_bytes;
    if (threadIdx.x != 0 || blockIdx.x >= chunks) {
        return;
    }
    const u64 mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
    auto begin = [&](u64 k) { return (blockIdx.x + k * gridDim.x) * p.stage_bytes; };
    auto chunk = [&](u64 k) {
        const u64 at = begin(k);
        return Chunk{p.src + head + at, static_cast<u32>(min_of(p.stage_bytes, body - at))};
    };
    Ring ring(shared, p.stages, p.stage_bytes);
    ring.run(mine, chunk, [&](u64 k, u32 stage, u32 bytes) { ptx::bulk_store(p.dst + head + begin(k), stage, bytes); });
    ring.drain();  // before this block's ticket, which the signal counts on
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

// dst and src lie differently mod 16. Vector i goes to the i-th aligned 16 bytes of dst, and needs the aligned vectors
// i and i + 1 of src, both of which must lie inside [src, src + bytes).
__device__ __forceinline__ void copy_by_shifting(const CopyParams& p) {
    const u64 src = reinterpret_cast<u64>(p.src);
    u64 head = (0 - reinterpret_cast<u64>(p.dst)) & 15;
    const u32 shift = static_cast<u32>((src + head) & 15);
    if (head < shift) {
        head += 16;  // the first aligned vector of src would begin before src
    }
    // Vectors i with (i + 2) * 16 <= bytes - head + shift: those whose second load ends inside.
    const u64 reach = p.bytes < head ? 0 : p.bytes - head + shift;
    const u64 vectors = reach < 32 ? 0 : reach / 16 - 1;
    if (vectors == 0) {
        // Fewer than 63 bytes: head is at most 30, and reach below 32.
        if (blockIdx.x == 0 && threadIdx.x < p.bytes) {
            copy_byte(p, threadIdx.x);
        }
        return;
    }
    if (blockIdx.x == 0) {
        copy_ends(p, head, head + vectors * 16, threadIdx.x);
    }
    const u8* from = p.src + head - shift;
    u8* into = p.dst + head;
    const u64 stride = static_cast<u64>(gridDim.x) * COPY_THREADS;
    for (u64 i = static_cast<u64>(blockIdx.x) * COPY_THREADS + threadIdx.x; i < vectors; i += UNROLL * stride) {
        ptx::Bytes16 value[UNROLL];
#pragma unroll
        for (u32 j = 0; j < UNROLL; ++j) {  // all loads first, so that they are under way together
            const u64 at = min_of(i + j * stride, vectors - 1) * 16;
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

// By thread 0 of each block: whether this run may move bytes. The words are all loaded before the first is looked at:
// each is a trip to the L2 cache, and a small message is mostly such trips.
__device__ __forceinline__ bool may_begin(const CopyParams& p, u64& epoch) {
    epoch = p.operation == nullptr ? 0 : epoch_of_this_run(p.operation);
    const bool stopped = poisoned(p.watch);
    const u64 credit = p.credit == nullptr ? ~0ull : ptx::load_acquire_sys(p.credit);
    if (stopped) {
        return false;
    }
    const u64 expected = epoch > p.lag ? epoch - p.lag : 0;
    return credit >= expected || wait_for_epoch(p.credit, expected, Waiting{p.op, p.peer, epoch}, p.watch);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::COPY_THREADS, 1)
    copy(const __grid_constant__ raymoe::CopyParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ bool may;
    u64 epoch = 0;
    if (threadIdx.x == 0) {
        may = may_begin(p, epoch);
        // Orders what the credit has let this rank read or overwrite, and what earlier kernels of the stream wrote to
        // src, before this thread's bulk copies.
        ptx::fence_proxy_async();
    }
    __syncthreads();  // hands `may` and, where a credit was acquired, the order that it gives to the other threads
    if (may && p.bytes != 0) {
        if (((reinterpret_cast<u64>(p.dst) ^ reinterpret_cast<u64>(p.src)) & 15) == 0) {
            copy_by_ring(p, shared);
        } else {
            copy_by_shifting(p);
        }
    }
    if (p.operation == nullptr) {
        return;
    }
    __syncthreads();  // orders the ordinary stores of this block's threads before thread 0's ticket
    // The ticket is taken by every block, also by those that may not move, so that it always wraps.
    if (threadIdx.x == 0 && last_block_out(p.operation) && !poisoned(p.watch)) {
        if (p.signal != nullptr) {
            // Orders the bytes of all blocks (their bulk stores drained, their ordinary stores acquired by the ticket)
            // before the epoch that announces them.
            ptx::store_release_sys(p.signal, epoch);
        }
        finish_run(p.operation, epoch);
    }
}
