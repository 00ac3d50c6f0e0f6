// Computes the gradients of gated_activation.cu for gate and up, from dh, and from gate and up before their biases.
//
//   g, u = the clamped gate and up       s = sigmoid(alpha * g)
//   d_gate = weight * dh * (u + up_plus) * s * (1 + alpha * g * (1 - s))    0 where gate > limit
//   d_up = weight * dh * g * s                                              0 where |up| > limit
//   d_weight = sum over the row of dh * g * s * (u + up_plus)
//
// These gradients are those of the biased numbers, so the gradient of a bias is their sum over the rows of its expert
// (expert_sums.cu). A warp takes a row and sums in a fixed order, so results are the same in every run. Rows in gaps
// get zeros and are not read; rows from the last offset on are neither read nor written.

#include "raymoe/moe/gated.cuh"

namespace raymoe {

struct GatedActivationBackwardParams {
    const u8* dh;       // bfloat16 [capacity][width * 8]
    const u8* gate_up;  // bfloat16 [capacity][2 * width * 8]
    const u8* bias;     // bfloat16 [experts][2 * width * 8], with BIASED
    const u8* weights;  // float32 [capacity], with WEIGHTED
    u8* d_gate_up;      // bfloat16 [capacity][2 * width * 8]
    u8* d_weights;      // float32 [capacity], with WEIGHTED
    ExpertLayout rows;
    GatedForm form;
};

// Returns the gradients of eight elements of gate and up. Adds their part of the weight's gradient to `along`.
__device__ __forceinline__ GatePair gradients(const GatedForm& form, const GatePair& pair, const GatePair& bias,
                                              const ptx::Bytes16& of_h, float weight, float& along) {
    float gate[8], up[8], dh[8];
    unpack_biased(pair, bias, gate, up);
    Bf16::unpack(of_h, dh);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        const float g = clamped_above(gate[j], form.limit), u = clamped(up[j], form.limit) + form.up_plus;
        const float s = sigmoid(form.alpha * g);
        along += dh[j] * (g * s * u);
        const float d = dh[j] * weight;
        const bool gate_clamped = gate[j] > form.limit, up_clamped = fabsf(up[j]) > form.limit;
        gate[j] = gate_clamped ? 0.0f : d * u * s * (1.0f + form.alpha * g * (1.0f - s));
        up[j] = up_clamped ? 0.0f : d * g * s;
    }
    return GatePair::pack(gate, up);
}

__device__ __forceinline__ void put_gradients(const GatedActivationBackwardParams& p, u64 row, const Place& place) {
    constexpr u32 TOGETHER = 2;  // loads of a lane that overlap, of three times 16 bytes
    const u32 width = p.form.width;
    const u8* const from = p.gate_up + row * width * 32;
    const u8* const of_h = p.dh + row * width * 16;
    const u8* const bias = p.bias + static_cast<u64>(place.expert) * width * 32;
    u8* const into = p.d_gate_up + row * width * 32;
    const float weight = weight_of(p.weights, row, place);
    float along = 0.0f;
    for_each_place<TOGETHER>(width, [&](const u32(&places)[TOGETHER], const bool(&there)[TOGETHER]) {
        GatePair pairs[TOGETHER], biases[TOGETHER];
        ptx::Bytes16 dh[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const bool wanted = there[k] && !place.in_gap;
            pairs[k] = GatePair::load_if(wanted, from, places[k], width);
            dh[k] = ptx::load_16_if(wanted, of_h + places[k] * 16ull, {0, 0});
            biases[k] = GatePair::load_constant_if(BIASED && wanted, bias, places[k], width);
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const GatePair result = gradients(p.form, pairs[k], biases[k], dh[k], weight, along);
            if (there[k]) {
                result.store(into, places[k], width);
            }
        }
    });
    if constexpr (WEIGHTED) {
        along = sum_of_warp(along);
        if (threadIdx.x % 32 == 0) {
            ptx::store_4(p.d_weights + row * 4, __float_as_uint(along));
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROWS_THREADS)
    gated_activation_backward(const __grid_constant__ raymoe::GatedActivationBackwardParams p) {
    using namespace raymoe;
    for_each_row(end_of_rows(p.rows), [&](u64 row) { put_gradients(p, row, place_of(p.rows, row)); });
}
