// Combine of few tokens: the same as combine.cu, in half of the trips over the link.
//
// One launch. Some SMs sum the rows of this rank's experts for peers' tokens and send the sums in lines (lines.cuh).
// The others add the ranks' sums for tokens of this rank (roles_ll.cuh). On few SMs every block does the one, then the
// other. There is no flag and no fence.
//
// Memory map of every rank's heap; d is the rank whose experts made the rows, [2] the parity of combine's epoch:
//   rows [2][d][token]   lines, by the number of the owner's token
//   statuses [2][d]      two words of d's status: {cause and other, epoch}, {number, epoch}
// d writes all of them, at every rank, and the owner reads them. The epoch is the one of combine.cu's operation.
//
// Memory order: no word announces other data. Each line or word holds its own epoch.
//   lines, statuses  writer: payload and epoch in one store, relaxed at system scope: 128 bytes by 8 threads, or 16
//                    bytes by one. No fence
//                    reader: relaxed loads of the whole line or word at system scope, again and again until its epoch
//                    is this one. It uses the loaded payload itself, so nothing more is to be ordered
//
// Why no line is overwritten before it is read: as in dispatch_ll.cu. Every block waits for the statuses of all ranks
// in every epoch. When a rank's kernel ends, it has read all sums sent to it in the epoch. The exception is a refused
// step: then no rank reads the sums, and nothing of that epoch is read later.
//
// In the backward pass of such an exchange combine.cu returns gradients of weights. It sends and awaits these
// statuses too (LL_STATUSES), so ranks that run different ones of the two kernels refuse the step at once.
//
// A launch has one block for each SM that it is given, or two.

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/ll/roles_ll.cuh"
#include "raymoe/peer/ll/statuses_ll.cuh"
#include "raymoe/peer/ll/sums_ll.cuh"
#include "raymoe/peer/ll/lines.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

// Loads the statuses of all ranks into shared memory. All threads of the block call this. Returns false if a wait
// failed.
__device__ inline bool await_statuses(const CombineLlParams& p, u64 epoch, u64 (*words)[2]) {
    bool ok = true;
    if (threadIdx.x < 2 * p.peers.ranks) {
        const u32 rank = threadIdx.x / 2, word = threadIdx.x % 2;
        ok = await_status_word(p, epoch, rank, word, words[rank][word]);
    }
    return __syncthreads_and(ok);
}

__device__ inline bool any_refused(const CombineLlParams& p, const u64 (*words)[2]) {
    const ptx::Bytes16 mine{words[p.peers.rank][0], words[p.peers.rank][1]};
    bool refused = false;
    for (u32 rank = 0; rank < p.peers.ranks; ++rank) {
        refused = refused || is_refused(mine, {words[rank][0], words[rank][1]});
    }
    return refused;
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, raymoe::WARPS > 8 ? 1 : 2)
    combine_ll(const __grid_constant__ raymoe::CombineLlParams p) {
    using namespace raymoe;
    using Type = ROW_TYPE;
    __shared__ u64 statuses[MAX_RANKS][2];
    const CombineBeginning beginning(p);
    const ptx::Bytes16 refusal = ptx::load_16(reinterpret_cast<const u8*>(&p.summary->refusal));
    const Role role(p.leaving_sms, p.arriving_sms);
    LocalReduction<Type> local_reduction(p, role.warp(), role.warps());
    FinalReduction<Type> final_reduction(p, role.warp(), role.warps());
    if (role.leaves) {
        local_reduction.begin();
        if constexpr (MIXED_ROLES) {
            final_reduction.begin();
        }
    } else {
        final_reduction.begin();
    }
    const auto [epoch, may] = beginning.run();
    bool refused = false, ok = may;
    if (may) {
        if (blockIdx.x == 0) {
            send_status_ll(p, epoch, status_of(p, refusal));
        }
        if (static_cast<u32>(refusal.low) != CAUSE_NONE) {
            // This rank refuses the step, so no rank reads sums.
        } else if (role.leaves) {
            local_reduction.run(epoch);
        } else {
            final_reduction.sum_own();
        }
        trace(p.trace, AT_SAID_DONE);
        ok = await_statuses(p, epoch, statuses);
        if (ok) {
            trace(p.trace, AT_COUNTS);
            refused = any_refused(p, statuses);
            if ((MIXED_ROLES || !role.leaves) && refused) {
                fill_with_nan<Type>(p, role.warp(), role.warps());
            } else if (MIXED_ROLES || !role.leaves) {
                ok = final_reduction.run(epoch);
            }
        }
    }
    trace(p.trace, AT_END);
    const Ending ending = block_is_out(p.operation, !ok, true);
    if (!ending.last) {
        return;
    }
    const bool lost = ending.trouble && poisoned(p.watch);
    if (lost) {
        fill_with_nan<Type>(p, threadIdx.x / 32, WARPS);
    }
    if (threadIdx.x != 0) {
        return;
    }
    give_ticket_back(p.operation);
    if (lost) {
        return;
    }
    if (refused) {
        report_refusal(p.record, p.peers.ranks, epoch, [&](u32 rank, u32 word) { return statuses[rank][word]; });
    }
    finish_run(p.operation, epoch);
}
