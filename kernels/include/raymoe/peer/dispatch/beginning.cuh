// How a block of a dispatch begins, what it waits for first, and why the step's data is refused at its end.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"

namespace raymoe {

// The state that every block of a dispatch reads first.
struct DispatchRun {
    u64 epoch;
    u32 tokens;  // of x to send; 0 if more are asked for than there are, which is refused
    bool may;    // the workspace is not poisoned
};

// Loads that state, and hands it to the block. Work between the constructor and `run` overlaps with the loads.
class DispatchBeginning {
  public:
    __device__ __forceinline__ explicit DispatchBeginning(const DispatchCall& p) : p_(p) {
        const bool first = threadIdx.x == 0;
        if (first) {
            trace(p.trace, AT_START);
        }
        asked_ = ptx::load_4_if(first && p.num_tokens != nullptr, p.num_tokens, p.tokens);
        before_.load(first, p.operation, p.watch);
    }

    // All threads of the block call this.
    __device__ __forceinline__ DispatchRun run() const {
        __shared__ DispatchRun run;
        if (threadIdx.x == 0) {
            run = {before_.epoch + 1, refused() ? 0 : asked_, before_.poison == 0};
        }
        __syncthreads();
        return run;
    }

    // Whether more tokens are asked for than there are. Valid in the first thread.
    __device__ __forceinline__ bool refused() const { return asked_ > p_.tokens; }

  private:
    const DispatchCall& p_;
    Before before_;
    u32 asked_;
};

// All threads of the block call this.
__device__ inline DispatchRun begin_dispatch(const DispatchCall& p) { return DispatchBeginning(p).run(); }

// Waits until the heads of all ranks have this epoch. All threads of the block call this. Returns false if a wait
// failed.
__device__ inline bool await_heads(const DispatchParams& p, u64 epoch) {
    bool ok = true;
    if (threadIdx.x < p.peers.ranks) {
        ok = wait_for_epoch(p.peers.flag_of(threadIdx.x, p.heads), epoch, Waiting{p.op, threadIdx.x, epoch}, p.watch);
    }
    return block_barrier_and(ok);
}

// Why this step's data is refused, from what the blocks left in `scratch`; resets `scratch` for the next step.
__device__ inline Refusal refusal_of(const DispatchCall& p, u64 epoch) {
    Scratch& scratch = *p.scratch;
    const u64 bad = ptx::load_relaxed_gpu(&scratch.bad_entry), needed = ptx::load_relaxed_gpu(&scratch.needed);
    const u64 bad_count = ptx::load_relaxed_gpu(&scratch.bad_count);
    scratch.bad_entry = scratch.bad_count = ~0ull;
    scratch.needed = 0;
    if (p.num_tokens != nullptr && *p.num_tokens > p.tokens) {
        const int asked = static_cast<int>(*p.num_tokens);  // below 0 is refused too, and reported as negative
        return {CAUSE_TOKENS, p.tokens, static_cast<u64>(static_cast<long long>(asked))};
    }
    if (bad != ~0ull) {
        return {CAUSE_ID, static_cast<u32>(bad / p.topk), static_cast<u64>(p.id(bad))};
    }
    if (bad_count != ~0ull) {
        return {CAUSE_EXPERT, static_cast<u32>(bad_count >> 32), bad_count & 0xFFFFFFFF};
    }
    return needed != 0 ? Refusal{CAUSE_CAPACITY, 0, needed} : Refusal{CAUSE_NONE, 0, epoch};
}

}  // namespace raymoe
