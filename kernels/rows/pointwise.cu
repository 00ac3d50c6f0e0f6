// Computes EXPRESSION, in float variables v0, v1, ..., for each element of some inputs.
//
// The expression comes from a parser that knows a few operators and functions, never from a user's text as it is. An
// input is FULL (rows that are streamed), ROW (one vector for all rows) or COLUMN (one element for each row). KINDS
// lists them; there is at least one FULL input.
//
// A group computes a piece of a row (rows/pieces.cuh). The result takes the place of the first FULL input in the stage.

#include "raymoe/rows/pieces.cuh"

#ifndef KINDS
#define KINDS FULL
#endif
#ifndef EXPRESSION
#define EXPRESSION v0
#endif

namespace raymoe {

enum Kind : u32 { FULL, ROW, COLUMN };

constexpr u32 MOST_INPUTS = 9;  // the eight of an expression, and the gradient of its result

__device__ constexpr u32 count_of_inputs() {
    constexpr Kind kinds[] = {KINDS};
    return sizeof(kinds) / sizeof(Kind);
}

__device__ constexpr Kind kind_of(u32 input) {
    constexpr Kind kinds[] = {KINDS};
    return kinds[input];
}

// The number of FULL inputs before `input`.
__device__ constexpr u32 stream_of(u32 input) {
    u32 streams = 0;
    for (u32 i = 0; i < input; ++i) {
        streams += kind_of(i) == FULL ? 1 : 0;
    }
    return streams;
}

constexpr u32 INPUTS = count_of_inputs(), STREAMS = stream_of(INPUTS);
static_assert(INPUTS <= MOST_INPUTS && STREAMS >= 1, "");

struct PointwiseParams {
    PipeRows streams[MOST_INPUTS];  // FULL inputs, one after the other
    PipeRows vectors[MOST_INPUTS];  // ROW and COLUMN inputs, at the number of the input
    PipeRows out;                   // it has the offset of the first stream
    PipeWork work;
};

// Functions that an expression names. Results of 16 bits round away what the fast forms lose: the share of |x| * 2^-24
// that exp loses, and units in the last place of a float. Where e^-x is above 2^126, silu and logistic become zero:
// their sizes are below 1.1e-36 there.
constexpr bool FAST = ROW_TYPE::BYTES == 2;

__device__ __forceinline__ float exponential(float x) { return FAST ? __expf(x) : expf(x); }
__device__ __forceinline__ float logistic(float x) { return FAST ? sigmoid(x) : 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return FAST ? x * sigmoid(x) : x / (1.0f + expf(-x)); }

__device__ __forceinline__ float evaluate(const float (&v)[MOST_INPUTS]) {
    const float v0 = v[0], v1 = v[1], v2 = v[2], v3 = v[3], v4 = v[4], v5 = v[5], v6 = v[6], v7 = v[7], v8 = v[8];
    (void)v0, (void)v1, (void)v2, (void)v3, (void)v4, (void)v5, (void)v6, (void)v7, (void)v8;
    return EXPRESSION;
}

template <class Type>
__device__ __forceinline__ float element_of(const u8* at) {
    if constexpr (Type::BYTES == 4) {
        return *reinterpret_cast<const float*>(at);
    } else {
        const u32 bits = *reinterpret_cast<const unsigned short*>(at);
        float pair[8];
        Type::unpack({bits, 0}, pair);
        return pair[0];
    }
}

__device__ __forceinline__ void load_inputs(const PointwiseParams& p, const Tile& tile, u32 r, u32 eight, bool there,
                                            Elements<ROW_TYPE> (&into)[INPUTS]) {
#pragma unroll
    for (u32 i = 0; i < INPUTS; ++i) {
        if (kind_of(i) == FULL) {
            into[i] = take<ROW_TYPE>(p.streams[stream_of(i)], tile, r, eight, there);
        } else if (kind_of(i) == ROW) {
            const u64 at = static_cast<u64>(tile.first + eight) * Elements<ROW_TYPE>::BYTES;
            into[i] = Elements<ROW_TYPE>::load_if(there, p.vectors[i].at + at);
        }
    }
}

__device__ __forceinline__ void put_rows(const PointwiseParams& p, const Tile& tile) {
    for_each_vectors(tile, [&](u32 r, const u32(&eights)[TOGETHER], const bool(&there)[TOGETHER]) {
        Elements<ROW_TYPE> in[TOGETHER][INPUTS];
        float columns[INPUTS];
#pragma unroll
        for (u32 i = 0; i < INPUTS; ++i) {
            columns[i] = kind_of(i) == COLUMN
                             ? element_of<ROW_TYPE>(p.vectors[i].at + (tile.row + r) * p.vectors[i].stride)
                             : 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            load_inputs(p, tile, r, eights[k], there[k], in[k]);
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            float values[INPUTS][8], out[8];
#pragma unroll
            for (u32 i = 0; i < INPUTS; ++i) {
                if (kind_of(i) != COLUMN) {
                    in[k][i].unpack(values[i]);
                }
            }
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                float v[MOST_INPUTS] = {};
#pragma unroll
                for (u32 i = 0; i < INPUTS; ++i) {
                    v[i] = kind_of(i) == COLUMN ? columns[i] : values[i][j];
                }
                out[j] = evaluate(v);
            }
            if (there[k]) {
                put(Elements<ROW_TYPE>::pack(out), p.out, tile, r, eights[k]);
            }
        }
    });
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    pointwise(const __grid_constant__ raymoe::PointwiseParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<STREAMS> pipe(p.work, p.streams, shared);
    pipe.run([&](const Tile& tile) {
        put_rows(p, tile);
        pipe.store(tile, [&] { store_tile(p.out, tile); });
    });
}
