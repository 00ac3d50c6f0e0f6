// Multiplies the rows of each expert by its weights, for experts of few rows. Such a product takes the time in which
// weights come from memory, so a weight is loaded once for up to 24 rows.
//
//   y[r][n] = sum over k of x[r][k] * weight[n][k], summed in float32 and rounded once
//
// With GATED_ROWS, weights are gate rows, then as many up rows, and y = silu(gate) * up.
//
//   1. Each block lists the experts that have rows.
//   2. A warp takes a tile: 16 rows of an expert's weights, with all columns. With GATED_ROWS they are 8 of gate, and
//      the 8 of up for the same outputs. It keeps STAGES loads of each row under way.
//   3. It multiplies them by up to 24 rows of x, in groups of 8, by tensor cores. An expert with more rows has its tile
//      loaded again.
//
// Fragments: `mma` takes 16 columns at a time, and a lane has columns 2t, 2t+1, 2t+8, 2t+9 of them (t = lane % 4). Here
// a lane loads 16 bytes, columns 8t to 8t+7 of 32, and gives the first four to one `mma`, the others to the next. The
// lanes of x do the same, so factors meet as they should: a sum has no order of columns.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

#ifdef GATED_ROWS
#define GATED true
#else
#define GATED false
#endif

namespace raymoe {

constexpr u32 FEW_ROWS_WARPS = 8;
constexpr u32 FEW_ROWS_THREADS = FEW_ROWS_WARPS * 32;
constexpr u32 GROUP_ROWS = 8, MOST_GROUPS = 3;
constexpr u32 OUTPUTS = GATED ? 8 : 16;  // outputs of a tile
constexpr u32 STEP_BYTES = 64;           // bytes of a row that four lanes load together, 32 columns

struct FewRowsParams {
    const u8* x;               // bfloat16 [C][columns]
    const u8* weight;          // bfloat16 [experts][outputs][columns]; GATED: [experts][2 * outputs][columns]
    const u8* expert_offsets;  // u32[experts + 1]: the first row of each expert
    const u8* expert_counts;   // u32[experts]: its rows
    u8* y;                     // bfloat16 [C][outputs]
    u32 experts;
    u32 outputs;  // a multiple of OUTPUTS
    u32 columns;  // a multiple of 32
    u32 unused;
};

// A tile, and the rows of its expert.
struct FewRowsTile {
    u32 expert;
    u32 output;     // its first output
    u32 first_row;  // the first row in x and y
    u32 rows;
};

struct Fragment {
    ptx::Bytes16 low, high;  // of weight rows `lane / 4` and `lane / 4 + 8` of the tile
};

__device__ __forceinline__ u32 first_word(u64 pair) { return static_cast<u32>(pair); }
__device__ __forceinline__ u32 second_word(u64 pair) { return static_cast<u32>(pair >> 32); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Adds 32 columns of 16 weight rows times 8 rows of x.
__device__ __forceinline__ void multiply(float (&sums)[4], const Fragment& w, const ptx::Bytes16& x) {
    ptx::mma_bf16(sums, first_word(w.low.low), first_word(w.high.low), second_word(w.low.low), second_word(w.high.low),
                  first_word(x.low), second_word(x.low));
    ptx::mma_bf16(sums, first_word(w.low.high), first_word(w.high.high), second_word(w.low.high),
                  second_word(w.high.high), first_word(x.high), second_word(x.high));
}

// Stores one result for each of two rows of x, 2t and 2t+1, from each lane. Lanes of neighbouring outputs swap one, so
// that each stores two outputs of one row.
__device__ __forceinline__ void store_pair(const FewRowsParams& p, const FewRowsTile& tile, u32 row, u32 output,
                                           float first, float second) {
    const bool odd = output % 2 != 0;
    const float other = __shfl_xor_sync(0xFFFFFFFF, odd ? first : second, 4);
    const u32 its_row = row + odd;
    if (its_row < tile.rows) {
        const u32 pair = odd ? ptx::to_bf16x2(other, second) : ptx::to_bf16x2(first, other);
        ptx::store_4(p.y + (static_cast<u64>(tile.first_row + its_row) * p.outputs + output - odd) * 2, pair);
    }
}

// The loads of one step: 32 columns of the tile's weight rows, and of GROUPS groups of 8 rows of x. They begin
// STAGES steps ahead.
template <u32 GROUPS>
struct Stage {
    Fragment weight;
    ptx::Bytes16 x[GROUPS];
};

// Where a lane's loads of step 0 begin.
template <u32 GROUPS>
struct Sources {
    const u8* low;
    const u8* high;
    const u8* x[GROUPS];

    __device__ __forceinline__ void load(Stage<GROUPS>& into, bool wanted, u32 step) const {
        into.weight.low = ptx::load_16_streamed_if(wanted, low + step * STEP_BYTES, {0, 0});
        into.weight.high = ptx::load_16_streamed_if(wanted, high + step * STEP_BYTES, {0, 0});
#pragma unroll
        for (u32 i = 0; i < GROUPS; ++i) {
            into.x[i] = ptx::load_16_constant_if(wanted, x[i] + step * STEP_BYTES, {0, 0});
        }
    }

    __device__ __forceinline__ void advance(u32 steps) {
        low += steps * STEP_BYTES;
        high += steps * STEP_BYTES;
#pragma unroll
        for (u32 i = 0; i < GROUPS; ++i) {
            x[i] += steps * STEP_BYTES;
        }
    }
};

// Multiplies a tile by GROUPS groups of rows, from `row` of the expert on. In the place of rows after the last one,
// lanes load that one.
template <u32 GROUPS, u32 STAGES>
__device__ __forceinline__ void multiply_groups(const FewRowsParams& p, const FewRowsTile& tile, u32 row) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 row_bytes = p.columns * 2ull;
    const u64 weight_row = static_cast<u64>(tile.expert) * (GATED ? 2 : 1) * p.outputs + tile.output + g;
    Sources<GROUPS> from;
    from.low = p.weight + weight_row * row_bytes + t * 16;
    from.high = from.low + (GATED ? p.outputs : 8) * row_bytes;
    float sums[GROUPS][4];
#pragma unroll
    for (u32 i = 0; i < GROUPS; ++i) {
        const u32 own = min(row + i * GROUP_ROWS + g, tile.rows - 1);
        from.x[i] = p.x + (tile.first_row + own) * row_bytes + t * 16;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            sums[i][j] = 0.0f;
        }
    }
    const u32 steps = p.columns / 32;
    Stage<GROUPS> stages[STAGES];
#pragma unroll
    for (u32 s = 0; s < STAGES; ++s) {
        from.load(stages[s], s < steps, s);
    }
    for (u32 begin = 0; begin < steps; begin += STAGES) {
#pragma unroll
        for (u32 s = 0; s < STAGES; ++s) {  // after the last step stages hold zeros
#pragma unroll
            for (u32 i = 0; i < GROUPS; ++i) {
                multiply(sums[i], stages[s].weight, stages[s].x[i]);
            }
            from.load(stages[s], begin + s + STAGES < steps, s + STAGES);
        }
        from.advance(STAGES);
    }
#pragma unroll
    for (u32 i = 0; i < GROUPS; ++i) {
        const u32 its_row = row + i * GROUP_ROWS + 2 * t;
        if constexpr (GATED) {
            const float first = silu(sums[i][0]) * sums[i][2], second = silu(sums[i][1]) * sums[i][3];
            store_pair(p, tile, its_row, tile.output + g, first, second);
        } else {
            store_pair(p, tile, its_row, tile.output + g, sums[i][0], sums[i][1]);
            store_pair(p, tile, its_row, tile.output + 8 + g, sums[i][2], sums[i][3]);
        }
    }
}

