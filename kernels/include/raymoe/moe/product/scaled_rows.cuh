// Tiles of many tokens, whose 64 rows of a wgmma are tokens. product_fp8.cu says why.
//
// A warpgroup has 64 tokens of the tile, and multiplies them by both halves of the weights, one after the other. A
// thread has two tokens, lane / 4 and lane / 4 + 8 of the warp's 16, and of each eight outputs 2 c and 2 c + 1,
// c = lane % 4.
#pragma once

#include "raymoe/moe/product/quantised_results.cuh"

namespace raymoe {

// The factors of a thread's two tokens.
struct RowFactors {
    float first, second;

    __device__ __forceinline__ explicit RowFactors(u32 strip) {
        const u32 at = strip + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 4;
        first = __uint_as_float(ptx::shared_load_4(at));
        second = __uint_as_float(ptx::shared_load_4(at + 8 * 4));
    }
};

// Adds products of 128 columns, times the factors of their tokens, to the sums of outputs FROM on.
template <u32 FROM, u32 TO>
__device__ __forceinline__ void promote_rows(float (&sums)[HALF_ROWS / 2], const float (&products)[HALF_ROWS / 2],
                                             RowFactors factors) {
#pragma unroll
    for (u32 i = FROM / 2; i < TO / 2; i += 4) {
        sums[i] = fmaf(products[i], factors.first, sums[i]);
        sums[i + 1] = fmaf(products[i + 1], factors.first, sums[i + 1]);
        sums[i + 2] = fmaf(products[i + 2], factors.second, sums[i + 2]);
        sums[i + 3] = fmaf(products[i + 3], factors.second, sums[i + 3]);
    }
}

// The results of a tile by the rows of wgmma: where they go, and what is added or multiplied.
struct RowResults {
    const ProductParams& p;
    const ProductTile& tile;
    u32 token;         // the thread's first one
    bool there[2];     // whether its tokens are rows of the expert
    float weights[2];  // WEIGHTED_ROWS: of the tokens

    __device__ __forceinline__ RowResults(const ProductParams& params, const ProductTile& the_tile)
        : p(params), tile(the_tile), token(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            there[i] = token + i * 8 < tile.rows;
            if constexpr (WEIGHTED) {
                weights[i] = __uint_as_float(ptx::load_4_if(there[i], p.row_weights + row(i) * 4, 0));
            }
        }
    }

    __device__ __forceinline__ u64 row(u32 i) const { return static_cast<u64>(tile.row) + token + i * 8; }

    // Whether the tile's outputs 8 `eight` and more are in y. y has a multiple of 16 outputs.
    __device__ __forceinline__ bool has(u32 half, u32 eight) const {
        return tile.output + (GATED ? 0 : half * HALF_ROWS) + eight * 8 < p.outputs;
    }

    // Products of 8 outputs become results. With a gate they are in `low`.
    __device__ __forceinline__ void finish(u32 eight, float (&low)[4], float (&high)[4]) const {
        if constexpr (BIASED) {
            add_bias(low, 0, eight);
            add_bias(high, 1, eight);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if constexpr (GATED) {
                low[i] = gated(p, low[i], high[i]);
            }
            if constexpr (WEIGHTED) {
                low[i] *= weights[i / 2];
                high[i] *= weights[i / 2];
            }
        }
    }

    // Stores 16 outputs of both tokens from the results of two eights, `eight` and the next.
    __device__ __forceinline__ void store(u32 half, u32 eight, const float (&of_first)[4],
                                          const float (&of_next)[4]) const {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const FourOutputs four = four_in_a_row(packed(of_first[2 * i], of_first[2 * i + 1]),
                                                   packed(of_next[2 * i], of_next[2 * i + 1]));
            if (there[i] && has(half, eight)) {
                const u32 output = tile.output + (GATED ? 0 : half * HALF_ROWS) + eight * 8 + four_outputs();
                ptx::store_8(p.y + (row(i) * p.outputs + output) * 2, four.packed());
            }
        }
    }

  private:
    __device__ __forceinline__ void add_bias(float (&sums)[4], u32 half, u32 eight) const {
        const u64 rows = static_cast<u64>(tile.expert) * (GATED ? 2 : 1) * p.outputs;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 output = min(tile.output + (GATED ? 0 : half * HALF_ROWS) + eight * 8 + threadIdx.x % 4 * 2 + i,
                                   p.outputs - 1);
            const u32 row = !GATED ? output : TURNS ? 2 * output + half : output + half * p.outputs;
            const float bias = bias_at(p.bias + (rows + row) * 2);
            sums[i] += bias;
            sums[i + 2] += bias;
        }
    }
};

