// Says that a chunk of rows has come over the rail: sets its word to the number of the crossing. It is enqueued behind
// the kernel that stores the rows, on the same stream. dispatch/chunks.cuh describes the words.

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct ChunkParams {
    u64* words;  // {number of the crossing, word of each chunk}
    u32 chunk;
    u32 unused;
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(32, 1)
    advance_chunk(const __grid_constant__ raymoe::ChunkParams p) {
    using namespace raymoe;
    if (threadIdx.x == 0) {
        // Orders the rows, which earlier kernels of this stream have stored, before the word. At system scope, because
        // NCCL's kernels may belong to another domain of memory synchronisation than the readers.
        ptx::store_release_sys(p.words + 1 + p.chunk, ptx::load_8(p.words));
    }
}
