// Dispatch: each token's row to the ranks of its experts, and there to its place, expert by expert.
//
// One kernel, three kinds of work, on blocks that are all resident at once:
//   senders   push rows into slots at the peers; the slot of a row is (source, token), so that nothing need be counted
//             first (sending.cuh)
//   routers   number this rank's entries of each expert and tell every rank (routing.cuh)
//   placers   find each row's places from what the sources told, and copy rows there as they arrive (placing.cuh);
//             the first of them route before that
//
// Memory map of every rank's heap; s is the source, "half" the epoch mod 2:
//   rows [2][s][token]         slots
//   told [2][s][token][k]      {local expert, number among s's entries for it} or NOWHERE, and the weight
//   counts [2][s][expert + 1]  entries for each local expert; the tokens that s has sent
//   arrivals [s][token]        the epoch for which the row of a token of s has arrived
//   done [s][sender]           the epoch for which a sender of s has nothing more to send
//   heads [s]                  the epoch for which counts and told are complete
// All are written by s, at every rank, and read by the owner; counts, told and heads at s itself too.
//
// Why no slot is overwritten before it is read. No block waits before it stores to a peer. Epoch e + 2 writes the half
// that epoch e wrote. Its writer w has ended epoch e + 1, and no kernel ends before the words of that epoch of all
// peers have come (`await_all`); a peer stores those only in its own epoch e + 1, which its stream begins after its
// readers of e: the placers of e, and with layout rank whatever its caller put between the two dispatches. So every
// rank runs every dispatch, and its senders say that they are done to every peer also with nothing to send.
//
// Split: a launch with PART_ROUTE and PART_SEND, and a later one of the same stream with PART_PLACE. Both read the same
// epoch; the second ends it.
//
// A failed wait poisons (sync.cuh). From then on every launch returns at once, stores nothing to peers, and says that
// nothing came.

#include "raymoe/dispatch/dispatch.cuh"
#include "raymoe/dispatch/placing.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/dispatch/quantised_sending.cuh"
#include "raymoe/dispatch/routing.cuh"
#include "raymoe/dispatch/sending.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

// With layout rank no kernel of ours reads the rows of peers, so a build with stamps looks at them when all have come.
// By a whole block. False: a slot holds the row of another epoch.
__device__ inline bool rows_stay_stamped(const DispatchParams& p, u64 epoch) {
    if (!STAMPS || !p.rank_layout) {
        return true;
    }
    bool ok = true;
    const u32 entries = p.slot_tokens * p.topk;
    for (u32 i = threadIdx.x; i < p.heard() * entries && ok; i += THREADS) {
        const u32 source = p.peers.in_turn(i / entries), entry = i % entries, token = entry / p.topk;
        const u8* home = p.home + (static_cast<u64>(source) * entries + entry) * 8;
        if (token < p.got->tokens[source] && ptx::load_4(home) != NOWHERE) {
            const u8* slot = p.slot_at(p.peers.rank, epoch & 1, source, token);
            const u64 seen = ptx::load_8(slot + p.slot_bytes - STAMP_BYTES);
            if (seen != epoch) {
                fail(p.watch, FAILURE_STALE, Waiting{p.op, source, epoch}, epoch, seen, 0);
                ok = false;
            }
        }
    }
    return __syncthreads_and(ok);
}

// By the last block out, which has acquired what all the others did.
__device__ inline void finish_dispatch(const DispatchParams& p, u64 epoch, bool may) {
    if (may && await_all(p, epoch) && rows_stay_stamped(p, epoch)) {
        if (threadIdx.x == 0) {
            trace(p.trace, AT_ALL_AWAITED);
            p.got->refusal = refusal_of(p, epoch);
            *p.taken = 0;  // read by later kernels of this stream only
            finish_run(p.operation, epoch);
        }
        return;
    }
    __syncthreads();
    place_nothing(p);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    dispatch(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    const auto [epoch, tokens, may] = begin_dispatch(p);
    const u32 senders = p.parts & PART_SEND ? p.senders : 0;
    if (may && blockIdx.x < senders) {
#if WIRE_FP8
        send_quantised<ROW_TYPE>(p, epoch, tokens, blockIdx.x, shared);
#else
        send_rows(p, epoch, tokens, blockIdx.x, shared);
#endif
    } else if (may) {
        const u32 placer = blockIdx.x - senders;
        bool ok = true;
        if (p.parts & PART_ROUTE && placer < p.routers) {
            ok = Router(p, epoch, tokens, placer, shared).run();
            __syncthreads();  // the placers use the routers' shared memory
        }
        if (ok && p.parts & PART_PLACE) {
            place_rows(p, epoch, placer, shared);
        }
    }
    if (!(p.parts & PART_PLACE)) {
        return;
    }
    trace(p.trace, AT_END);
    if (block_is_last_out(p.operation)) {
        finish_dispatch(p, epoch, may);
    }
}
