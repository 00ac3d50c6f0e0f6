// Multiplies the rows of each expert by its weights, both 8-bit floats (e4m3) with float32 scales, for one to thousands
// of rows. product.cu describes what both kernels have: tiles, warps, stages, records, and their order.
//
//   y[r][n] = sum over blocks b of row_scales[b][r] * weight_scales[e][n / 128][b] * s[b]
//   s[b]    = sum over the 128 columns k of block b of x[r][k] * weight[e][n][k], by wgmma
//
//   QUANTISED_RESULTS  with GATED_ROWS: y is 8-bit floats, with a scale for each 128 outputs of a row
//   GATED_ROWS, INTERLEAVED, GENERAL_GATE, BIASED_ROWS, WEIGHTED_ROWS  as in product.cu
//
// y is bfloat16 otherwise, and so are biases. Scales are as base/scaling.cuh says.
//
// The tensor cores add 8-bit products with about 14 bits. So each block of 128 columns has products of its own, and
// float32 sums take them with their scales: a promotion.
//
// A tile has up to 64 tokens as the columns of wgmma, as in product.cu, or up to 128 as its rows:
//
//   - An expert of few rows costs its rows rounded up to 8 where tokens are columns, and the memory of its weights
//     limits it. But scales of rows belong to columns of the sums then: each thread loads N / 4 factors from shared
//     memory for a promotion.
//   - With many rows shared memory limits the product: it gives 128 bytes a clock to wgmma, loads of factors and what
//     comes from the L2 cache. With tokens as rows a thread needs two factors. So tiles of more than 64 tokens take
//     them as rows (product/scaled_rows.cuh). They cost as much as 128, so an expert has full tiles, but for its last.
//
// Warps 9 to 11, which product.cu leaves idle, multiply scales of rows by the scale of the weights and write a strip of
// factors beside each stage. They take stages in turn. They read each record of a tile, and their arrival is the second
// one at `full`:
//   factors -> promotion   the stores, __syncwarp, the arrival at `full`, the multiplying warps' wait
//   promotion -> factors   the loads, __syncwarp, the arrival at `empty`, the wait for it
//
// Registers of a thread: N columns have N sums and N products, so the second half is multiplied while the first is
// promoted. 64 rows have 128 sums and 64 products, with which the halves take turns. The other warpgroup multiplies
// meanwhile.
//
// Stages have 128 columns. One is given back when both halves are promoted, because threads read its strips until then.
//
// The bits of a result depend on the row and the weights alone, as in product.cu. They are the same where a token is a
// row of wgmma and where it is a column: both add the same products, and both promote in the same order.
//
// With QUANTISED_RESULTS a tile has the 128 outputs of one scale. Where tokens are columns, the multiplying warps
// exchange the largest magnitudes of their 16 outputs of each token in shared memory (product/quantised_results.cuh).
//
// Dynamic shared memory: two strips for each stage; the maxima and the factors of a tile's results; up to a multiple of
// 1024 bytes; then as in product.cu. raymoe/moe/product_fp8.py computes the same sum.

#include "raymoe/moe/product/scaled_rows.cuh"

namespace raymoe {

static_assert(TOKENS <= 64 || TOKENS == 128, "more tokens than 64 are rows of wgmma, 64 of each warpgroup");
static_assert(!ZEROES_GAPS && !STORES_PRODUCTS, "these products have no gradients");

template <u32 N, class Params>
__device__ __forceinline__ void multiply_tile(const Params& p, const Memory& memory, const ProductTile& tile,
                                              u32& turn) {
    float sums[2][N / 2], products[2][N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) {
        sums[0][i] = sums[1][i] = products[0][i] = products[1][i] = 0.0f;
    }
    const u32 steps = (p.product.columns + COLUMNS - 1) / COLUMNS, warpgroup = threadIdx.x / 128;
    for (u32 step = 0; step < steps; ++step, ++turn) {
        const u32 stage = turn % STAGES;
        const u32 strips[2] = {strip_of(memory, stage, TURNS ? warpgroup : 0),
                               strip_of(memory, stage, TURNS ? warpgroup : 1)};
        await(memory.full(stage), turn / STAGES & 1);
        const u64 rows = operand_descriptor(memory.weights(stage) + warpgroup * (HALF_BYTES / 2));
        const u64 tokens = operand_descriptor(memory.tokens(stage));
        ptx::wgmma_fence();  // orders the registers of the products before the wgmma that replace them
        multiply_block<N>(products[0], rows, tokens);
        multiply_block<N>(products[1], rows + HALF_BYTES / 16, tokens);
        ptx::wgmma_wait<1>();
        ptx::sums_have_come(products[0]);
        promote(sums[0], products[0], strips[0]);
        ptx::wgmma_wait<0>();
        ptx::sums_have_come(products[1]);
        promote(sums[1], products[1], strips[1]);
        __syncwarp();  // all threads of the warp have read the strips
        give_back(memory, turn);
    }
    const Results results(p.product, tile);
    if constexpr (QUANTISES) {
        store_quantised<N>(p, memory, results, sums);
    } else {
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
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PRODUCT_THREADS, 1)
    product_fp8(const __grid_constant__ raymoe::ScaledProductParams p) {
    using namespace raymoe;
    extern __shared__ __align__(1024) u8 shared[];
    const Memory memory{ptx::shared_address(shared) + SCALES_BYTES};
    run_block(p, p.product, memory, RowScaling{p, memory});
}
