// Multiplies the rows of each expert by its weights, for one to thousands of rows.
//
//   y[r][n] = sum over k of x[r][k] * weight[e][n][k], summed in float32 and rounded once
//
//   GATED_ROWS     weights are gate rows and up rows, and y = gate * sigmoid(alpha * gate) * (up + up_plus), where
//                  `limit` bounds gate from above and up on both sides. SwiGLU has alpha 1, no limit and up_plus 0
//   INTERLEAVED    gate and up rows take turns
//   TRANSPOSED_WEIGHTS
//                  weights are [experts][columns][outputs] in memory. So a product's weights give the gradient of its
//                  rows: its outputs are the columns here, its columns the outputs
//   STORES_GATE_UP the rounded products are stored too, in the order of the weights
//   BIASED_ROWS    adds the bias of each row of weights to its product
//   WEIGHTED_ROWS  multiplies each row of y by its weight
//   ZERO_GAPS      rows from an expert's count on become zeros: up to a multiple of 16, or to the next expert
//   HALF_FLOATS    elements are float16, not bfloat16
//
// Weights are the rows of each wgmma and tokens its columns, because the time of a wgmma is proportional to its columns
// in steps of 8. So an expert costs its rows rounded up to 8, where a product with tokens as rows rounds to 128 or 256.
//
// A tile is 256 rows of weights (128 of gate and the 128 of up for the same outputs) times at most MOST_TOKENS tokens.
// An expert with more rows has several tiles of tokens, of sizes that differ by 8 at most. Blocks take tiles from a
// counter (rows/pipe.cuh describes it), so that no SM waits for a slower one.
//
//   warps        what they do
//   0 to 7       two warpgroups multiply. Warpgroup w has rows 64 w to 64 w + 63 of both halves of the tile: two wgmma
//                of 64 rows, with sums of their own. Then they convert the sums and store y
//   8            its first thread takes tiles and loads their weights and tokens, stage after stage
//   9 to 11      idle; they only give their registers away
//
// Stages: STAGES of 64 columns each, for 256 rows of weights and MOST_TOKENS tokens.
//   full    one arrival: the loading thread, with the bytes of the stage
//   empty   an arrival of each multiplying warp, after the wgmma that read the stage. The other warpgroup's wgmma are
//           under way meanwhile
// Tiles: the loading thread writes each tile to one of two records; the multiplying warps read it.
//   told    one arrival: the loading thread, after it wrote the record
//   read    an arrival of each multiplying warp, after it read the record
//
// Order, where memory changes hands:
//   load -> wgmma     the wait for `full` acquires the bytes. Both accesses are of the async proxy
//   wgmma -> load     wgmma_wait, the arrival at `empty`, the loading thread's wait
//   sums -> wgmma     wgmma_fence, before the first wgmma of a tile writes registers that the results were read from
//
// The bits of a result depend on the row and the weights alone: every sum adds the same 16 columns at a time, in order,
// whatever the number of tokens in the tile.
//
// Columns of a row after the last, rows of weights after the last, and rows of x after the last are zeros to TMA. Rows
// of x that belong to the next expert are multiplied but not stored. They cannot spread: columns of a product are
// independent.
//
// Dynamic shared memory: STAGES stages, 1024-byte aligned; the barriers; two records of tiles; the first tile of each
// expert, u32[experts + 1]. raymoe/moe/products.py computes the same sum.

#include "raymoe/moe/product/multiplying.cuh"
#include "raymoe/moe/product/results.cuh"

namespace raymoe {

template <u32 N, class Params>
__device__ __forceinline__ void multiply_tile(const Params& p, const Memory& memory, const ProductTile& tile,
                                              u32& turn) {
    const u32 warpgroup = threadIdx.x / 128;
    float sums[2][N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) {
        sums[0][i] = sums[1][i] = 0.0f;
    }
    constexpr u64 NEXT_WEIGHTS = TRANSPOSED ? NEXT_COLUMNS_TRANSPOSED : NEXT_COLUMNS;
    const u32 steps = (p.columns + COLUMNS - 1) / COLUMNS;
    for (u32 step = 0; step < steps; ++step, ++turn) {
        const u32 stage = turn % STAGES;
        await(memory.full(stage), turn / STAGES & 1);
        const u64 rows = operand_descriptor(memory.weights(stage) + warpgroup * (HALF_BYTES / 2));
        const u64 tokens = operand_descriptor(memory.tokens(stage));
        ptx::wgmma_fence();  // orders the registers of the sums before the wgmma that add to them
#pragma unroll
        for (u32 part = 0; part < COLUMNS / 16; ++part) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                ptx::wgmma<N, TRANSPOSED>(sums[half], rows + half * (HALF_BYTES / 16) + part * NEXT_WEIGHTS,
                                          tokens + part * NEXT_COLUMNS);
            }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        give_back(memory, turn);
    }
    const Results results(p, tile);
#pragma unroll
    for (u32 eight = 0; eight < N / 8; ++eight) {
        float low[4], high[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            low[i] = sums[0][eight * 4 + i];
            high[i] = sums[1][eight * 4 + i];
        }
        results.store(eight, low, high);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PRODUCT_THREADS, 1)
    product(const __grid_constant__ raymoe::ProductParams p) {
    using namespace raymoe;
    extern __shared__ __align__(1024) u8 shared[];
    run_block(p, p, Memory{ptx::shared_address(shared)}, Idle{});
}
