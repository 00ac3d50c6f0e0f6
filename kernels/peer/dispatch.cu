// Dispatch: sends each token's row to the ranks of its experts, and copies it to its place there, expert by expert.
//
// One kernel with three kinds of blocks, all resident at once:
//   senders           push rows into slots at the peers. The slot of a row is (source, token), so a sender needs no
//                     counts (sending.cuh)
//   counting blocks   number this rank's entries of each expert and store them at every rank (routing.cuh)
//   placement blocks  find each row's places from these entries, and copy rows there as they arrive (placing.cuh). The
//                     first of them are counting blocks before that
//
// An entry is one of the K experts of a token. A routing entry is what the source publishes about it, in the region
// `routing_entries`.
//
// Memory map of every rank's heap; s is the source, [2] the parity of the epoch:
//   rows [2][s][token]         slots
//   routing_entries [2][s][token][k]
//                              {local expert, number among s's entries for it} or NOWHERE, and the weight
//   counts [2][s][expert + 1]  entries for each local expert; last, the tokens that s has sent
//   arrivals [s][token]        the epoch for which the row of a token of s has arrived
//   done [s][sender]           the epoch for which a sender of s has nothing more to send
//   heads [s]                  the epoch for which counts and routing entries are complete
// s writes all of them, at every rank, and the owner reads them. s writes counts, routing entries and heads to itself
// too; if rows cross as fp8 it is a peer of its own, and writes all of them to itself.
//
// Memory order of the words that cross ranks:
//   heads     writer: counts and routing entries by ordinary stores of all counting blocks; __syncthreads; ticket
//             (acquire and release at GPU scope); the last counting block: fence.acq_rel.sys, relaxed store
//             reader: for each source one thread of every placement block: acquire; __syncthreads; ordinary loads
//   arrivals  writer: bulk stores of the row; cp.async.bulk.wait_group (not .read); fence.acq_rel.sys; relaxed store.
//             For rows as fp8 one warp waits; then an mbarrier; another warp fences and stores
//             reader: for each source one thread of a placement warp: acquire; __syncwarp; the driving thread:
//             fence.proxy.async, bulk load of the slot
//   done      writer: each warp waits for all its bulk stores; __syncthreads; for each peer one thread:
//             fence.acq_rel.sys, relaxed store
//             reader: the last block out, and with `at_once` every placement block: acquire; __syncthreads; before a
//             bulk load as above
//
// Why no slot is overwritten before it is read. No block waits before it stores to a peer. Epoch e + 2 writes the
// buffer that epoch e wrote. Its writer w has ended epoch e + 1, and no kernel ends before the words of that epoch of
// all peers have come (`await_all`). A peer stores those words in its own epoch e + 1, which its stream begins after
// its readers of e. These are the placement blocks of e, and with layout rank also the kernels that its caller enqueued
// between the two dispatches. So every rank runs every dispatch, and its senders tell every peer that they are done,
// also with nothing to send.
//
// Mixed blocks (a build with MIXED_SENDERS), for few SMs: every block places, and some more warps of it send. They
// share the SM's copies, where a block that only sends would leave half of them unused. The two kinds of warps meet at
// the block's beginning and end only: in between each kind has a barrier of its own (block_barriers.cuh). Rows as fp8
// are sent by warps that quantise and two more, as in blocks that only send (quantised_sending.cuh).
//
// Split form: a launch with PART_ROUTE and PART_SEND, and a later one of the same stream with PART_PLACE. Both read the
// same epoch; the second ends it.
//
// Known routing (a build with KNOWN_ROUTING): rows go to the places that an earlier dispatch of any epoch gave to its
// rows. Its results are input: `masks` and its number of tokens for senders, `entry_places`, offsets and counts for
// placement blocks. They do not change. There are no counting blocks, so routing entries keep what they hold. The first
// placement block stores this rank's pass, counts of zero and the head at every rank (passes.cuh). So `passes` and
// `counts` are written in such epochs too, in the buffer of the epoch's parity, and read by the same epoch's placement
// blocks and last blocks out: the argument above holds for them as for slots. Placement blocks wait for all heads, and
// place no row if the ranks' passes differ. A rank that routes in such an epoch finds heads, and no row from the ranks
// whose routing is known: its kernel ends, and its combine is refused, because no other rank combines a dispatch of
// this epoch.
//
// Again (a build with AGAIN_ROUTED): a dispatch of a backward pass that routes its rows anew. The last counting block
// also stores the pass, before its fence. The last block out compares.
//
// Rows in chunks (a build with CHUNKED_ROWS): rows of x come over the rail while the kernel runs. chunks.cuh has the
// words. Senders and placement blocks wait for a row of x before they load it. Such a wait ends whatever the peers'
// kernels do. So the argument above holds.
//
// A failed wait poisons (sync.cuh). From then on every launch returns at once, stores nothing to peers, and gives
// counts of 0; with known routing, rows that are unspecified.

