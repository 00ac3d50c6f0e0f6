// Copies each row to a list of rows: reads it once, writes it to each place. A dispatch by NCCL uses this to place rows
// that arrived, and to pack rows for each rank.
//
// A warp copies a piece of a row at a time, VECTORS * 32 * 16 bytes. All loads of a piece are in flight together.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 VECTORS = 4;
constexpr u32 PIECE = 32 * VECTORS;
constexpr u32 NOWHERE = 0xFFFFFFFF;
constexpr u64 NO_OFFSET = ~0ull;

struct SpreadParams {
    const u8* rows;
    const u8* own;  // holds rows [own_first, own_first + own_count), in order; null: they are in `rows`
    u8* out;

    const u8* saved;  // memory that holds the next two arrays
    u64 source;      // offset of u32[count]: the index in `rows` of each row, or NOWHERE; NO_OFFSET: row i is at i
    u64 to;          // offset of u32[count][stride], `width` of them used: rows of `out`, or NOWHERE

    // Gaps to fill with zeros: of expert e the rows of `out` from offsets[e] + counts[e] to offsets[e + 1]. Null: none.
    const u8* expert_offsets;
    const u8* expert_counts;

    u32 count;
    u32 stride;
    u32 width;
    u32 skip;  // the element of each list that is left out; NOWHERE: none
    u32 own_first;
    u32 own_count;
    u32 row_bytes;
    u32 pieces;  // of a row
    u32 experts;
    u32 first_row;  // the number of the first row of `out`
};

// All threads of a warp call this.
__device__ __forceinline__ void spread_piece(const SpreadParams& p, u32 number, const u8* row, u32 piece) {
    const u32 lane = threadIdx.x % 32, first = piece * PIECE + lane, vectors = p.row_bytes / 16;
    ptx::Bytes16 loaded[VECTORS];
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
        loaded[i] = ptx::load_16_if(first + 32 * i < vectors, row + (first + 32 * i) * 16ull, {0, 0});
    }
    for (u32 begin = 0; begin < p.width; begin += 32) {
        const u32 k = begin + lane;
        const u32 wanted = ptx::load_4_if(k < p.width && k != p.skip,
                                          p.saved + p.to + (static_cast<u64>(number) * p.stride + k) * 4, NOWHERE);
        for (u32 hits = __ballot_sync(0xFFFFFFFF, wanted != NOWHERE); hits != 0; hits &= hits - 1) {
            const u32 place = __shfl_sync(0xFFFFFFFF, wanted, __ffs(hits) - 1);
            u8* into = p.out + static_cast<u64>(place - p.first_row) * p.row_bytes;
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                if (first + 32 * i < vectors) {
                    ptx::store_16(into + (first + 32 * i) * 16ull, loaded[i]);
                }
            }
        }
    }
}

__device__ __forceinline__ void zero_gaps(const SpreadParams& p, u32 warp, u32 warps) {
    for (u32 expert = warp; expert < p.experts; expert += warps) {
        const u64 begin = ptx::load_4(p.expert_offsets + expert * 4ull) + ptx::load_4(p.expert_counts + expert * 4ull);
        const u64 end = static_cast<u64>(ptx::load_4(p.expert_offsets + expert * 4ull + 4)) * p.row_bytes;
        for (u64 at = begin * p.row_bytes + threadIdx.x % 32 * 16; at < end; at += 32 * 16) {
            ptx::store_16(p.out + at, {0, 0});
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256, 4) spread_rows(const __grid_constant__ raymoe::SpreadParams p) {
    using namespace raymoe;
    const u32 block_warps = blockDim.x / 32, warps = gridDim.x * block_warps;
    const u32 warp = blockIdx.x * block_warps + threadIdx.x / 32;
    for (u32 unit = warp; unit < p.count * p.pieces; unit += warps) {
        const u32 number = unit / p.pieces, own = number - p.own_first;
        const u32 from = p.source == NO_OFFSET ? number : ptx::load_4(p.saved + p.source + number * 4ull);
        if (from != NOWHERE) {
            const bool is_own = p.own != nullptr && own < p.own_count;
            const u8* row = is_own ? p.own + static_cast<u64>(own) * p.row_bytes
                                   : p.rows + static_cast<u64>(from) * p.row_bytes;
            spread_piece(p, number, row, unit - number * p.pieces);
        }
    }
    if (p.expert_offsets != nullptr) {
        zero_gaps(p, warp, warps);
    }
}
