// The results of a product's tile: what is added, multiplied and converted, and where it goes.
#pragma once

#include "raymoe/moe/product/product.cuh"

namespace raymoe {

#ifdef HALF_FLOATS
__device__ __forceinline__ float bias_at(const u8* at) { return ptx::from_f16(*reinterpret_cast<const u16*>(at)); }
#else
__device__ __forceinline__ float bias_at(const u8* at) {
    return __uint_as_float(static_cast<u32>(*reinterpret_cast<const u16*>(at)) << 16);
}
#endif

// Four results in a row of one token, outputs `four_outputs()` on of the warp's 16.
struct FourOutputs {
    u32 first, second;  // two outputs each

    __device__ __forceinline__ u64 packed() const { return first | static_cast<u64>(second) << 32; }
};

// Which four of its 16 outputs a thread of the warp has after `by_token`.
__device__ __forceinline__ u32 four_outputs() { return threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4; }

// Swaps pairs of outputs between neighbouring threads, so that each has four in a row of one eight. Before, a thread
// has outputs 2 c and 2 c + 1 of two eights, c = lane % 4.
__device__ __forceinline__ FourOutputs four_in_a_row(u32 low, u32 high) {
    const bool odd = threadIdx.x % 2 != 0;
    const u32 other = __shfl_xor_sync(0xFFFFFFFF, odd ? low : high, 1);
    return odd ? FourOutputs{other, high} : FourOutputs{low, other};
}

// Turns 16 outputs of 8 tokens, as a warp has them in the sums of wgmma, into four outputs of token lane / 4 each.
__device__ __forceinline__ FourOutputs by_token(const float (&sums)[4]) {
    // Before: two tokens of one output. After: outputs 2 c and 2 c + 1 of one token, c = lane % 4.
    const u32 low = ptx::transposed_8x8(packed(sums[0], sums[1]));
    const u32 high = ptx::transposed_8x8(packed(sums[2], sums[3]));
    return four_in_a_row(low, high);
}

// The activation of a gate and its up product.
__device__ __forceinline__ float gated(const ProductParams& p, float gate, float up) {
#ifdef GENERAL_GATE
    gate = fminf(gate, p.limit);
    up = fminf(fmaxf(up, -p.limit), p.limit);
    return __fdividef(gate, 1.0f + __expf(-p.alpha * gate)) * (up + p.up_plus);
#else
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
#endif
}

// The results of one tile: where they go, and what is added or multiplied.
struct Results {
    const ProductParams& p;
    const ProductTile& tile;
    u32 first;         // the first output of this warp
    bool there[2];     // whether the outputs of each half are in y; they are a multiple of 16
    float bias[2][2];  // of each half: rows lane / 4 and lane / 4 + 8

    __device__ __forceinline__ Results(const ProductParams& params, const ProductTile& the_tile)
        : p(params), tile(the_tile), first(tile.output + threadIdx.x / 128 * 64 + threadIdx.x % 128 / 32 * 16) {
        there[0] = first < p.outputs;
        there[1] = GATED ? there[0] : first + HALF_ROWS < p.outputs;
        if constexpr (BIASED) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 output = min(first + (GATED ? 0 : half * HALF_ROWS) + threadIdx.x % 32 / 4 + i * 8,
                                           p.outputs - 1);
                    const u32 row = !GATED ? output : TURNS ? 2 * output + half : output + half * p.outputs;
                    const u64 rows = static_cast<u64>(tile.expert) * (GATED ? 2 : 1) * p.outputs;
                    bias[half][i] = bias_at(p.bias + (rows + row) * 2);
                }
            }
        }
    }

    // Stores the results of tokens 8 `eight` to 8 `eight` + 7 from the sums of both halves.
    __device__ __forceinline__ void store(u32 eight, float (&low)[4], float (&high)[4]) const {
        const u32 token = eight * 8 + threadIdx.x % 32 / 4;
        const bool wanted = token < tile.stored, zero = ZEROES_GAPS && token >= tile.rows;
        const u64 row = tile.row + token;
        add_biases(low, high);
        if constexpr (STORES_PRODUCTS) {
            store_products(row, wanted && there[0], zero, by_token(low), by_token(high));
        }
        gate_and_weigh(eight, low, high);
        store_four(p.y, row, first, p.outputs, wanted && there[0], zero, by_token(low));
        if constexpr (!GATED) {
            store_four(p.y, row, first + HALF_ROWS, p.outputs, wanted && there[1], zero, by_token(high));
        }
    }

    __device__ __forceinline__ void add_biases(float (&low)[4], float (&high)[4]) const {
        if constexpr (BIASED) {
            add_bias(low, 0);
            add_bias(high, 1);
        }
    }

    // Products become results. With a gate they are in `low`.
    __device__ __forceinline__ void gate_and_weigh(u32 eight, float (&low)[4], float (&high)[4]) const {
        if constexpr (GATED) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                low[i] = gated(p, low[i], high[i]);
            }
        }
        if constexpr (WEIGHTED) {
            weigh(eight, low, high);
        }
    }

  private:
    __device__ __forceinline__ void add_bias(float (&sums)[4], u32 half) const {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sums[i] += bias[half][i / 2];
        }
    }

    // Multiplies by the weights of this thread's two tokens.
    __device__ __forceinline__ void weigh(u32 eight, float (&low)[4], float (&high)[4]) const {
        const u32 token = eight * 8 + threadIdx.x % 4 * 2;
        const u8* at = p.row_weights + (static_cast<u64>(tile.row) + token) * 4;
        const float first_weight = __uint_as_float(ptx::load_4_if(token < tile.rows, at, 0));
        const float second_weight = __uint_as_float(ptx::load_4_if(token + 1 < tile.rows, at + 4, 0));
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            low[i] *= i % 2 == 0 ? first_weight : second_weight;
            high[i] *= i % 2 == 0 ? first_weight : second_weight;
        }
    }

    // Stores four outputs of one row. The warp's 16 outputs of a row are one sector of 32 bytes.
    static __device__ __forceinline__ void store_four(u8* y, u64 row, u32 output, u32 outputs, bool wanted, bool zero,
                                                      FourOutputs four) {
        if (wanted) {
            ptx::store_8(y + (row * outputs + output + four_outputs()) * 2, zero ? 0 : four.packed());
        }
    }

    __device__ __forceinline__ void store_products(u64 row, bool wanted, bool zero, FourOutputs gate,
                                                   FourOutputs up) const {
        if constexpr (TURNS) {
            if (wanted) {
                u8* at = p.gate_up + (row * p.outputs + first + four_outputs()) * 4;
                ptx::store_16(at, zero ? ptx::Bytes16{0, 0} : ptx::Bytes16{in_turn(gate.first, up.first),
                                                                           in_turn(gate.second, up.second)});
            }
        } else {
            store_four(p.gate_up, row, first, 2 * p.outputs, wanted, zero, gate);
            store_four(p.gate_up, row, first + p.outputs, 2 * p.outputs, wanted, zero, up);
        }
    }

    // Two elements of gate and two of up, in turn.
    static __device__ __forceinline__ u64 in_turn(u32 gate, u32 up) {
        return __byte_perm(gate, up, 0x5410) | static_cast<u64>(__byte_perm(gate, up, 0x7632)) << 32;
    }
};

}  // namespace raymoe
