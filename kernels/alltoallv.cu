// Rows of x to the slots at the ranks of their experts, by ordinary 16-byte loads and stores: the middle of a staged
// dispatch, between a launch of dispatch.cu that routes and one that places.
//
// A lane is a warp; lane l takes the tokens l, l + lanes, ... of those that num_tokens says are there, reads each row
// once and stores it at up to all ranks. When all lanes of a block are through, the block says so to every peer, also
// where it had nothing to send; rows have no words of their own. The protocol and the words are those of dispatch.cu.

#define BLOCK_WARPS 16  // one block fills a multiprocessor, as in a combine

#include "raymoe/dispatch/dispatch.cuh"
#include "raymoe/dispatch/sending.cuh"
#include "raymoe/dispatch/storing.cuh"

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    alltoallv(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    const auto [epoch, tokens, may] = begin_dispatch(p);
    if (!may) {
        return;
    }
    const u32 warp = threadIdx.x / 32, lane = blockIdx.x * p.sender_lanes + warp;
    const u32 wanted = ~(1u << p.peers.rank);  // the placers see to this rank's own rows
    for (u32 token = lane; warp < p.sender_lanes && token < tokens; token += p.lanes()) {
        const u32 mask = p.masks[token] & wanted;
        if (mask != 0) {
            store_row(p, epoch, token, mask);
        }
    }
    say_done(p, epoch, blockIdx.x);
}
