// Turns the ids of experts that a dispatch names into numbers of slots. raymoe/exchange/slots.py describes the table,
// and computes the same on CPUs.
//
// A token takes one copy of an expert by a hash of its rank and its number. -1 stays. Any other id without an expert
// becomes one without a slot, which the dispatch refuses.
//
// It waits for nothing. The table changes only between two launches of a stream.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

using s64 = long long;

struct TakeSlotsParams {
    const u8* topk_idx;  // [entries], i32 or i64
    u8* slots;           // [entries], of the same type
    const u8* table;     // i32: digest, first copies[experts], number of copies, slots of copies
    u32 wide_topk_idx;   // ids are i64
    u32 entries;
    u32 topk;
    u32 experts;
    u32 every;  // slots of all ranks
    u32 rank;   // the source of the tokens
};

// All bits of the result depend on all bits of both numbers.
__device__ __forceinline__ u32 token_hash(u32 rank, u32 token) {
    u32 mixed = token * 0x9E3779B1u + rank * 0x85EBCA6Bu;
    mixed = (mixed ^ mixed >> 16) * 0x7FEB352Du;
    mixed = (mixed ^ mixed >> 15) * 0x846CA68Bu;
    return mixed ^ mixed >> 16;
}

__device__ __forceinline__ s64 slot_of(const TakeSlotsParams& p, s64 id, u32 token) {
    if (id < 0) {
        return id;
    }
    if (id >= p.experts) {
        const s64 beyond = p.every - p.experts, most = p.wide_topk_idx ? 0x7FFFFFFFFFFFFFFFll : 0x7FFFFFFFll;
        return min(id, most - beyond) + beyond;
    }
    const u32 first = ptx::load_4(p.table + (1 + id) * 4), end = ptx::load_4(p.table + (2 + id) * 4);
    const u32 copy = static_cast<u32>(static_cast<u64>(token_hash(p.rank, token)) * (end - first) >> 32);
    return ptx::load_4(p.table + (2ull + p.experts + first + copy) * 4);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256) take_slots(const __grid_constant__ raymoe::TakeSlotsParams p) {
    using namespace raymoe;
    const u32 stride = gridDim.x * blockDim.x;
    for (u64 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < p.entries; entry += stride) {
        const u32 token = static_cast<u32>(entry) / p.topk;
        if (p.wide_topk_idx) {
            const s64 id = static_cast<s64>(ptx::load_8(p.topk_idx + entry * 8));
            ptx::store_8(p.slots + entry * 8, static_cast<u64>(slot_of(p, id, token)));
        } else {
            const s64 id = static_cast<int>(ptx::load_4(p.topk_idx + entry * 4));
            ptx::store_4(p.slots + entry * 4, static_cast<u32>(slot_of(p, id, token)));
        }
    }
}
