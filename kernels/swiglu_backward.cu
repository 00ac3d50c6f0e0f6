// The gradient of SwiGLU: from dy and the halves of a row, gate and up, to the gradients of both halves.
//
//   s = sigmoid(gate)    d_gate = dy * up * s * (1 + gate * (1 - s))    d_up = dy * gate * s
//
// Rows, pieces and `end` as in swiglu.cu. The gradients take the places of gate and up in the stage.

#include "raymoe/pipe/pieces.cuh"

namespace raymoe {

struct SwigluBackwardParams {
    PipeRows inputs[3];   // gate; up; dy
    PipeRows outputs[2];  // gradients of gate and up, with the offsets of these
    PipeWork work;
    const u8* end;  // int32, or null
};

__device__ __forceinline__ void put_gradients(const SwigluBackwardParams& p, const Tile& tile) {
    for_each_vectors(tile, [&](u32 r, const u32(&eights)[TOGETHER], const bool(&there)[TOGETHER]) {
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
                up[j] = dy[j] * gate[j] * s;
                gate[j] = dy[j] * by_up * s * (1.0f + gate[j] * (1.0f - s));
            }
            if (there[k]) {
                put(Elements<ROW_TYPE>::pack(gate), p.outputs[0], tile, r, eights[k]);
                put(Elements<ROW_TYPE>::pack(up), p.outputs[1], tile, r, eights[k]);
            }
        }
    });
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    swiglu_backward(const __grid_constant__ raymoe::SwigluBackwardParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<3> pipe(bounded(p.work, p.end), p.inputs, shared);
    pipe.run([&](const Tile& tile) {
        put_gradients(p, tile);
        pipe.store(tile, [&] {
            store_tile(p.outputs[0], tile);
            store_tile(p.outputs[1], tile);
        });
    });
}
