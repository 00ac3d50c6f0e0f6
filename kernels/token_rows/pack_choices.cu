// Layout `token`: makes the input of both parts of a dispatch from the ids and weights of this rank's tokens.
// raymoe/exchange/token_rows.py describes the parts, and computes the same on CPUs.
//
// A thread has an entry (token, k). An entry's home is the first expert of its rank, if no earlier entry of the token
// names that rank. It waits for nothing.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

using s64 = long long;

struct PackChoicesParams {
    const u8* topk_idx;      // [tokens][topk], i32 or i64
    const u8* topk_weights;  // f32[tokens][topk]
    u8* rows_idx;            // as topk_idx: the homes, but ids without an expert as they are
    u8* homes;               // as topk_idx: the home of each entry, -1 without one
    u8* choices;             // f32[tokens][width]: ids, weights, this rank, the token's number, zeros
    u32 wide_topk_idx;       // ids are i64
    u32 entries;
    u32 topk;
    u32 width;
    u32 experts;
    u32 local;  // experts of a rank
    u32 rank;
    u32 unused;
};

__device__ __forceinline__ s64 id_of(const PackChoicesParams& p, u64 entry) {
    return p.wide_topk_idx ? static_cast<s64>(ptx::load_8(p.topk_idx + entry * 8))
                           : static_cast<s64>(static_cast<int>(ptx::load_4(p.topk_idx + entry * 4)));
}

// The rank of an id, rounded down for negative ones too.
__device__ __forceinline__ s64 owner_of(const PackChoicesParams& p, s64 id) {
    const s64 local = p.local;
    return id >= 0 ? id / local : -1 - (-(id + 1)) / local;
}

__device__ __forceinline__ void store_id(const PackChoicesParams& p, u8* ids, u64 entry, s64 id) {
    if (p.wide_topk_idx) {
        ptx::store_8(ids + entry * 8, static_cast<u64>(id));
    } else {
        ptx::store_4(ids + entry * 4, static_cast<u32>(id));
    }
}

__device__ __forceinline__ void pack_entry(const PackChoicesParams& p, u32 entry) {
    const u32 token = entry / p.topk, k = entry % p.topk;
    const s64 id = id_of(p, entry), owner = owner_of(p, id);
    const bool known = id >= 0 && id < p.experts;
    bool first = known;
    for (u32 i = 1; i <= k; ++i) {
        first = first && owner_of(p, id_of(p, entry - i)) != owner;
    }
    const s64 home = first ? owner * p.local : -1;
    store_id(p, p.homes, entry, home);
    store_id(p, p.rows_idx, entry, known ? home : id);
    u8* row = p.choices + static_cast<u64>(token) * p.width * 4;
    ptx::store_4(row + k * 4, __float_as_uint(static_cast<float>(id)));
    ptx::store_4(row + (p.topk + k) * 4, ptx::load_4(p.topk_weights + entry * 4ull));
    if (k == 0) {
        ptx::store_4(row + 2 * p.topk * 4, __float_as_uint(static_cast<float>(p.rank)));
        ptx::store_4(row + (2 * p.topk + 1) * 4, __float_as_uint(static_cast<float>(token)));
        for (u32 at = 2 * p.topk + 2; at < p.width; ++at) {
            ptx::store_4(row + at * 4, 0);
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256) pack_choices(const __grid_constant__ raymoe::PackChoicesParams p) {
    const raymoe::u32 stride = gridDim.x * blockDim.x;
    for (raymoe::u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < p.entries; entry += stride) {
        raymoe::pack_entry(p, entry);
    }
}
