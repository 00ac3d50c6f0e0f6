// Writes the ids and weights of this rank's tokens for the all-gather, in a fixed size. It is the first kernel of a
// dispatch by NCCL.
//
// A token that is absent gets no expert. An id out of range also becomes no expert, and this rank refuses the step. The
// step goes on, so that no rank waits for another, and the refusal travels with the combine.

#define ANY_GPU

#include "raymoe/nccl/rounds.cuh"

namespace raymoe {

// Words that stay from dispatch to dispatch. Between runs `bad_entry` is ~0 and `ticket` 0.
struct PublishScratch {
    u64 bad_entry;  // the first entry whose id is out of range
    u64 number;     // the last dispatch, counted from 1
    u32 ticket;     // blocks that are done
    u32 unused;
};
static_assert(sizeof(PublishScratch) == 24, "");

struct PublishRoutingParams {
    DispatchMemory memory;
    u8* saved;                // memory of the dispatch
    const u8* topk_idx;      // [x_rows][K], of 4 or 8 bytes
    const u8* topk_weights;  // [x_rows][K] f32
    const u8* num_tokens;    // i32[1]; null: x_rows
    const u8* forward;       // u64: the dispatch whose backward pass this is; null: this is none
    const u8* mark;          // u64, whose bits are inverted in that number: see passes.cuh; null: none
    PublishScratch* scratch;
    u32 wide_topk_idx;
    u32 x_rows;
    u32 experts;  // of all ranks
    u32 site;     // in a backward pass: the call site of its dispatch, such as a layer
};

__device__ __forceinline__ long long id_at(const PublishRoutingParams& p, u64 entry) {
    return p.wide_topk_idx ? static_cast<long long>(ptx::load_8(p.topk_idx + entry * 8))
                           : static_cast<long long>(static_cast<int>(ptx::load_4(p.topk_idx + entry * 4)));
}

// The last thread out calls this. Writes why this rank refuses, if it does, and the dispatch's number.
__device__ __forceinline__ void finish_publishing(const PublishRoutingParams& p, u32 tokens) {
    const u64 bad = ptx::load_relaxed_gpu(&p.scratch->bad_entry);
    Status refusal{CAUSE_NONE, 0, 0};
    if (tokens > p.x_rows) {
        refusal = {CAUSE_TOKENS, p.x_rows, static_cast<u64>(static_cast<long long>(static_cast<int>(tokens)))};
    } else if (bad != ~0ull) {
        refusal = {CAUSE_ID, static_cast<u32>(bad / p.memory.topk), static_cast<u64>(id_at(p, bad))};
    }
    DispatchRecord* record = p.memory.record_of(p.saved);
    store_status(&record->refusal, refusal);
    const u64 number = ptx::load_relaxed_gpu(&p.scratch->number) + 1;
    ptx::store_8(&record->number, number);
    u64 forward = p.forward == nullptr ? 0 : ptx::load_8(p.forward);
    if (p.forward != nullptr && p.mark != nullptr) {
        forward ^= ptx::load_8(p.mark);
    }
    store_status(p.memory.pass_of(p.saved, p.memory.rank), pass_status(p.site, forward));
    // Relaxed stores do: only later kernels of this stream read these words.
    ptx::store_relaxed_gpu(&p.scratch->number, number);
    ptx::store_relaxed_gpu(&p.scratch->bad_entry, ~0ull);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256)
    publish_routing(const __grid_constant__ raymoe::PublishRoutingParams p) {
    using namespace raymoe;
    // As unsigned, a negative count is large, and so refused.
    const u32 tokens = p.num_tokens == nullptr ? p.x_rows : ptx::load_4(p.num_tokens);
    const u64 there = static_cast<u64>(tokens <= p.x_rows ? tokens : 0) * p.memory.topk;
    u8* topk_idx = p.memory.topk_idx_of(p.saved, p.memory.rank);
    u8* topk_weights = p.memory.topk_weights_of(p.saved, p.memory.rank);
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < p.memory.entries(); entry += stride) {
        u32 expert = NOWHERE, weight = 0;
        if (entry < there) {
            const long long id = id_at(p, entry);
            weight = ptx::load_4(p.topk_weights + entry * 4);
            if (id >= 0 && id < p.experts) {
                expert = static_cast<u32>(id);
            } else if (id != -1) {
                ptx::atomic_min(&p.scratch->bad_entry, entry);
            }
        }
        ptx::store_4(topk_idx + entry * 4, expert);
        ptx::store_4(topk_weights + entry * 4, weight);
    }
    __syncthreads();  // orders the block's atomics on `bad_entry` before the ticket
    const u32 last = gridDim.x - 1;
    if (threadIdx.x == 0 && (last == 0 || ptx::atomic_increment_wrapping(&p.scratch->ticket, last) == last)) {
        finish_publishing(p, tokens);
    }
}
