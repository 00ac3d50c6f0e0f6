// Computes the gradient of SwiGLU for both halves of a row, gate and up, from dy and these halves.
//
//   s = sigmoid(gate)    d_gate = dy * up * s * (1 + gate * (1 - s))    d_up = dy * gate * s
//
// Rows, pieces and `end` are those of swiglu.cu. The gradients take the places of gate and up in the stage.
//
// With WEIGHTED, dy is the gradient of weight * silu(gate) * up, with a weight for each row. Both gradients are then
// multiplied by the weight, which has a gradient too:
//
//   d_weight = sum over the row of dy * silu(gate) * up
//
// dy and both halves are in registers for the other gradients, so it takes no more reads. A group sums its piece of the
// row in a fixed order, and stores the sum at [piece][row]. The caller adds the pieces of each row, in a fixed order
// too, so the gradient is the same in every run. With a row in one piece, its sum is the gradient.

#include "raymoe/rows/pieces.cuh"
#include "raymoe/rows/sums.cuh"

namespace raymoe {

struct SwigluBackwardParams {
    PipeRows inputs[3];   // gate; up; dy
    PipeRows outputs[2];  // gradients of gate and up, with the offsets of these
    PipeWork work;
    const u8* end;      // int32, or null
    const u8* weights;  // float32 [rows], with WEIGHTED
    u8* piece_sums;     // float32 [pieces][rows], with WEIGHTED
};

// Stores the gradients of a row of a tile, and returns this thread's part of the sum of dy * silu(gate) * up.
__device__ __forceinline__ float put_gradients_of_row(const SwigluBackwardParams& p, const Tile& tile, u32 r) {
    const float weight = weight_of_row(p.weights, tile, r);
    float along = 0.0f;
    for_each_vectors_of_row(tile, [&](const u32(&eights)[TOGETHER], const bool(&there)[TOGETHER]) {
        Elements<ROW_TYPE> in[3][TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
#pragma unroll
            for (u32 i = 0; i < 3; ++i) {
                in[i][k] = take<ROW_TYPE>(p.inputs[i], tile, r, eights[k], there[k]);
            }
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            float gate[8], up[8], dy[8];
            in[0][k].unpack(gate);
            in[1][k].unpack(up);
            in[2][k].unpack(dy);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                const float s = sigmoid(gate[j]), by_up = up[j];
                if constexpr (WEIGHTED) {
                    along += dy[j] * (gate[j] * s * by_up);
                    dy[j] *= weight;
                }
                up[j] = dy[j] * gate[j] * s;
                gate[j] = dy[j] * by_up * s * (1.0f + gate[j] * (1.0f - s));
            }
            if (there[k]) {
                put(Elements<ROW_TYPE>::pack(gate), p.outputs[0], tile, r, eights[k]);
                put(Elements<ROW_TYPE>::pack(up), p.outputs[1], tile, r, eights[k]);
            }
        }
    });
    return along;
}

__device__ __forceinline__ void put_gradients(const SwigluBackwardParams& p, const Tile& tile, GroupSums& sums) {
#pragma unroll 1
    for (u32 r = 0; r < tile.rows; ++r) {
        float along[1] = {put_gradients_of_row(p, tile, r)};
        if constexpr (WEIGHTED) {
            sums.add(along);
            if (thread_in_group() == 0) {
                const u64 piece = tile.first / p.work.piece;
                ptx::store_4(p.piece_sums + (piece * p.work.rows + tile.row + r) * 4, __float_as_uint(along[0]));
            }
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    swiglu_backward(const __grid_constant__ raymoe::SwigluBackwardParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<3> pipe(bounded(p.work, p.end), p.inputs, shared);
    GroupSums sums(pipe.sums());
    pipe.run([&](const Tile& tile) {
        put_gradients(p, tile, sums);
        pipe.store(tile, [&] {
            store_tile(p.outputs[0], tile);
            store_tile(p.outputs[1], tile);
        });
    });
}
