// The activation between the two products of experts that have a bias, or another activation than SwiGLU
// (moe/gated.cuh has its formula). WEIGHTED: each row is multiplied by its weight before it is rounded.
//
// A warp takes a row. Rows in gaps become zeros and are not read; rows from the last offset on are neither read nor
// written.

#include "raymoe/moe/gated.cuh"

namespace raymoe {

struct GatedActivationParams {
    const u8* gate_up;  // bfloat16 [capacity][2 * width * 8]
    const u8* bias;     // bfloat16 [experts][2 * width * 8], with BIASED
    const u8* weights;  // float32 [capacity], with WEIGHTED
    u8* out;            // bfloat16 [capacity][width * 8]
    ExpertLayout rows;
    GatedForm form;
};

__device__ __forceinline__ ptx::Bytes16 activated(const GatedForm& form, const GatePair& pair, const GatePair& bias,
                                                  float weight) {
    float gate[8], up[8];
    unpack_biased(pair, bias, gate, up);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        const float g = clamped_above(gate[j], form.limit), u = clamped(up[j], form.limit);
        gate[j] = g * sigmoid(form.alpha * g) * (u + form.up_plus) * weight;
    }
    return Bf16::pack(gate);
}

__device__ __forceinline__ void put_row(const GatedActivationParams& p, u64 row, const Place& place) {
    constexpr u32 TOGETHER = 2;  // loads of a lane that overlap, of two times 16 bytes
    const u32 width = p.form.width;
    const u8* const from = p.gate_up + row * width * 32;
    const u8* const bias = p.bias + static_cast<u64>(place.expert) * width * 32;
    u8* const into = p.out + row * width * 16;
    const float weight = weight_of(p.weights, row, place);
    for_each_place<TOGETHER>(width, [&](const u32(&places)[TOGETHER], const bool(&there)[TOGETHER]) {
        GatePair pairs[TOGETHER], biases[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const bool wanted = there[k] && !place.in_gap;
            pairs[k] = GatePair::load_if(wanted, from, places[k], width);
            biases[k] = GatePair::load_constant_if(BIASED && wanted, bias, places[k], width);
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const ptx::Bytes16 result = activated(p.form, pairs[k], biases[k], weight);
            if (there[k]) {
                ptx::store_16(into + places[k] * 16ull, result);
            }
        }
    });
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROWS_THREADS)
    gated_activation(const __grid_constant__ raymoe::GatedActivationParams p) {
    using namespace raymoe;
    for_each_row(end_of_rows(p.rows), [&](u64 row) { put_row(p, row, place_of(p.rows, row)); });
}