__device__ __forceinline__ void multiply_rows(const FewRowsParams& p, const FewRowsTile& tile) {
    for (u32 row = 0; row < tile.rows; row += MOST_GROUPS * GROUP_ROWS) {
        const u32 left = tile.rows - row;
        if (left <= GROUP_ROWS) {
            multiply_groups<1, 6>(p, tile, row);
        } else if (left <= 2 * GROUP_ROWS) {
            multiply_groups<2, 4>(p, tile, row);
        } else {
            multiply_groups<MOST_GROUPS, 3>(p, tile, row);
        }
    }
}

// Lists the experts that have rows, in order, and returns how many there are. All threads of the block call this.
__device__ __forceinline__ u32 list_experts(const FewRowsParams& p, u32* listed) {
    u32* count = listed + p.experts;
    if (threadIdx.x < 32) {
        u32 before = 0;
        for (u32 first = 0; first < p.experts; first += 32) {
            const u32 expert = first + threadIdx.x;
            const bool has = ptx::load_4_if(expert < p.experts, p.expert_counts + expert * 4ull, 0) != 0;
            const u32 all = __ballot_sync(0xFFFFFFFF, has);
            if (has) {
                listed[before + __popc(all & ((1u << threadIdx.x) - 1))] = expert;
            }
            before += __popc(all);
        }
        if (threadIdx.x == 0) {
            *count = before;
        }
    }
    __syncthreads();
    return *count;
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::FEW_ROWS_THREADS, 2)
    few_rows(const __grid_constant__ raymoe::FewRowsParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) u32 listed[];  // u32[experts], then their number
    const u32 per_expert = p.outputs / OUTPUTS;
    const u32 tiles = list_experts(p, listed) * per_expert;
    const u32 warp = blockIdx.x * FEW_ROWS_WARPS + threadIdx.x / 32, warps = gridDim.x * FEW_ROWS_WARPS;
    for (u32 number = warp; number < tiles; number += warps) {
        const u32 expert = listed[number / per_expert];
        const FewRowsTile tile{expert, number % per_expert * OUTPUTS, ptx::load_4(p.expert_offsets + expert * 4ull),
                               ptx::load_4(p.expert_counts + expert * 4ull)};
        multiply_rows(p, tile);
    }
}
