// Tells every peer that this rank's rows have been copied to it, and waits for the same word of every peer. It is the
// step of a staged dispatch after the copies (pack.cu). One warp, so that nothing else on the GPU waits for the link.
//
// PART_SEND tells, PART_PLACE waits; in a split dispatch they are two launches.
//
// Memory order of the one word that crosses ranks; each source has one sender:
//   done    writer: the copies are complete before this kernel begins, because it is later in the stream; then for each
//           peer one thread: fence.acq_rel.sys, relaxed store
//           reader: this kernel at the peer: acquire. The launch that places acquires the word again, then runs
//           __syncthreads, and fence.proxy.async before the bulk load of a slot

#define BLOCK_WARPS 1

#include "raymoe/peer/dispatch/beginning.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/sending.cuh"

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    announce(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    const auto [epoch, tokens, may] = begin_dispatch(p);
    if (may && p.parts & PART_SEND) {
        announce_done(p, epoch, 0);
    }
    if (may && p.parts & PART_PLACE) {
        await_all(p, epoch);  // if that fails, the launch that places finds the poison
    }
}
