// Writes the statuses of this domain's ranks in a combine, to be sent to all domains: those that the combine inside has
// written where it was refused, else that all is well. One warp.

#define ANY_GPU

#include "raymoe/nccl/statuses.cuh"

namespace raymoe {

struct PublishStatusesParams {
    u8* record;        // u64 written, u64 unused, Status[L] of a refused combine inside. `written` becomes 0
    const u8* number;  // u32[2], the halves of a word: the dispatch that is combined
    u8* outgoing;      // Status[N][L], the same for each domain
    u8* statuses;      // Status[N][L] of all ranks: this domain's are written here
    u32 domains;
    u32 per_domain;  // L, at most 32
    u32 index;       // this rank's domain
    u32 weighted;
    u32 site;  // of the call, such as a layer, below 2^29; 0: none
    u32 carries;  // 1: gradients of weights are returned too
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(32)
    publish_statuses(const __grid_constant__ raymoe::PublishStatusesParams p) {
    using namespace raymoe;
    const bool refused = ptx::load_8(p.record) != 0;
    if (threadIdx.x < p.per_domain) {
        const u64 number = static_cast<u64>(ptx::load_4(p.number + 4)) << 32 | ptx::load_4(p.number);
        const Status good{CAUSE_NONE, p.weighted | p.carries << 1 | p.site << 2, number};
        const Status status = refused ? load_status(p.record + 16 + threadIdx.x * sizeof(Status)) : good;
        for (u32 domain = 0; domain < p.domains; ++domain) {
            store_status(p.outgoing + (domain * p.per_domain + threadIdx.x) * sizeof(Status), status);
        }
        store_status(p.statuses + (p.index * p.per_domain + threadIdx.x) * sizeof(Status), status);
    }
    __syncwarp();  // all threads have read `written` before it changes
    if (threadIdx.x == 0) {
        ptx::store_8(p.record, 0);
    }
}
