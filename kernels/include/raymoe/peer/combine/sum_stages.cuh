// The stages of a warp for sums that leave by bulk stores, a step in each, taken in turn.
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"

namespace raymoe {

constexpr u32 STEPS_UNDER_WAY = FED ? 2 : 4;  // of a warp, each in its stage

// All threads of a warp make one, on STEPS_UNDER_WAY * bytes() of shared memory.
class SumStages {
  public:
    __device__ SumStages(u32 memory, u32 step_bytes)
        : memory_(memory), step_bytes_(step_bytes), leads_(threadIdx.x % 32 == 0) {}

    // The bytes of a stage, which holds one step and with stamps a stamp.
    static __device__ __forceinline__ u32 bytes(u32 step_bytes) { return step_bytes + (STAMPS ? STAMP_BYTES : 0); }

    // Returns the next stage. All threads of the warp call this.
    __device__ __forceinline__ u32 next() {
        const u32 stage = memory_ + groups_++ % STEPS_UNDER_WAY * bytes(step_bytes_);
        if (leads_) {
            ptx::bulk_wait_read<STEPS_UNDER_WAY - 1>();  // the step that was in this stage has been read
        }
        __syncwarp();
        return stage;
    }

    // Ends this warp's stores to a stage: the leading thread may then begin bulk stores out of it. All threads of the
    // warp call this.
    static __device__ __forceinline__ void fill() {
        ptx::fence_proxy_async_shared();  // orders this thread's stores to the stage before the bulk store out of it
        __syncwarp();
    }

  private:
    u32 memory_;
    u32 step_bytes_;
    bool leads_;
    u32 groups_ = 0;
};

}  // namespace raymoe
