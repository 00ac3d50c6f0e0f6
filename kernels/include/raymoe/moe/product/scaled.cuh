// Products of 8-bit floats (e4m3): their scales, and how products of 128 columns are added to float32 sums.
//
// A row of x has a scale for each 128 columns, weights have one for each 128 rows and 128 columns.
#pragma once

#define E4M3_OPERANDS
#include "raymoe/base/scaling.cuh"
#include "raymoe/moe/product/multiplying.cuh"

#ifdef QUANTISED_RESULTS
#define QUANTISES true
#else
#define QUANTISES false
#endif

namespace raymoe {

static_assert(COLUMNS == SCALED_ELEMENTS, "a stage has the columns of one scale");
// A scaling warp takes every third stage. With fewer stages it could take a parity for that of an older turn.
static_assert(STAGES >= 3, "the scaling warps need three stages");

constexpr u32 SCALING_WARPS = 3, FIRST_SCALING_WARP = LOADING_WARP + 1;
constexpr u32 STRIP_BYTES = TOKENS * 4;  // a factor for each token of a stage
constexpr u32 MAXIMA = STAGES * 2 * STRIP_BYTES, FACTORS = MAXIMA + MULTIPLYING_WARPS * STRIP_BYTES;
constexpr u32 SCALES_BYTES = (FACTORS + STRIP_BYTES + 1023) / 1024 * 1024;  // before the stages

struct ScaledProductParams {
    ProductParams product;
    const u8* row_scales;          // float, of each row of x and each block of columns
    u64 row_stride, block_stride;  // floats between the scales of neighbours
    const u8* weight_scales;       // float[experts][blocks of rows of weights][blocks of columns]
    u8* y_scales;                  // QUANTISED_RESULTS: float[blocks of outputs][y_scale_stride]
    u64 y_scale_stride;            // floats
    u64 unused[2];                 // up to a multiple of 64 bytes
};

// Shared memory before the stages. A stage has two strips: one for each half of a tile; or one for each warpgroup where
// gate and up take turns, because its rows of both halves are then of one block.
__device__ __forceinline__ u32 strip_of(const Memory& memory, u32 stage, u32 strip) {
    return memory.begin - SCALES_BYTES + (stage * 2 + strip) * STRIP_BYTES;
}
__device__ __forceinline__ u32 maxima_of(const Memory& memory, u32 warp) {
    return memory.begin - SCALES_BYTES + MAXIMA + warp * STRIP_BYTES;
}
__device__ __forceinline__ u32 factors_in(const Memory& memory) { return memory.begin - SCALES_BYTES + FACTORS; }

// The work of warps 9 to 11: the factors of each stage, which are scales of rows times those of weights. The three take
// stages in turn.
struct RowScaling {
    static constexpr u32 WARPS = SCALING_WARPS, ARRIVALS = 1;

    const ScaledProductParams& p;
    const Memory memory;

    __device__ __forceinline__ void run() const {
        const u32 blocks = blocks_of(p.product.columns), own = threadIdx.x / 32 - FIRST_SCALING_WARP;
        u32 stage_turn = 0, next = own;  // of all stages, and of the next one that this warp takes
        for (u32 turn = 0;; ++turn) {
            const ProductTile tile = told_tile(memory, turn);
            if (tile.rows == 0) {
                return;
            }
            const u64 weights[2] = {weight_scales(tile, 0), weight_scales(tile, 1)};
            for (; next < stage_turn + blocks; next += SCALING_WARPS) {
                scale(tile, weights, next - stage_turn, next);
            }
            stage_turn += blocks;
        }
    }

  private:
    static __device__ __forceinline__ u32 blocks_of(u32 elements) {
        return (elements + SCALED_ELEMENTS - 1) / SCALED_ELEMENTS;
    }

    // Where the scales of the weights of a strip begin, in floats.
    __device__ __forceinline__ u64 weight_scales(const ProductTile& tile, u32 strip) const {
        const u32 row_blocks = blocks_of(p.product.outputs * (GATED ? 2 : 1));
        const u32 row = TURNS   ? 2 * (tile.output + strip * 64)
                        : GATED ? tile.output + strip * p.product.outputs
                                : tile.output + strip * HALF_ROWS;
        // Rows after the last are zeros, so any scale will do.
        const u64 block = static_cast<u64>(tile.expert) * row_blocks + min(row / SCALED_ELEMENTS, row_blocks - 1);
        return block * blocks_of(p.product.columns);
    }

    // Writes the strips of a stage, of columns 128 `block` on.
    __device__ __forceinline__ void scale(const ProductTile& tile, const u64 (&weights)[2], u32 block, u32 turn) const {
        constexpr u32 EACH = (TOKENS + 31) / 32;  // tokens of a thread
        const u32 lane = threadIdx.x % 32, stage = turn % STAGES;
        float of_rows[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {  // before the wait, which hides how long they take
            const u32 token = i * 32 + lane;
            const u64 at = (tile.row + token) * p.row_stride + block * p.block_stride;
            of_rows[i] = __uint_as_float(ptx::load_4_if(token < tile.rows, p.row_scales + at * 4, 0));
        }
        const float first = __uint_as_float(ptx::load_4(p.weight_scales + (weights[0] + block) * 4));
        const float second = __uint_as_float(ptx::load_4(p.weight_scales + (weights[1] + block) * 4));
        await(memory.empty(stage), (turn / STAGES + 1) & 1);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 token = i * 32 + lane;
            if (token < TOKENS) {
                ptx::shared_store_4(strip_of(memory, stage, 0) + token * 4, __float_as_uint(of_rows[i] * first));
                ptx::shared_store_4(strip_of(memory, stage, 1) + token * 4, __float_as_uint(of_rows[i] * second));
            }
        }
        __syncwarp();  // all threads of the warp have written their factors
        if (lane == 0) {
            ptx::barrier_arrive(memory.full(stage));
        }
    }
};

// Multiplies 128 columns of 64 rows by those of N others.
template <u32 N>
__device__ __forceinline__ void multiply_block(float (&products)[N / 2], u64 rows, u64 others) {
    ptx::wgmma_e4m3<N, false>(products, rows, others);
#pragma unroll
    for (u32 part = 1; part < COLUMNS / 32; ++part) {
        ptx::wgmma_e4m3<N, true>(products, rows + part * NEXT_COLUMNS, others + part * NEXT_COLUMNS);
    }
    ptx::wgmma_commit();
}

// Two floats that are next to each other in shared memory.
struct Floats2 {
    float first, second;

    __device__ __forceinline__ explicit Floats2(u32 at) {
        const u64 both = ptx::shared_load_8(at);
        first = __uint_as_float(static_cast<u32>(both));
        second = __uint_as_float(static_cast<u32>(both >> 32));
    }
};

// Adds products of 128 columns, times the factors of their tokens, to the sums.
template <u32 COUNT>
__device__ __forceinline__ void promote(float (&sums)[COUNT], const float (&products)[COUNT], u32 strip) {
    const u32 own = strip + threadIdx.x % 4 * 8;  // a thread has two tokens of each eight
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4) {
        const Floats2 factors(own + i * 8);
        sums[i] = fmaf(products[i], factors.first, sums[i]);
        sums[i + 1] = fmaf(products[i + 1], factors.second, sums[i + 1]);
        sums[i + 2] = fmaf(products[i + 2], factors.first, sums[i + 2]);
        sums[i + 3] = fmaf(products[i + 3], factors.second, sums[i + 3]);
    }
}

}  // namespace raymoe
