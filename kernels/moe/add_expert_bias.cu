// Adds to each row the bias of its expert. WEIGHTED: times the row's weight. The sum is float32 and rounded once.
//
// A warp takes a row. Rows in gaps become zeros and are not read; rows from the last offset on are neither read nor
// written.

#include "raymoe/moe/expert_rows.cuh"

namespace raymoe {

struct AddExpertBiasParams {
    const u8* source;   // bfloat16 [capacity][width * 8]
    const u8* bias;     // bfloat16 [experts][width * 8]
    const u8* weights;  // float32 [capacity], with WEIGHTED
    u8* out;            // bfloat16 [capacity][width * 8]
    ExpertLayout rows;
    u32 width;  // places of eight elements in a row
    u32 unused;
};

__device__ __forceinline__ void add_bias(const AddExpertBiasParams& p, u64 row, const Place& place) {
    constexpr u32 TOGETHER = 4;  // loads of a lane that overlap
    const u8* const from = p.source + row * p.width * 16;
    const u8* const bias = p.bias + static_cast<u64>(place.expert) * p.width * 16;
    u8* const into = p.out + row * p.width * 16;
    const float weight = weight_of(p.weights, row, place);
    for_each_place<TOGETHER>(p.width, [&](const u32(&places)[TOGETHER], const bool(&there)[TOGETHER]) {
        ptx::Bytes16 rows[TOGETHER], biases[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const bool wanted = there[k] && !place.in_gap;
            rows[k] = ptx::load_16_if(wanted, from + places[k] * 16ull, {0, 0});
            biases[k] = ptx::load_16_constant_if(wanted, bias + places[k] * 16ull, {0, 0});
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            float sums[8], added[8];
            Bf16::unpack(rows[k], sums);
            Bf16::unpack(biases[k], added);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                sums[j] += added[j] * weight;
            }
            const ptx::Bytes16 result = Bf16::pack(sums);
            if (there[k]) {
                ptx::store_16(into + places[k] * 16ull, result);
            }
        }
    });
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROWS_THREADS)
    add_expert_bias(const __grid_constant__ raymoe::AddExpertBiasParams p) {
    using namespace raymoe;
    for_each_row(end_of_rows(p.rows), [&](u64 row) { add_bias(p, row, place_of(p.rows, row)); });
}
