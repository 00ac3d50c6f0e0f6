// Rows of x to the slots at the ranks of their experts, by ordinary 16-byte loads and stores: the middle of a staged
// dispatch, between a launch of dispatch.cu that routes and one that places.
//
// A lane is a warp; lane l takes the tokens l, l + lanes, ... of those that num_tokens says are there, reads each row
// once and stores it at up to all ranks. When all are through it says ALL_DONE to every peer, also where it had nothing
// to send. The protocol and the words are those of dispatch.cu.

#include "raymoe/dispatch.cuh"
#include "raymoe/ptx.cuh"
#include "raymoe/sending.cuh"
#include "raymoe/sync.cuh"

namespace raymoe {

constexpr u32 VECTORS = 4;  // 16-byte vectors that a thread has under way at a time

// By a whole warp: row `token` of x to every rank of the mask.
__device__ inline void store_row(const DispatchParams& p, u64 epoch, u32 token, u32 mask) {
    const u32 half = epoch & 1;
    const u8* row = p.x + static_cast<u64>(token) * p.row_bytes;
    const u32 vectors = p.row_bytes / 16;
    for (u32 first = threadIdx.x % 32; first < vectors; first += 32 * VECTORS) {
        ptx::Bytes16 loaded[VECTORS];
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            if (first + 32 * i < vectors) {
                loaded[i] = ptx::load_16(row + (first + 32 * i) * 16ull);
            }
        }
        for (u32 step = 0; step < p.peers.ranks; ++step) {
            const u32 peer = p.peers.in_turn(step);
            if (!(mask >> peer & 1)) {
                continue;
            }
            u8* slot = p.slot_at(peer, half, p.peers.rank, token);
            if (STAMPS && first == 0) {
                ptx::store_16(slot + p.slot_bytes - STAMP_BYTES, {epoch, epoch});
            }
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                if (first + 32 * i < vectors) {
                    ptx::store_16(slot + (first + 32 * i) * 16ull, loaded[i]);
                }
            }
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 2)
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
