// Adds the ranks' sums of each token into y, for a combine by NCCL: in float32, in rank order, rounded once. (NCCL's
// own reduce-scatter rounds at every hop and in an order of its own.)
//
// In a backward pass the number of each entry is that of the one rank that has it (sum_entries.cu), and NaN where y is.
//
// Each rank's status stands after the rows of its block. Where a rank refuses the step, or the ranks do not combine
// the same dispatch in the same way, y is NaN on all ranks. The statuses of the first such step are stored for the
// host.

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

// Writer: the first refused combine after the host has set `written` to 0. Reader: the host.
struct RefusedStep {
    u64 written;
    u64 unused;
    Status statuses[MOST_RANKS];
};
static_assert(sizeof(RefusedStep) == 16 + 16 * MOST_RANKS, "");

struct SumRanksParams {
    DispatchMemory memory;
    u8* saved;                    // memory of the dispatch
    const u8* outgoing;           // blocks as in sum_entries.cu: only this rank's own block is read
    const u8* returned;          // the blocks of the other ranks
    u8* y;                       // [y_rows][row_bytes]
    RefusedStep* refused;
    const u8* outgoing_numbers;   // as in sum_entries.cu: only this rank's own block is read
    const u8* returned_numbers;  // the blocks of the other ranks
    u8* out_numbers;             // float[y_rows][K]; null: none were returned
    u32 row_bytes;
    u32 wire_row_bytes;
    u32 pieces;  // of a row
    u32 y_rows;
    u32 skew;
    u32 number_stride;
};

__device__ __forceinline__ const u8* block_of(const SumRanksParams& p, u32 rank) {
    return (rank == p.memory.rank ? p.outgoing : p.returned) + skew_of(rank, p.skew);
}

// The first warp calls this, with a thread for each rank. All ranks get the same result, because each rank sends the
// same status to all.
__device__ __forceinline__ bool is_refused(const SumRanksParams& p) {
    const DispatchMemory& memory = p.memory;
    const u32 rank = threadIdx.x < memory.ranks ? threadIdx.x : 0;
    const DispatchRecord* record = memory.record_of(p.saved);
    const u64 after_rows = static_cast<u64>(rank) * (memory.tokens + 1) + ptx::load_4(record->rows_to + rank);
    const Status status = load_status(block_of(p, rank) + after_rows * p.wire_row_bytes);
    const u32 other = __shfl_sync(0xFFFFFFFF, status.other, 0);
    const u64 number = __shfl_sync(0xFFFFFFFF, status.number, 0);
    const bool alike = status.other == other && status.number == number;
    const bool refused = __any_sync(0xFFFFFFFF, status.cause != CAUSE_NONE || !alike);
    if (refused && blockIdx.x == 0 && ptx::load_8(&p.refused->written) == 0) {
        if (threadIdx.x < memory.ranks) {
            store_status(p.refused->statuses + rank, status);
        }
        __syncwarp();  // all threads have read `written` before it changes
        if (threadIdx.x == 0) {
            ptx::store_8(&p.refused->written, 1);
        }
    }
    return refused;
}

// All threads of a warp call this.
__device__ __forceinline__ void sum_piece(const SumRanksParams& p, u32 token, u32 piece, bool refused) {
    const DispatchMemory& memory = p.memory;
    const u32 lane = threadIdx.x % 32, first = piece * 32 * UNROLL + lane, last = p.row_bytes / 16;
    const u64 entry = static_cast<u64>(token) * memory.ranks + lane;
    const u32 returned_row = ptx::load_4_if(lane < memory.ranks && !refused,
                                            p.saved + memory.returned_rows + entry * 4, NOWHERE);
    auto term = [&](u32 rank) {
        const u64 row = __shfl_sync(0xFFFFFFFF, returned_row, rank);
        return Term{block_of(p, rank) + row * p.wire_row_bytes, 1.0f};
    };
    float sums[UNROLL][Sum::COUNT] = {};
    for (u32 hits = __ballot_sync(0xFFFFFFFF, returned_row != NOWHERE); hits != 0; hits &= hits - 1) {
        const u32 rank = __ffs(hits) - 1;
        const Term a = term(rank);
        hits &= hits - 1;
        const bool both = hits != 0;
        const Term b = both ? term(__ffs(hits) - 1) : a;
        add_two<Sum, UNROLL>(a, b, both, first, last, sums);
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
__device__ __forceinline__ void gather_numbers(const SumRanksParams& p, bool refused) {
    const DispatchMemory& memory = p.memory;
    const u32 entries = p.y_rows * memory.topk;
    for (u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < entries; entry += gridDim.x * blockDim.x) {
        u32 number = 0;  // only one rank has bits that are not zero
#pragma unroll 4
        for (u32 rank = 0; rank < memory.ranks; ++rank) {
            const u8* block = rank == memory.rank ? p.outgoing_numbers : p.returned_numbers;
            number |= ptx::load_4(block + static_cast<u64>(rank) * p.number_stride + entry * 4ull);
        }
        ptx::store_4(p.out_numbers + entry * 4ull, refused ? static_cast<u32>(F32::NANS) : number);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256, 2) sum_ranks(const __grid_constant__ raymoe::SumRanksParams p) {
    using namespace raymoe;
    __shared__ bool refused;
    if (threadIdx.x < 32) {
        const bool step_refused = is_refused(p);
        if (threadIdx.x == 0) {
            refused = step_refused;
        }
    }
    __syncthreads();
    const u32 warps = blockDim.x / 32;
    for (u32 unit = blockIdx.x * warps + threadIdx.x / 32; unit < p.y_rows * p.pieces; unit += gridDim.x * warps) {
        const u32 token = unit / p.pieces;
        sum_piece(p, token, unit - token * p.pieces, refused);
    }
    if (p.out_numbers != nullptr) {
        gather_numbers(p, refused);
    }
}
