// Reads the float32 number of each entry (token, k) from the rows that a combine has brought home: spread_weights.cu
// says how they hold it. The row of a refused step is NaN, and so are its numbers.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/vectors.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16
#endif

namespace raymoe {

struct GatherWeightsParams {
    const u8* rows;  // [T'][row_bytes]
    u8* weights;     // float[T'][K]
    u32 tokens;      // T'
    u32 topk;
    u32 row_bytes;
    u32 unused;
};

// The number that four elements of a row hold.
__device__ __forceinline__ u32 number_of(const u8* at) {
    float values[ROW_TYPE::COUNT];
    if constexpr (ROW_TYPE::BYTES == 4) {
        ROW_TYPE::unpack(ptx::load_16(at), values);
    } else {
        ROW_TYPE::unpack({ptx::load_8(at), 0}, values);
    }
    if (values[0] != values[0]) {
        return 0x7FC00000;  // NaN
    }
    u32 number = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        number |= static_cast<u32>(values[i]) << (i * 8);
    }
    return number;
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256)
    gather_weights(const __grid_constant__ raymoe::GatherWeightsParams p) {
    using namespace raymoe;
    const u32 entries = p.tokens * p.topk, step = gridDim.x * blockDim.x;
    for (u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < entries; entry += step) {
        const u32 token = entry / p.topk, k = entry - token * p.topk;
        const u8* row = p.rows + static_cast<u64>(token) * p.row_bytes;
        ptx::store_4(p.weights + entry * 4ull, number_of(row + k * 4 * ROW_TYPE::BYTES));
    }
}
