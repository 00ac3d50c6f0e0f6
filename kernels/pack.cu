// Rows of x that some peer needs into this rank's own slots, from where the copy engine takes them to every peer: the
// second step of a staged dispatch by the copy engine.
//
//   dispatch (PART_ROUTE)   masks; counts, told entries and heads to every rank
//   pack                    waits for the heads of all ranks, then writes this rank's own slots
//   a copy for each peer    this rank's slots, all T' of them, to the same slots there
//   announce                says so to every peer, then waits for theirs
//   dispatch (PART_PLACE)   rows to their places
//
// Addresses of a captured copy are fixed, so here slots have no halves: `rows[0]` and `rows[1]` are one.
//
// Why no slot is overwritten before it is read. The slots of rank s at rank p are written by the copies of s alone.
// Those of epoch e + 1 begin after this kernel of s, which has waited for p's head of e + 1. That word is stored by p's
// launch of PART_ROUTE, which its stream began after its readers of e.
//
// Why that holds for a rank that gives up. Nobody can call a captured copy back. But this kernel stores nothing once it
// is poisoned, so what is copied then is what was copied before: the bytes that the peer may still be reading are
// replaced by themselves. That is what the slots in between are for; copies right out of x would not do.

#define BLOCK_WARPS 16  // one block fills a multiprocessor, as in a combine

#include "raymoe/dispatch/dispatch.cuh"
#include "raymoe/dispatch/storing.cuh"
#include "raymoe/base/sync.cuh"

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    pack(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    const auto [epoch, tokens, may] = begin_dispatch(p);
    if (!may || !await_heads(p, epoch)) {
        return;
    }
    const u32 mine = 1u << p.peers.rank;
    for (u32 token = blockIdx.x * WARPS + threadIdx.x / 32; token < tokens; token += gridDim.x * WARPS) {
        if ((p.masks[token] & ~mine) != 0) {
            store_row(p, epoch, token, mine);
        }
    }
}
