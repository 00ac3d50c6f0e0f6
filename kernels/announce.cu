// Tells every peer that this rank's rows are there, and waits until theirs are: the step of a staged dispatch that
// follows the copies (pack.cu). One warp, so that nothing else on the GPU waits for the link.
//
// The words are those of dispatch.cu, of one sender for each source. What the copy engine wrote is complete before this
// kernel begins, because it comes later in the stream.
//
// PART_SEND tells, PART_PLACE waits; the halves of a split dispatch do one each.

#define BLOCK_WARPS 1

#include "raymoe/dispatch/dispatch.cuh"
#include "raymoe/dispatch/sending.cuh"

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    announce(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    const auto [epoch, tokens, may] = begin_dispatch(p);
    if (may && p.parts & PART_SEND) {
        say_done(p, epoch, 0);
    }
    if (may && p.parts & PART_PLACE) {
        await_all(p, epoch);  // where that fails, the launch that places finds the poison
    }
}