__device__ __forceinline__ void store_rows(const RowResults& results, float (&sums)[2][HALF_ROWS / 2]) {
#pragma unroll
    for (u32 eight = 0; eight < HALF_ROWS / 8; eight += 2) {
        float low[2][4], high[2][4];
#pragma unroll
        for (u32 next = 0; next < 2; ++next) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                low[next][i] = sums[0][(eight + next) * 4 + i];
                high[next][i] = sums[1][(eight + next) * 4 + i];
            }
            results.finish(eight + next, low[next], high[next]);
        }
        results.store(0, eight, low[0], low[1]);
        if constexpr (!GATED) {
            results.store(1, eight, high[0], high[1]);
        }
    }
}

// Stores results as 8-bit floats. Four threads have the 128 outputs of a token, which have one scale.
__device__ __forceinline__ void store_quantised_rows(const ScaledProductParams& p, const RowResults& results,
                                                     float (&sums)[2][HALF_ROWS / 2]) {
    float(&values)[HALF_ROWS / 2] = sums[0];
    float reach[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 eight = 0; eight < HALF_ROWS / 8; ++eight) {
        float low[4], high[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            low[i] = values[eight * 4 + i];
            high[i] = sums[1][eight * 4 + i];
        }
        results.finish(eight, low, high);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[eight * 4 + i] = low[i];
            const float size = results.has(0, eight) ? finite_magnitude(low[i]) : 0.0f;
            reach[i / 2] = fmaxf(reach[i / 2], size);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        reach[i] = fmaxf(reach[i], __shfl_xor_sync(0xFFFFFFFF, reach[i], 1));
        reach[i] = fmaxf(reach[i], __shfl_xor_sync(0xFFFFFFFF, reach[i], 2));
        const Scaling scaling(reach[i]);
        if (threadIdx.x % 4 == 0 && results.there[i]) {
            const u64 at = results.tile.output / SCALED_ELEMENTS * p.y_scale_stride + results.row(i);
            ptx::store_4(p.y_scales + at * 4, __float_as_uint(scaling.scale));
        }
#pragma unroll
        for (u32 eight = 0; eight < HALF_ROWS / 8; eight += 2) {
            float scaled[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                scaled[j] = values[(eight + j / 2) * 4 + 2 * i + j % 2] * scaling.factor;
            }
            const u32 bytes = four_bytes_in_a_row(ptx::to_e4m3x4(scaled));
            if (results.there[i] && results.has(0, eight)) {
                const u32 output = results.tile.output + eight * 8 + four_outputs();
                ptx::store_4(p.product.y + results.row(i) * p.product.outputs + output, bytes);
            }
        }
    }
}

template <>
__device__ __forceinline__ void multiply_many_tokens(const ScaledProductParams& p, const Memory& memory,
                                                     const ProductTile& tile, u32& turn) {
    float sums[2][HALF_ROWS / 2], products[HALF_ROWS / 2];
#pragma unroll
    for (u32 i = 0; i < HALF_ROWS / 2; ++i) {
        sums[0][i] = sums[1][i] = products[i] = 0.0f;
    }
    const u32 steps = (p.product.columns + COLUMNS - 1) / COLUMNS, warpgroup = threadIdx.x / 128;
    for (u32 step = 0; step < steps; ++step, ++turn) {
        const u32 stage = turn % STAGES;
        await(memory.full(stage), turn / STAGES & 1);
        const u64 tokens = operand_descriptor(memory.tokens(stage) + warpgroup * (64 * ROW_BYTES));
        const u64 weights = operand_descriptor(memory.weights(stage));
        const RowFactors of_first(strip_of(memory, stage, 0)), of_second(strip_of(memory, stage, 1));
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            ptx::wgmma_fence();  // orders the registers of the products before the wgmma that replace them
            multiply_block<HALF_ROWS>(products, tokens, weights + half * (HALF_BYTES / 16));
            ptx::wgmma_wait<0>();
            ptx::sums_have_come(products);
            if constexpr (TURNS) {  // a strip for each 64 outputs
                promote_rows<0, HALF_ROWS / 2>(sums[half], products, of_first);
                promote_rows<HALF_ROWS / 2, HALF_ROWS>(sums[half], products, of_second);
            } else {
                promote_rows<0, HALF_ROWS>(sums[half], products, half == 0 ? of_first : of_second);
            }
        }
        __syncwarp();  // all threads of the warp have read their factors
        give_back(memory, turn);
    }
    const RowResults results(p.product, tile);
    if constexpr (QUANTISES) {
        store_quantised_rows(p, results, sums);
    } else {
        store_rows(results, sums);
    }
}

}  // namespace raymoe
