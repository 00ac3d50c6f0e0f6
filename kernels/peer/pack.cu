// Copies the rows of x that some peer needs into this rank's own slots. The copy engine copies these slots to every
// peer. This is the second step of a staged dispatch by the copy engine.
//
//   dispatch (PART_ROUTE)   masks; counts, routing entries and heads to every rank
//   pack                    waits for the heads of all ranks, then writes this rank's own slots
//   a copy for each peer    this rank's slots, all T', to the same slots there
//   announce                tells every peer, then waits for the peers' words
//   dispatch (PART_PLACE)   rows to their places
//
// Addresses of a captured copy are fixed, so here the slots have one buffer: `rows[0]` and `rows[1]` are equal.
//
// Why no slot is overwritten before it is read. Only the copies of rank s write the slots of s at rank p. The copies of
// epoch e + 1 begin after this kernel of s, which has waited for p's head of e + 1. A launch of PART_ROUTE at p stores
// that word. p's stream began that launch after its readers of e.
//
// Why this also holds for a rank that gives up. Captured copies cannot be cancelled. But a poisoned rank's pack stores
// nothing. So the copies carry the same bytes as the last time, and a peer that still reads finds the same bytes. For
// that reason the copies start from slots and not from x.
//
// Memory order of the one word that crosses ranks (this kernel writes none):
//   heads   writer: the last counting block of p, after all readers of e at p: fence.acq_rel.sys, relaxed store
//           reader: for each rank one thread of every block: acquire; __syncthreads; ordinary stores into own slots.
//           The copies are later in the stream

#define BLOCK_WARPS 16  // one block fills an SM, as in a combine

#include "raymoe/peer/dispatch/beginning.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/storing.cuh"
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
