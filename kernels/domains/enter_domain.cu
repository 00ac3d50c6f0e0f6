// Turns the ids and weights of all ranks of a rail into those of the dispatch inside this rank's domain, which has the
// tokens of all of them. Each expert of the domain has an id there for each source domain. Experts of other domains
// become -1. Ids that no expert has stay ids that none has.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

using s64 = long long;

struct EnterDomainParams {
    const u8* published;  // of each domain, `published_bytes` apart: s64 ids[T][K], then float weights[T][K]
    u8* ids;              // s64[N*T][K], in the order of tokens inside
    u8* weights;          // float[N*T][K]
    u8* dispatches;       // u64: how many dispatches there were; this kernel adds one
    u8* number;           // u64: the number of this one
    u64 published_bytes;
    u32 domains;  // N
    u32 tokens;   // T
    u32 chunk;    // tokens of a chunk
    u32 topk;
    u32 first;  // expert of this domain
    u32 here;   // experts of this domain
    u32 experts;
    u32 unused;
};

// Tokens inside are numbered chunk by chunk, in a chunk domain by domain.
__device__ __forceinline__ u64 token_inside(const EnterDomainParams& p, u32 domain, u32 token) {
    const u32 begin = token / p.chunk * p.chunk, tokens = min(p.chunk, p.tokens - begin);
    return static_cast<u64>(p.domains) * begin + domain * tokens + (token - begin);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256) enter_domain(const __grid_constant__ raymoe::EnterDomainParams p) {
    using namespace raymoe;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const u64 number = ptx::load_8(p.dispatches) + 1;
        ptx::store_8(p.dispatches, number);
        ptx::store_8(p.number, number);
    }
    const u32 of_domain = p.tokens * p.topk, entries = p.domains * of_domain;
    for (u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < entries; entry += gridDim.x * blockDim.x) {
        const u32 domain = entry / of_domain, its = entry - domain * of_domain, token = its / p.topk;
        const u8* published = p.published + domain * p.published_bytes;
        const s64 id = static_cast<s64>(ptx::load_8(published + its * 8ull)), expert = id - p.first;
        const s64 unknown = id < -1 || id >= p.experts ? id : -1;
        const s64 inside = expert >= 0 && expert < p.here ? expert * p.domains + domain : unknown;
        const u64 to = token_inside(p, domain, token) * p.topk + (its - token * p.topk);
        ptx::store_8(p.ids + to * 8, static_cast<u64>(inside));
        ptx::store_4(p.weights + to * 4, ptx::load_4(published + of_domain * 8ull + its * 4ull));
    }
}
