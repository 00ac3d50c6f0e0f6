// Rows by token and rows by expert: keeps each token's row once, and writes the experts' rows from them again.
//
// A dispatch has said for each entry, an expert of a token of a source, at which place among the experts' rows its row
// lies. AGAIN_ROWS: a warp reads a token's row once and stores it at all of its places; others store zeros into gaps.
// Without: a warp copies a token's row from the first of its places to the memory for rows of other ranks. Rows of
// this rank's own tokens are the input of the dispatch, and nobody copies them.
//
// Every place has one writer, so results are the same in every run. Rows from the last offset on are neither read nor
// written, nor is the memory for tokens without an expert here.

#include "raymoe/moe/expert_rows.cuh"

#ifdef AGAIN_ROWS
#define AGAIN true
#else
#define AGAIN false
#endif

namespace raymoe {

struct KeptRowsParams {
    const u8* entries;  // {u32 place or ~0, weight} [ranks][slot_tokens][topk]
    const u8* tokens;   // u32 [ranks]: the tokens that each source sent
    const u8* own;      // [own_tokens][width]: the rows of this rank's tokens, with AGAIN_ROWS
    u8* others;         // [ranks - 1][slot_tokens][width]: those of the other ranks' tokens, in the order of ranks
    u8* rows;           // [capacity][width]: the rows of experts
    ExpertLayout layout;
    u32 ranks;
    u32 rank;
    u32 own_tokens;
    u32 slot_tokens;
    u32 topk;
    u32 width;     // places of 16 bytes in a row
    u32 gap_rows;  // the most rows of a gap
    u32 unused;
};

constexpr u32 ALL_LANES = 0xFFFFFFFF, ROW_LOADS = 4;  // loads of a lane that overlap

struct Token {
    u32 source;
    u32 number;
};

// The kept row of a token.
__device__ __forceinline__ u8* kept_row_of(const KeptRowsParams& p, Token token) {
    if (token.source == p.rank) {
        return const_cast<u8*>(p.own) + static_cast<u64>(token.number) * p.width * 16;
    }
    const u64 other = token.source - (token.source > p.rank);
    return p.others + (other * p.slot_tokens + token.number) * p.width * 16;
}

// Copies a row to the places of the lanes that are in `wanted`. All threads of the warp call this.
__device__ __forceinline__ void copy_row(const KeptRowsParams& p, const u8* from, u8* into, u32 place, u32 wanted) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 begin = 0; begin < p.width; begin += ROW_LOADS * 32) {  // as often in all lanes, which shuffle
        ptx::Bytes16 loaded[ROW_LOADS];
#pragma unroll
        for (u32 k = 0; k < ROW_LOADS; ++k) {
            const u32 at = begin + k * 32 + lane;
            loaded[k] = ptx::load_16_if(at < p.width, from + at * 16ull, {0, 0});
        }
#pragma unroll 1
        for (u32 left = wanted; left != 0; left &= left - 1) {
            const u64 row = __shfl_sync(ALL_LANES, place, __ffs(left) - 1);
#pragma unroll
            for (u32 k = 0; k < ROW_LOADS; ++k) {
                const u32 at = begin + k * 32 + lane;
                if (at < p.width) {
                    ptx::store_16(into + (row * p.width + at) * 16, loaded[k]);
                }
            }
        }
    }
}

// Copies the row of one token. All threads of the warp call this.
__device__ __forceinline__ void copy_token(const KeptRowsParams& p, Token token, u64 end) {
    const u32 lane = threadIdx.x % 32, most = token.source == p.rank ? p.own_tokens : p.slot_tokens;
    if (token.number >= min(most, ptx::load_4(p.tokens + token.source * 4ull))) {
        return;
    }
    const u64 first_entry = (static_cast<u64>(token.source) * p.slot_tokens + token.number) * p.topk;
    u8* const kept = kept_row_of(p, token);
#pragma unroll 1
    for (u32 first = 0; first < p.topk; first += 32) {
        const u32 k = first + lane;
        const u32 place = ptx::load_4_if(k < p.topk, p.entries + (first_entry + k) * 8, ~0u);
        const u32 there = __ballot_sync(ALL_LANES, place < end);
        if (there == 0) {
            continue;
        }
        if constexpr (AGAIN) {
            copy_row(p, kept, p.rows, place, there);
        } else {
            const u64 row = __shfl_sync(ALL_LANES, place, __ffs(there) - 1);
            copy_row(p, p.rows + row * p.width * 16, kept, 0, 1);
            return;
        }
    }
}

// Stores zeros into the row after an expert's rows with this number, if its gap has one.
__device__ __forceinline__ void zero_gap_row(const KeptRowsParams& p, u32 expert, u32 number, u64 end) {
    const u64 row = static_cast<u64>(first_row_of(p.layout, expert)) +
                    ptx::load_4(p.layout.expert_counts + expert * 4ull) + number;
    if (row < min(end, static_cast<u64>(first_row_of(p.layout, expert + 1)))) {
        for (u32 at = threadIdx.x % 32; at < p.width; at += 32) {
            ptx::store_16(p.rows + (row * p.width + at) * 16, {0, 0});
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROWS_THREADS)
    kept_rows(const __grid_constant__ raymoe::KeptRowsParams p) {
    using namespace raymoe;
    const u64 end = end_of_rows(p.layout);
    const u32 tokens = (AGAIN ? p.ranks : p.ranks - 1) * p.slot_tokens;
    const u32 gaps = AGAIN ? p.layout.experts * p.gap_rows : 0;
    for_each_row(static_cast<u64>(tokens) + gaps, [&](u64 unit) {
        if (unit >= tokens) {
            const u32 gap = static_cast<u32>(unit) - tokens;
            zero_gap_row(p, gap / p.gap_rows, gap % p.gap_rows, end);
            return;
        }
        const u32 source = static_cast<u32>(unit) / p.slot_tokens;
        copy_token(p, {source + (!AGAIN && source >= p.rank), static_cast<u32>(unit) % p.slot_tokens}, end);
    });
}
