// Joins the experts of the dispatch inside a domain: each expert of this rank has one there for each source domain,
// which are neighbours. One block.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"

namespace raymoe {

struct JoinExpertsParams {
    const u8* offsets_inside;  // u32[local*N + 1]
    const u8* counts_inside;   // u32[local*N]
    u8* expert_offsets;        // u32[local + 1]
    u8* expert_counts;         // u32[local]
    u32 local;
    u32 domains;  // N
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256) join_experts(const __grid_constant__ raymoe::JoinExpertsParams p) {
    using namespace raymoe;
    for (u32 expert = threadIdx.x; expert <= p.local; expert += blockDim.x) {
        const u32 first = expert * p.domains;
        ptx::store_4(p.expert_offsets + expert * 4ull, ptx::load_4(p.offsets_inside + first * 4ull));
        u32 count = 0;
        for (u32 domain = 0; expert < p.local && domain < p.domains; ++domain) {
            count += ptx::load_4(p.counts_inside + (first + domain) * 4ull);
        }
        if (expert < p.local) {
            ptx::store_4(p.expert_counts + expert * 4ull, count);
        }
    }
}