#include "raymoe/peer/dispatch/beginning.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/passes.cuh"
#include "raymoe/peer/dispatch/placement_blocks.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/peer/dispatch/quantised_sending.cuh"
#include "raymoe/peer/dispatch/routing.cuh"
#include "raymoe/peer/dispatch/sending.cuh"
#include "raymoe/base/sync.cuh"

namespace raymoe {

// With layout rank no kernel of raymoe reads the rows of peers, so a build with stamps checks them when all have come.
// All threads of the block call this. Returns false if a slot holds the row of another epoch.
__device__ inline bool rows_stay_stamped(const DispatchParams& p, u64 epoch) {
    if (!STAMPS || !p.rank_layout) {
        return true;
    }
    bool ok = true;
    const u32 entries = p.slot_tokens * p.topk;
    for (u32 i = threadIdx.x; i < p.ranks_through_slots() * entries && ok; i += THREADS) {
        const u32 source = p.peers.in_turn(i / entries), entry = i % entries, token = entry / p.topk;
        const u8* at = p.entry_places + (static_cast<u64>(source) * entries + entry) * 8;
        if (token < p.summary->tokens[source] && ptx::load_4(at) != NOWHERE) {
            const u8* slot = p.slot_at(p.peers.rank, epoch & 1, source, token);
            const u64 seen = ptx::load_8(slot + p.slot_bytes - STAMP_BYTES);
            if (seen != epoch) {
                fail(p.watch, FAILURE_STALE, Waiting{p.op, source, epoch}, epoch, seen, 0);
                ok = false;
            }
        }
    }
    return block_barrier_and(ok);
}

// All threads of the last block out that do not send call this. The block has acquired what all other blocks did.
__device__ inline void finish_dispatch(const DispatchParams& p, u64 epoch, bool may) {
    if (may && await_all(p, epoch) && rows_stay_stamped(p, epoch)) {
        if constexpr (KNOWN || AGAIN) {
            if (!all_run_this_pass(p, epoch)) {
                refuse_pass(p, epoch);
            }
        }
        if (threadIdx.x == 0) {
            trace(p.trace, AT_ALL_AWAITED);
            if constexpr (!KNOWN) {
                p.summary->refusal = refusal_of(p, epoch);
                p.summary->number = epoch;
            }
            *p.taken = 0;  // read by later kernels of this stream only
            finish_run(p.operation, epoch);
        }
        return;
    }
    if constexpr (!KNOWN) {
        block_barrier();
        store_no_counts(p);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::ALL_THREADS, 1)
    dispatch(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    const auto [epoch, tokens, may] = begin_dispatch(p);
    const bool sends = MIXED ? threadIdx.x >= THREADS : p.parts & PART_SEND && blockIdx.x < p.senders;
    if (may && sends) {
        if (p.parts & PART_SEND) {
            u8* const memory = shared + (MIXED ? mixed_sender_memory(p) : 0);
#if WIRE_FP8
            send_quantised<ROW_TYPE>(p, epoch, tokens, blockIdx.x, memory);
#else
            send_rows(p, epoch, tokens, blockIdx.x, memory);
#endif
        }
    } else if (may) {
        const u32 block = blockIdx.x - (!MIXED && p.parts & PART_SEND ? p.senders : 0);
        bool ok = true;
        if (!KNOWN && p.parts & PART_ROUTE && block < p.counting_blocks) {
            ok = CountingBlock(p, epoch, tokens, block, shared).run();
            block_barrier();  // the placement blocks use the counting blocks' shared memory
        }
        if (ok && p.parts & PART_PLACE) {
            place_rows(p, epoch, block, shared);
        }
    }
    if (!(p.parts & PART_PLACE)) {
        return;
    }
    trace(p.trace, AT_END);
    if (block_is_last_out(p.operation) && !(MIXED && sends)) {
        finish_dispatch(p, epoch, may);
    }
}
