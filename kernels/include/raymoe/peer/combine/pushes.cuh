// The pushes of a warp of the local reduction: sums go from its stages to the peers' slots, and words follow them.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/sum_stages.cuh"

namespace raymoe {

// Waits until all groups but the `younger` last ones, which are the steps of a piece, have been performed. The thread
// that commits calls this. The instruction takes a constant only.
__device__ __forceinline__ void wait_for_older(u32 younger) {
    switch (younger) {
        case 1: ptx::bulk_wait<1>(); break;
        case 2: ptx::bulk_wait<2>(); break;
        case 3: ptx::bulk_wait<3>(); break;
        default: ptx::bulk_wait<4>();
    }
}

// All threads of a warp make one.
class Pushes {
  public:
    // `step_bytes`: of a stage, before its stamp.
    __device__ Pushes(const CombineParams& p, u32 step_bytes)
        : p_(p), step_bytes_(step_bytes), leads_(threadIdx.x % 32 == 0) {}

    __device__ __forceinline__ void begin(u64 epoch) { epoch_ = epoch; }

    // Stores the numbers of a token's entries after its sum. The __syncwarp of the next step hands these stores to the
    // thread that announces the piece. All threads of the warp call this.
    __device__ __forceinline__ void push_numbers(u8* slot, u64 entry) const {
        const u32 k = threadIdx.x % 32;
        const u32 number = p_.number_of(entry);
        if (k < p_.topk) {
            ptx::store_4(slot + p_.wire_row_bytes + k * 4, number);
        }
    }

    // Pushes a step out of its stage. The last step of a piece also pushes its stamp. No thread reads the bytes after a
    // row's end, up to a multiple of 16. The leading thread calls this.
    __device__ __forceinline__ void push_step(u8* slot, u32 stage, u32 step, u32 last, u32 number) const {
        const u32 end = min(step + STEP, last);
        const u32 bytes = ((end - step) * Crossed::BYTES + 15) & ~15u;
        ptx::bulk_store(slot + static_cast<u64>(step) * Crossed::BYTES, stage, bytes);
        if (STAMPS && end == last) {
            const u32 stamp = stage + step_bytes_;
            ptx::shared_store_16(stamp, {epoch_, epoch_});
            ptx::fence_proxy_async_shared();  // orders the stamp before the bulk store of it
            ptx::bulk_store(slot + p_.stamp_at(number % p_.pieces), stamp, STAMP_BYTES);
        }
        ptx::bulk_commit();
        trace_first(p_.trace, AT_FIRST_PUSH);
        trace(p_.trace, AT_LAST_PUSH);
    }

    // All steps of a piece are pushed. Announces older pieces if there are enough. All threads of the warp call this.
    __device__ __forceinline__ void end_piece(u32 source, u32 number, u32 steps) {
        if (!leads_) {
            return;
        }
        if (unannounced_ == p_.together) {
            wait_for_older(steps);  // but not for this piece, so the wait is short
            announce_arrived();
        }
#pragma unroll
        for (u32 i = 0; i < MOST_TOGETHER; ++i) {
            words_[i] = i == unannounced_ ? p_.arrival_at(source, p_.peers.rank, number) : words_[i];
        }
        ++unannounced_;
    }

    // Returns when every piece has arrived and its word is stored. All threads of the warp call this.
    __device__ __forceinline__ void finish() {
        if (leads_) {
            ptx::bulk_wait<0>();
            announce_arrived();
        }
    }

  private:
    // Stores the words of all pieces not yet announced. The calling thread has awaited them.
    __device__ __forceinline__ void announce_arrived() {
        // Also the numbers, which the warp's threads have stored and handed on.
        ptx::fence_acq_rel_sys();  // orders the pieces, whose bulk stores this thread has awaited, before their words
#pragma unroll
        for (u32 i = 0; i < MOST_TOGETHER; ++i) {
            if (i < unannounced_) {
                ptx::store_relaxed_sys(words_[i], epoch_);
            }
        }
        unannounced_ = 0;
    }

    const CombineParams& p_;
    u32 step_bytes_;
    bool leads_;
    u64 epoch_ = 0;
    u32 unannounced_ = 0;  // pieces that are pushed, and whose words are not stored yet
    u64* words_[MOST_TOGETHER] = {};  // their words
};

}  // namespace raymoe
