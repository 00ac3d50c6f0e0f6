// Writes this rank's ids and weights in a dispatch between domains, to be sent to all domains. Tokens that are not sent
// have ids -1. A `num_tokens` out of range gives only an id that no expert has, which holds the number (BAD_COUNT).

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

using s64 = long long;

constexpr s64 BAD_COUNT = -(1ll << 62);  // raymoe/exchange/domains/domain_shape.py has the same number
constexpr s64 LOWEST_ID = -(1ll << 61);  // lower ids of the caller become this one, which is refused too

struct PublishTokensParams {
    const u8* topk_idx;      // [x_rows][K], 4 or 8 bytes each
    const u8* topk_weights;  // float[x_rows][K]
    const u8* num_tokens;    // s32; null: all are sent
    u8* ids;                 // s64[T][K]
    u8* weights;             // float[T][K]
    u32 x_rows;
    u32 tokens;  // T
    u32 topk;
    u32 wide_topk_idx;
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256)
    publish_tokens(const __grid_constant__ raymoe::PublishTokensParams p) {
    using namespace raymoe;
    const u32 low = p.num_tokens == nullptr ? p.x_rows : ptx::load_4(p.num_tokens);
    const int count = static_cast<int>(low);
    const bool good = count >= 0 && low <= p.x_rows;
    const u32 sent = good ? low * p.topk : 0, there = p.x_rows * p.topk, entries = p.tokens * p.topk;
    for (u32 entry = blockIdx.x * blockDim.x + threadIdx.x; entry < entries; entry += gridDim.x * blockDim.x) {
        s64 id = -1;
        if (entry < sent) {
            id = p.wide_topk_idx != 0 ? static_cast<s64>(ptx::load_8(p.topk_idx + entry * 8ull))
                                      : static_cast<int>(ptx::load_4(p.topk_idx + entry * 4ull));
            id = id < LOWEST_ID ? LOWEST_ID : id;
        } else if (!good && entry == 0) {
            id = BAD_COUNT + (static_cast<s64>(p.x_rows) << 32) + low;
        }
        ptx::store_8(p.ids + entry * 8ull, static_cast<u64>(id));
        if (entry < there) {
            ptx::store_4(p.weights + entry * 4ull, ptx::load_4(p.topk_weights + entry * 4ull));
        }
    }
}
