// Sums this rank's experts' rows of each token, for the all-to-all of a combine. A sum is weighted, in float32, in the
// order of k, and is rounded once, to the combine wire dtype. This rank's status goes after the rows of each block.
//
// There is a block for each rank, with T + 1 rows. The sum of a token stands where its row stood in its source's block
// of the table. A warp sums a piece of a row at a time, with the loads of two rows in flight.
//
// In a backward pass a float32 number of each entry (token, k) is returned too, the gradient of its weight. An expert
// is on one rank, so one rank has each number, and the others send zero bits.

#define ANY_GPU

#include "raymoe/nccl/rounds.cuh"
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

struct SumEntriesParams {
    DispatchMemory memory;
    u8* saved;             // memory of the dispatch
    const u8* rows;       // [capacity][row_bytes] results of the experts
    u8* outgoing;          // [R] blocks of T + 1 rows of wire_row_bytes, and `skew` bytes
    const u8* numbers;    // float[capacity]: the number of each place; null: none is sent
    u8* outgoing_numbers;  // [R] blocks of float[T][K], `number_stride` bytes apart
    u32 row_bytes;
    u32 wire_row_bytes;
    u32 pieces;  // of a row
    u32 weighted;
    u32 site;  // of the call, such as a layer, below 2^29; 0: none
    u32 skew;  // signed: a block may also be shorter
    u32 number_stride;
    u32 unused;
};

__device__ __forceinline__ void store_statuses(const SumEntriesParams& p) {
    const DispatchMemory& memory = p.memory;
    const DispatchRecord* record = memory.record_of(p.saved);
    for (u32 rank = threadIdx.x; rank < memory.ranks; rank += blockDim.x) {
        Status status = load_status(&record->refusal);
        if (status.cause == CAUSE_NONE) {
            const u32 carries = p.numbers != nullptr;
            status = {CAUSE_NONE, p.weighted | carries << 1 | p.site << 2, ptx::load_8(&record->number)};
        }
        const u64 after_rows = static_cast<u64>(rank) * (memory.tokens + 1) + ptx::load_4(record->rows_from + rank);
        store_status(p.outgoing + skew_of(rank, p.skew) + after_rows * p.wire_row_bytes, status);
    }
}

// All threads of a warp call this. Sums a piece of a token's rows.
__device__ __forceinline__ void sum_piece(const SumEntriesParams& p, u32 token, u32 piece, u8* into) {
    const DispatchMemory& memory = p.memory;
    const u32 source = token / memory.tokens, lane = threadIdx.x % 32;
    const u64 entries = static_cast<u64>(token) * memory.topk;
    const u8* weights = memory.topk_weights_of(p.saved, source) + (entries - source * memory.entries()) * 4;
    const u32 first = piece * 32 * UNROLL + lane, last = p.row_bytes / 16;
    float sums[UNROLL][Sum::COUNT] = {};
    for (u32 begin = 0; begin < memory.topk; begin += 32) {
        const u32 k = begin + lane;
        const bool there = k < memory.topk;
        const u32 place = ptx::load_4_if(there, p.saved + memory.places + (entries + k) * 4, NOWHERE);
        const u32 weight = ptx::load_4_if(there && p.weighted, weights + k * 4ull, __float_as_uint(1.0f));
        auto term = [&](u32 thread) {
            const u64 row = __shfl_sync(0xFFFFFFFF, place, thread);
            return Term{p.rows + row * p.row_bytes, __uint_as_float(__shfl_sync(0xFFFFFFFF, weight, thread))};
        };
        for (u32 hits = __ballot_sync(0xFFFFFFFF, place != NOWHERE); hits != 0; hits &= hits - 1) {
            const Term a = term(__ffs(hits) - 1);
            hits &= hits - 1;
            const bool both = hits != 0;
            const Term b = both ? term(__ffs(hits) - 1) : a;
            add_two<Crossing<ROW_TYPE, ROW_TYPE>, UNROLL>(a, b, both, first, last, sums);
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        if (first + 32 * i < last) {
            Sum::pack(sums[i]).store(into + static_cast<u64>(first + 32 * i) * Sum::BYTES);
        }
    }
}

// Writes the number of each entry whose expert is on this rank, and zero for the others. All threads call this.
__device__ __forceinline__ void store_numbers(const SumEntriesParams& p) {
    const DispatchMemory& memory = p.memory;
    const u32 entries_a_rank = memory.entries(), entries = memory.ranks * entries_a_rank;
    for (u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < entries; entry += gridDim.x * blockDim.x) {
        const u32 place = ptx::load_4(p.saved + memory.places + entry * 4ull);
        const u32 source = entry / entries_a_rank, its_entry = entry - source * entries_a_rank;
        u8* into = p.outgoing_numbers + static_cast<u64>(source) * p.number_stride + its_entry * 4ull;
        ptx::store_4(into, ptx::load_4_if(place != NOWHERE, p.numbers + place * 4ull, 0));
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256, 2) sum_entries(const __grid_constant__ raymoe::SumEntriesParams p) {
    using namespace raymoe;
    if (blockIdx.x == 0) {
        store_statuses(p);
    }
    if (p.numbers != nullptr) {
        store_numbers(p);
    }
    const u32 warps = blockDim.x / 32, tokens = p.memory.ranks * p.memory.tokens;
    for (u32 unit = blockIdx.x * warps + threadIdx.x / 32; unit < tokens * p.pieces; unit += gridDim.x * warps) {
        const u32 token = unit / p.pieces;
        const u32 row = ptx::load_4(p.saved + p.memory.row_of + token * 4ull);
        if (row != NOWHERE) {
            const u32 source = token / p.memory.tokens;
            const u64 outgoing_row = static_cast<u64>(row) + source;  // blocks here have T + 1 rows, not T
            u8* into = p.outgoing + skew_of(source, p.skew) + outgoing_row * p.wire_row_bytes;
            sum_piece(p, token, unit - token * p.pieces, into);
        }
    }
}
