// Pushes rows to fixed slots of peers: a dispatch without routing, counts, placement and the rows that stay on their
// rank. It is the baseline of dispatch, and no part of it. No rank reads the rows that arrive.
//
// All ranks run it, and every run has a number, the epoch:
//   1. thread 0 of each block drives a ring over its share of the plan: it loads each row once, and stores it to each
//      rank that the plan names, into slot (this rank, token)
//   2. the last block out releases the epoch into this rank's word at every peer
//   3. it waits, bounded, until every peer's word here reaches the epoch, then stores the epoch as this rank's count
// The next run overwrites the slots. That needs no protection, because there is no reader.
//
// Memory, the same offsets on every rank: `slots`, [R][tokens] rows; `arrived`, a word for each rank, 128 bytes apart.
// Dynamic shared memory: the ring (ring.cuh), a row a stage. 32 threads a block; the whole grid is resident.

#include "raymoe/base/peer.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

struct RowPushParams {
    Peers peers;
    const u8* x;       // [tokens] rows of this rank
    const u64* plan;   // token << 32 | mask of its destination ranks; this rank's memory, read only
    const u32* count;  // entries of the plan
    u64 slots;         // offset of the region

    // Offset of the words. Writer of word r: the last block out of rank r, by a release at system scope of its epoch,
    // when all rows of the run have arrived. Reader: the owner, by an acquire. It only grows and is never reset: a
    // replay computes its next value from its own count, and a peer may be one run ahead.
    u64 arrived;

    Operation* operation;
    Watch watch;
    u32 op;  // for the error record
    u32 tokens;
    u32 row_bytes;
    u32 stages;
};

constexpr u32 ROW_PUSH_THREADS = 32;

// Run by thread 0. Blocks take contiguous shares of the plan, so that most entries share a cache line with the
// previous.
__device__ __forceinline__ void push_rows(const RowPushParams& p, u8* shared) {
    const u64 rows = *p.count;
    const u64 begin = rows * blockIdx.x / gridDim.x;
    const u64 end = rows * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) {
        return;
    }
    const u64* plan = p.plan + begin;
    auto row = [&](u64 k) { return Chunk{p.x + (plan[k] >> 32) * p.row_bytes, p.row_bytes}; };
    auto store = [&](u64 k, u32 stage, u32 bytes) {
        const u64 entry = plan[k];
        const u64 slot = static_cast<u64>(p.peers.rank) * p.tokens + (entry >> 32);
        for (u32 step = 0; step + 1 < p.peers.ranks; ++step) {
            const u32 peer = p.peers.in_turn(step);
            if (entry >> peer & 1) {
                ptx::bulk_store(p.peers.slot(peer, p.slots, slot, p.row_bytes), stage, bytes);
            }
        }
    };
    Ring ring(shared, p.stages, p.row_bytes);
    ring.run(end - begin, row, store);
    ring.drain();  // the rows must have arrived before this block's ticket, because the words announce them
}

// Run by the last block out, whose ticket has acquired the rows of all blocks.
__device__ __forceinline__ void meet_peers(const RowPushParams& p, u64 epoch) {
    for (u32 step = 0; step + 1 < p.peers.ranks; ++step) {
        // Orders the rows of all blocks before the word that announces them.
        ptx::store_release_sys(p.peers.flag(p.peers.in_turn(step), p.arrived), epoch);
    }
    for (u32 step = 0; step + 1 < p.peers.ranks; ++step) {
        const u32 peer = p.peers.in_turn(step);
        if (!wait_for_epoch(p.peers.flag_of(peer, p.arrived), epoch, Waiting{p.op, peer, epoch}, p.watch)) {
            return;
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROW_PUSH_THREADS, 1)
    row_push(const __grid_constant__ raymoe::RowPushParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    if (threadIdx.x != 0) {
        return;
    }
    const u64 epoch = epoch_of_this_run(p.operation);
    const bool stopped = poisoned(p.watch);
    if (!stopped) {
        ptx::fence_proxy_async();  // orders what earlier kernels wrote to x before this thread's bulk loads
        push_rows(p, shared);
    }
    // Every block takes the ticket, even one that may not push, so that the ticket always wraps.
    if (last_block_out(p.operation)) {
        if (!poisoned(p.watch)) {
            meet_peers(p, epoch);
        }
        finish_run(p.operation, epoch);
    }
}
