// Computes the gradients of `weight * other` for each row, from dy.
//
//   d_weight = sum over the row of dy * other, in float32 and in a fixed order, with DOTTED
//   dy is multiplied by the weight in its place, with WEIGHTED: then it is the gradient of `other`
//
// BY_EXPERT: `other` is the bias of the row's expert, and rows in gaps have the sum 0. Else it is a row like dy.
//
// A warp takes a row. Rows from the last offset on are neither read nor written.

#include "raymoe/moe/expert_rows.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16
#endif
#ifdef DOTTED_ROWS
#define DOTTED true
#else
#define DOTTED false
#endif
#ifdef OTHER_BY_EXPERT
#define BY_EXPERT true
#else
#define BY_EXPERT false
#endif

namespace raymoe {

struct WeighGradientsParams {
    u8* dy;             // ROW_TYPE [capacity][width * 16 bytes]
    const u8* other;    // the same, or [experts][width * 16 bytes] with BY_EXPERT; with DOTTED
    const u8* weights;  // float32 [capacity], with WEIGHTED
    u8* d_weights;      // float32 [capacity], with DOTTED
    ExpertLayout rows;
    u32 width;  // 16-byte places of a row
    u32 unused;
};

__device__ __forceinline__ void weigh_row(const WeighGradientsParams& p, u64 row, const Place& place) {
    constexpr u32 TOGETHER = 4;  // loads of a lane that overlap, of two times 16 bytes
    constexpr u32 COUNT = ROW_TYPE::COUNT;
    u8* const dy = p.dy + row * p.width * 16;
    const u8* const other = p.other + (BY_EXPERT ? place.expert : row) * p.width * 16;
    const float weight = weight_of(p.weights, row, place);
    float along = 0.0f;
    for_each_place<TOGETHER>(p.width, [&](const u32(&places)[TOGETHER], const bool(&there)[TOGETHER]) {
        ptx::Bytes16 gradients[TOGETHER], others[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const bool wanted = there[k] && !place.in_gap;
            gradients[k] = ptx::load_16_if(wanted, dy + places[k] * 16ull, {0, 0});
            others[k] = ptx::load_16_if(DOTTED && wanted, other + places[k] * 16ull, {0, 0});
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            float values[COUNT], factors[COUNT];
            ROW_TYPE::unpack(gradients[k], values);
            ROW_TYPE::unpack(others[k], factors);
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j) {
                along += values[j] * factors[j];
                values[j] *= weight;
            }
            if (WEIGHTED && there[k]) {
                ptx::store_16(dy + places[k] * 16ull, ROW_TYPE::pack(values));
            }
        }
    });
    if constexpr (DOTTED) {
        along = sum_of_warp(along);
        if (threadIdx.x % 32 == 0) {
            ptx::store_4(p.d_weights + row * 4, __float_as_uint(along));
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ROWS_THREADS)
    weigh_gradients(const __grid_constant__ raymoe::WeighGradientsParams p) {
    using namespace raymoe;
    for_each_row(end_of_rows(p.rows),
                 [&](u64 row) { weigh_row(p, row, BY_EXPERT ? place_of(p.rows, row) : Place{0, false}); });
}
