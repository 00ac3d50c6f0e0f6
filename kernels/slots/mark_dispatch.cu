// Writes the digest of a dispatch's placement into the upper half of the number that its combine sends. So ranks whose
// tables differ refuse the step (raymoe/exchange/refusal.py). Why the dispatch is refused, if it is, stays. One thread.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct MarkDispatchParams {
    u8* refusal;       // u32 cause, u32 other, u64 number: Refusal in peer/dispatch/dispatch.cuh
    const u8* digest;  // i32
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(32) mark_dispatch(const __grid_constant__ raymoe::MarkDispatchParams p) {
    using namespace raymoe;
    if (threadIdx.x == 0 && ptx::load_4(p.refusal) == 0) {
        ptx::store_4(p.refusal + 12, ptx::load_4(p.digest));
    }
}
