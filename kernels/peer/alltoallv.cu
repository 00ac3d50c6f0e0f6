// Stores rows of x into slots at the ranks of their experts, by ordinary 16-byte loads and stores. This is the middle
// of a staged dispatch, between a launch of dispatch.cu that routes and one that places.
//
// Sender warp w takes the tokens w, w + warps, ... of the first `num_tokens`. It reads each row once and stores it at
// all ranks that need it. dispatch.cu has the memory map and the argument why no slot is overwritten.
//
// Memory order of the one word that crosses ranks:
//   done    writer: rows by ordinary stores of all sender warps; __syncthreads; for each peer one thread:
//           fence.acq_rel.sys, relaxed store. Also if the block had nothing to send. Rows have no words of their own
//           reader: each block of the launch that places, and its last block out: acquire; __syncthreads; before the
//           bulk load of a slot fence.proxy.async

#define BLOCK_WARPS 16  // one block fills an SM, as in a combine

#include "raymoe/peer/dispatch/beginning.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/sending.cuh"
#include "raymoe/peer/dispatch/storing.cuh"

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    alltoallv(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    const auto [epoch, tokens, may] = begin_dispatch(p);
    if (!may) {
        return;
    }
    const u32 warp = threadIdx.x / 32, sender_warp = blockIdx.x * p.sender_warps + warp;
    const u32 wanted = ~(1u << p.peers.rank);  // the placement blocks copy this rank's own rows
    for (u32 token = sender_warp; warp < p.sender_warps && token < tokens; token += p.all_sender_warps()) {
        const u32 mask = p.masks[token] & wanted;
        if (mask != 0) {
            store_row(p, epoch, token, mask);
        }
    }
    announce_done(p, epoch, blockIdx.x);
}
