// Compares the passes of all ranks: in a backward pass, the dispatches to which they belong. Where they differ, the
// rows that came are those of different dispatches. So it fills them with NaN, and stores the passes for the host.
//
// It is the last kernel of a dispatch in a backward pass. All ranks have the same passes, and get the same result.

#define ANY_GPU

#include "raymoe/nccl/statuses.cuh"

namespace raymoe {

struct ComparePassesParams {
    const u8* passes;  // Status of each rank, `stride` bytes apart
    u8* rows;
    u8* refused;  // u64 written, u64 unused, then the Status of each rank in the first such step since `written` was 0
    u64 stride;
    u64 bytes;  // of the rows, a multiple of 16
    u32 ranks;
    u32 unused;
};

// The first warp calls this.
__device__ __forceinline__ bool differ(const ComparePassesParams& p) {
    const Status first = load_status(p.passes);
    bool differs = false;
    for (u32 rank = threadIdx.x; rank < p.ranks; rank += 32) {
        const Status status = load_status(p.passes + rank * p.stride);
        differs |= status.other != first.other || status.number != first.number;
    }
    differs = __any_sync(0xFFFFFFFF, differs);
    if (differs && blockIdx.x == 0 && ptx::load_8(p.refused) == 0) {
        for (u32 rank = threadIdx.x; rank < p.ranks; rank += 32) {
            store_status(p.refused + 16 + rank * sizeof(Status), load_status(p.passes + rank * p.stride));
        }
        __syncwarp();  // all threads have read `written` before it changes
        if (threadIdx.x == 0) {
            ptx::store_8(p.refused, 1);
        }
    }
    return differs;
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256)
    compare_passes(const __grid_constant__ raymoe::ComparePassesParams p) {
    using namespace raymoe;
    __shared__ bool differs;
    if (threadIdx.x < 32) {
        const bool passes_differ = differ(p);
        if (threadIdx.x == 0) {
            differs = passes_differ;
        }
    }
    __syncthreads();
    if (!differs) {
        return;
    }
    // All bits are one: NaN in each type of rows.
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x * 16;
    for (u64 at = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < p.bytes; at += stride) {
        ptx::store_16(p.rows + at, {~0ull, ~0ull});
    }
}
