// Adds the domains' sums of each token into y, for a combine between domains: in float32, in domain order, rounded
// once.
//
// The sums of the other domains have come over the rail. This domain's own are where they were before. So are the
// gradients of weights, of which all domains but one have sent zero.
//
// Where a rank of any domain refuses the step, or the ranks do not combine the same dispatch in the same way, y is NaN
// on all ranks. The statuses of the first such step are stored for the host.

#define ANY_GPU

#include "raymoe/nccl/statuses.cuh"
#include "raymoe/base/terms.cuh"
#include "raymoe/base/vectors.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16
#endif
#ifndef WIRE_TYPE
#define WIRE_TYPE ROW_TYPE
#endif

namespace raymoe {

using Sum = Crossing<ROW_TYPE, WIRE_TYPE>;
constexpr u32 UNROLL = Sum::BYTES > 16 ? 2 : 4;  // vectors in flight of each of two rows, for a thread

struct SumDomainsParams {
    const u8* outgoing;           // [N*T][wire_row_bytes], in the order of tokens inside: the own domain's are read
    const u8* returned;          // the same of the other domains
    const u8* statuses;          // Status[N][L] of all ranks
    const u8* outgoing_entries;   // float[N][T][K], of which the own domain's are read; null: no gradients
    const u8* returned_entries;  // the same of the other domains
    u8* y;                       // [T'][row_bytes]
    u8* out_entries;             // float[T'][K]
    u8* refused;                 // u64 written, u64 unused, Status[N][L] of the first refused step after written = 0
    u32 domains;
    u32 ranks;   // N*L
    u32 index;   // this rank's domain
    u32 tokens;  // T
    u32 chunk;   // tokens of a chunk
    u32 topk;
    u32 first;  // the first token of this launch
    u32 end;    // the end of its tokens, at most T'
    u32 row_bytes;
    u32 wire_row_bytes;
    u32 pieces;  // of a row
    u32 unused;
};

// The first warp calls this. All ranks get the same result, because each rank sends the same status to all.
__device__ __forceinline__ bool is_refused(const SumDomainsParams& p) {
    const Status first = load_status(p.statuses);
    bool refused = false;
    for (u32 rank = threadIdx.x; rank < p.ranks; rank += 32) {
        const Status status = load_status(p.statuses + rank * sizeof(Status));
        refused |= status.cause != CAUSE_NONE || status.other != first.other || status.number != first.number;
    }
    refused = __any_sync(0xFFFFFFFF, refused);
    if (refused && blockIdx.x == 0 && ptx::load_8(p.refused) == 0) {
        for (u32 rank = threadIdx.x; rank < p.ranks; rank += 32) {
            store_status(p.refused + 16 + rank * sizeof(Status), load_status(p.statuses + rank * sizeof(Status)));
        }
        __syncwarp();  // all threads have read `written` before it changes
        if (threadIdx.x == 0) {
            ptx::store_8(p.refused, 1);
        }
    }
    return refused;
}

// Returns the row of a token's sum from a domain. Tokens inside are numbered chunk by chunk, in a chunk domain by
// domain.
__device__ __forceinline__ u64 row_of(const SumDomainsParams& p, u32 domain, u32 token) {
    const u32 begin = token / p.chunk * p.chunk, tokens = min(p.chunk, p.tokens - begin);
    return static_cast<u64>(p.domains) * begin + domain * tokens + (token - begin);
}

// All threads of a warp call this.
__device__ __forceinline__ void sum_piece(const SumDomainsParams& p, u32 token, u32 piece, bool refused) {
    const u32 first = piece * 32 * UNROLL + threadIdx.x % 32, last = p.row_bytes / 16;
    auto term = [&](u32 domain) {
        const u8* rows = domain == p.index ? p.outgoing : p.returned;
        return Term{rows + row_of(p, domain, token) * p.wire_row_bytes, 1.0f};
    };
    float sums[UNROLL][Sum::COUNT] = {};
    for (u32 domain = 0; !refused && domain < p.domains; domain += 2) {
        const bool both = domain + 1 < p.domains;
        const Term a = term(domain);
        add_two<Sum, UNROLL>(a, both ? term(domain + 1) : a, both, first, last, sums);
    }
    u8* into = p.y + static_cast<u64>(token) * p.row_bytes;
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        if (first + 32 * i < last) {
            const ptx::Bytes16 nans{ROW_TYPE::NANS, ROW_TYPE::NANS};
            ptx::store_16(into + (first + 32 * i) * 16ull, refused ? nans : ROW_TYPE::pack(sums[i]));
        }
    }
}

// All threads call this.
__device__ __forceinline__ void sum_entries(const SumDomainsParams& p, bool refused) {
    const u32 end = p.end * p.topk;
    const u64 of_domain = static_cast<u64>(p.tokens) * p.topk;
    u32 entry = p.first * p.topk + blockIdx.x * blockDim.x + threadIdx.x;
    for (; entry < end; entry += gridDim.x * blockDim.x) {
        float sum = refused ? __uint_as_float(0x7FC00000) : 0.0f;
        for (u32 domain = 0; domain < p.domains; ++domain) {
            const u8* entries = domain == p.index ? p.outgoing_entries : p.returned_entries;
            sum += __uint_as_float(ptx::load_4(entries + (domain * of_domain + entry) * 4));
        }
        ptx::store_4(p.out_entries + entry * 4ull, __float_as_uint(sum));
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256, 2) sum_domains(const __grid_constant__ raymoe::SumDomainsParams p) {
    using namespace raymoe;
    __shared__ bool refused;
    if (threadIdx.x < 32) {
        const bool step_refused = is_refused(p);
        if (threadIdx.x == 0) {
            refused = step_refused;
        }
    }
    __syncthreads();
    const u32 warps = blockDim.x / 32, units = (p.end - p.first) * p.pieces;
    for (u32 unit = blockIdx.x * warps + threadIdx.x / 32; unit < units; unit += gridDim.x * warps) {
        const u32 token = unit / p.pieces;
        sum_piece(p, p.first + token, unit - token * p.pieces, refused);
    }
    if (p.outgoing_entries != nullptr) {
        sum_entries(p, refused);
    }
}
