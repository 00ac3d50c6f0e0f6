// Writes which dispatch this rank's backward pass belongs to, for the gather of all ranks' passes. Counts it as a
// dispatch: a rank that runs one while another rank routes must go on with the same numbers. One thread.

#define ANY_GPU

#include "raymoe/nccl/statuses.cuh"

namespace raymoe {

struct PublishPassParams {
    const u8* number;  // u32[2], the halves of a word: the dispatch
    u8* into;          // Status
    const u8* mark;    // u64, whose bits are inverted in the number: see passes.cuh; null: none
    u8* dispatches;    // u64: how many dispatches there were. One more now
    u32 site;          // of the dispatch, such as a layer, below 2^29; 0: none
    u32 unused;
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(32) publish_pass(const __grid_constant__ raymoe::PublishPassParams p) {
    using namespace raymoe;
    if (threadIdx.x == 0) {
        const u64 number = static_cast<u64>(ptx::load_4(p.number + 4)) << 32 | ptx::load_4(p.number);
        ptx::store_8(p.dispatches, ptx::load_8(p.dispatches) + 1);
        store_status(p.into, pass_status(p.site, p.mark == nullptr ? number : number ^ ptx::load_8(p.mark)));
    }
}
