// Stores rows of x into slots by ordinary 16-byte loads and stores.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 VECTORS = 4;  // 16-byte vectors that a thread has in flight at a time

// Stores row `token` of x at every rank of the mask. All threads of the warp call this.
__device__ inline void store_row(const DispatchParams& p, u64 epoch, u32 token, u32 mask) {
    const u32 parity = epoch & 1;
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
            u8* slot = p.slot_at(peer, parity, p.peers.rank, token);
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
