// Announces a chunk of rows that has come over the rail: sets its word to the number of the crossing. It is enqueued
// after the kernel that stores the rows, on the same stream. peer/dispatch/chunks.cuh describes the words.
//
// The host can end that kernel without its rows (raymoe/net/nccl_rail.py). It sets the rail's word `aborted` before. No
// chunk is announced from then on, in replays too, so a dispatch that waits for one fails as for rows that are late.

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct ChunkParams {
    u64* words;  // {number of the crossing, word of each chunk}
    // Host memory of the rail. Writer: the host, 0 to 1, once, before it lets the kernel in front of this one end. That
    // kernel has then read a word that the host stored later, and this one begins after it: a relaxed load is enough.
    const u64* aborted;
    u32 chunk;
    u32 unused;
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(32, 1)
    advance_chunk(const __grid_constant__ raymoe::ChunkParams p) {
    using namespace raymoe;
    if (threadIdx.x == 0 && ptx::load_relaxed_sys(p.aborted) == 0) {  // 1 to 2 us, since it lies across PCIe
        // Orders the rows, which earlier kernels of this stream have stored, before the word. The scope is the system,
        // because NCCL's kernels may belong to another domain of memory synchronisation than the readers.
        ptx::store_release_sys(p.words + 1 + p.chunk, ptx::load_8(p.words));
    }
}
