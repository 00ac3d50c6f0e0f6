// A placement block: a block that finds the places of rows, and whose placement warps copy them there (placing.cuh).
#pragma once

#include "raymoe/peer/dispatch/beginning.cuh"
#include "raymoe/peer/dispatch/passes.cuh"
#include "raymoe/peer/dispatch/placing.cuh"

namespace raymoe {

// Where in a block's shared memory the rings of its placement warps begin.
__device__ __forceinline__ u32 rings_at(const DispatchParams& p) {
    return (Places::shared_words(p) * 4 + QUEUES_BYTES + PLAN_BYTES + 127) & ~127u;
}

// Finds the places of this epoch's rows, and stores counts and this block's share of the gaps. All threads of the block
// call this. Returns false if the rows do not fit.
__device__ __forceinline__ bool find_places(const DispatchParams& p, u32 parity, Places& where, Share share) {
    where.find([&](u32 source, u32 expert) {
        return ptx::load_4(p.counts_at(p.peers.rank, parity, source, expert));
    });
    return begin_placing(p, where, share, {p.rank_layout != 0, p.zero_slot});
}

// Where in a mixed block's shared memory the sender warps begin: after all that counting and placing use.
// raymoe/exchange/peer/dispatch_grid.py computes the same sum.
__device__ __forceinline__ u32 mixed_sender_memory(const DispatchParams& p) {
    const u32 placing = rings_at(p) + p.placement_warps * PlacementWarp::memory(p);
    const u32 counting = (WARPS + 1) * p.experts * 4;
    return ((placing > counting ? placing : counting) + 127) & ~127u;
}

// Places rows as the placement block with this number. All threads of the block call this. If a wait fails, the
// last block out stores counts of 0.
__device__ inline void place_rows(const DispatchParams& p, u64 epoch, u32 block, u8* shared) {
    const u32 parity = epoch & 1, warp = threadIdx.x / 32, ranks = p.peers.ranks;
    if (KNOWN && block == 0) {
        announce_known(p, epoch);
    }
    if (!await_heads(p, epoch) || (KNOWN && !all_run_this_pass(p, epoch))) {
        return;
    }
    trace(p.trace, AT_COUNTS);
    if (p.at_once && !await_all(p, epoch)) {
        return;
    }
    u32* queues = reinterpret_cast<u32*>(shared) + Places::shared_words(p);
    u32* places = queues + WARPS * QUEUE;
    const u32 before_rings = rings_at(p);
    RowPlaces where(p, reinterpret_cast<u32*>(shared));
    if (!find_places(p, parity, where, {block, p.placement_blocks})) {
        return;
    }
    const u32 warps = p.placement_blocks * p.placement_warps;
    const u32 numbers = (where.most_tokens() + warps - 1) / warps;
    const Plan plan{places, p.placement_warps, ranks, p.topk};
    const u32 window = PLAN_BYTES / (p.placement_warps * ranks * p.topk * 4);
    const bool drives = (OWN_FROM_X || !p.rank_layout) && warp < p.placement_warps;
    PlacementWarp placement_warp(p, epoch, block, queues + warp * QUEUE,
                                 shared + before_rings + warp * PlacementWarp::memory(p), drives);
    bool ok = true;
    for (u32 first = 0; first < numbers; first += window) {
        const u32 count = numbers - first < window ? numbers - first : window;
        for (u32 i = threadIdx.x; i < count * p.placement_warps * ranks; i += THREADS) {
            const u32 number = i / (p.placement_warps * ranks), in = i / ranks % p.placement_warps, step = i % ranks;
            const u32 token = in * p.placement_blocks + block + (first + number) * warps;
            u32* row = plan.of(number, in, step);
            const u32 source = p.peers.in_turn(step);
            if (token < where.tokens(source)) {
                plan_row(p, where, parity, source, token, row);
            } else {
                *row = NOWHERE;
            }
        }
        block_barrier();
        trace(p.trace, AT_PLANNED);
        if (drives) {
            ok = ok && placement_warp.run(plan, first, count);
        }
        block_barrier();
    }
    if (drives) {
        placement_warp.finish();
        trace(p.trace, AT_PLACED);
    }
}

}  // namespace raymoe
