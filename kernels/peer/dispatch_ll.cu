// Dispatch of few tokens: the same as dispatch.cu, in half of the trips over the link.
//
// One launch. Some SMs send, the others place (roles_ll.cuh); the first of those route before. On few SMs every block
// routes, sends, and then places. Rows travel in lines, counts and routing entries as words. All of them hold the epoch
// (lines.cuh), so there is no flag and no fence, and a sender waits for nothing. A placement warp looks at a row while
// it waits for the counts, because the row may come with them. Rows come expert by expert only; with layout rank there
// are no plain rows that `index` could point to.
//
// Memory map of every rank's heap; s is the source, [2] the parity of the epoch:
//   rows [2][s][token]           lines, as many as a row takes (rows_ll.cuh, quantised_rows_ll.cuh)
//   routing_entries [2][s][token][k]
//                                {routing entry as in dispatch.cuh, epoch}
//   counts [2][s][expert + 1]    {entries for a local expert, epoch}; last, the tokens that s has sent
// s writes all of them, at every rank, and the owner reads them. The epoch is the one of dispatch.cu's operation.
//
// Memory order: no word announces other data. Each line or word holds its own epoch.
//   lines, routing entries, counts
//                        writer: payload and epoch in one store, relaxed at system scope: 128 bytes by 8 threads, or 16
//                        bytes by one. No fence
//                        reader: relaxed loads of the whole line or word at system scope, again and again until its
//                        epoch is this one. It uses the loaded payload itself, so nothing more is to be ordered
//
// Why no line is overwritten before it is read. As in dispatch.cu; any count of epoch e + 1 from a peer certifies that
// the peer's readers of e are done. In every epoch the first block of each SM that places waits for all counts. A
// kernel ends after it has read all data sent to its rank in the epoch: every routing entry of every token that was
// sent, and every line of the rows that these entries name for it. If its rows do not fit, no block reads the rest, and
// nothing of that epoch is read later.
//
// Again (a build with AGAIN_ROUTED): as in dispatch.cu. The pass is in the upper halves of two counts, so it comes with
// no word of its own. The last block out compares. Every block hands its stores over to it, because it may fill rows.
//
// A launch has one block for each SM that it is given, or two. A block that sends and places sends before it waits,
// because peers wait for its rows.

#include "raymoe/peer/dispatch/beginning.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/ll/quantised_rows_ll.cuh"
#include "raymoe/peer/ll/quantising_ll.cuh"
#include "raymoe/peer/ll/roles_ll.cuh"
#include "raymoe/peer/ll/routing_ll.cuh"
#include "raymoe/peer/ll/rows_ll.cuh"
#include "raymoe/peer/ll/words_ll.cuh"
#include "raymoe/peer/ll/lines.cuh"
#include "raymoe/peer/dispatch/places.cuh"

namespace raymoe {

#if WIRE_FP8
using Leaving = QuantisedLeaving<ROW_TYPE>;
using ArrivingUnits = QuantisedArriving<ROW_TYPE>;
#else
using Leaving = PlainLeaving;
using ArrivingUnits = PlainArriving;
#endif

// A warp that sends some of the first `tokens` rows of x to the ranks of their experts.
class Sender {
  public:
    __device__ Sender(const DispatchLlParams& p, u8* stages, u32 warp, u32 warps)
        : p_(p), dealing_(p.sent), leaving_(p, stages), at_(warp), warps_(warps) {}

    // Only issues loads, of rows that may turn out not to be sent, before the epoch and the number of tokens are known.
    __device__ __forceinline__ void begin() {
        if (at_ < dealing_.all(p_.tokens)) {
            const u32 lane = threadIdx.x % 32;
            unit_ = dealing_.unit(at_);
            id_ = p_.id_if(lane < p_.topk, static_cast<u64>(unit_.token) * p_.topk + lane);
            leaving_.begin(unit_.token, unit_.number);
        }
    }

    // Sends all units of this warp. `begin` has run before if `Leaving::EARLY`.
    __device__ __forceinline__ void run(u64 epoch, u32 tokens) {
        constexpr u32 OWN = OWN_FROM_X ? 0 : ~0u;
        trace(p_.trace, AT_DESTINATIONS);
        if (!Leaving::EARLY) {
            begin();
        }
        while (at_ < dealing_.all(tokens)) {
            const long long expert = p_.number(id_);
            const bool known = expert >= 0 && expert < p_.experts;
            const u32 all = __reduce_or_sync(0xFFFFFFFF, known ? 1u << p_.rank_of(static_cast<u32>(expert)) : 0);
            if (unit_.number == 0) {
                mark(unit_.token, all);
            }
            const u32 mask = all & (~(1u << p_.peers.rank) | OWN);
            if (mask != 0) {
                trace_first(p_.trace, AT_FIRST_PUSH);
                leaving_.send(epoch, unit_, mask);
                trace(p_.trace, AT_LAST_PUSH);
            }
            at_ += warps_;
            begin();
        }
#pragma unroll 1
        for (; at_ < dealing_.all(p_.tokens); at_ += warps_) {
            mark(dealing_.unit(at_).token, 0);
        }
    }

  private:
    // Stores the ranks that a token was sent to, for its combine.
    __device__ __forceinline__ void mark(u32 token, u32 mask) const {
        if (threadIdx.x % 32 == 0) {
            p_.masks[token] = mask;
        }
    }

    const DispatchLlParams& p_;
    const Dealing& dealing_;
    Leaving leaving_;
    u32 at_;
    u32 warps_;
    Unit unit_{};    // unit `at_`, whose loads are issued
    Id id_ = NO_ID;  // of entry k of its row, in thread k
};

// A warp that places. It calls `begin` for a unit, `await` until the unit is `settled`, then `place`.
class PlacementWarp {
  public:
    __device__ PlacementWarp(const DispatchLlParams& p, u64 epoch, u8* stages)
        : p_(p), epoch_(epoch), units_(p, epoch, stages) {}

    __device__ __forceinline__ void begin(u32 u) {
        const Unit unit = p_.placed.unit(u);
        row_ = {p_.peers.in_turn(unit.step), unit.token, unit.number, false, NOWHERE};
        missing_ = NO_TOKENS | NO_ENTRIES;
        settled_ = false;
        units_.begin(row_);
    }

    __device__ __forceinline__ const Arriving& row() const { return row_; }

    // Whether all of the unit has come, or is known not to come.
    __device__ __forceinline__ bool settled() const { return settled_; }

    // Waits until the unit is settled, or until `enough()` is true in every thread. `enough` may issue loads of the
    // caller's own. Each poll looks at all awaited data in one trip. Returns false if the wait failed.
    template <class Enough>
    __device__ __forceinline__ bool await(Enough enough) {
        const u32 lane = threadIdx.x % 32;
        const u64 entry = static_cast<u64>(row_.token) * p_.topk + lane;
        const u8* routing_at = routing_word(p_, p_.peers.rank, epoch_ & 1, row_.source, entry);
        const u8* tokens_at = count_word(p_, p_.peers.rank, epoch_ & 1, row_.source, p_.local);
        auto looked = [&] {
            const bool unknown = missing_ & (NO_TOKENS | NO_ENTRIES);
            const auto tokens =
                ptx::load_relaxed_sys_16_if(unknown, tokens_at, {row_.comes ? ~0u : 0u, epoch_});
            const auto routing =
                ptx::load_relaxed_sys_16_if(unknown && lane < p_.topk, routing_at, {row_.routing, epoch_});
            units_.ask();
            const bool caller_done = enough();
            const u32 stale = units_.stale() | (tokens.high == epoch_ ? 0 : NO_TOKENS) |
                              (routing.high == epoch_ ? 0 : NO_ENTRIES) | (caller_done ? 0 : NOT_ENOUGH);
            missing_ = __reduce_or_sync(0xFFFFFFFF, stale);
            const bool here = units_.settle(missing_ & ~(NO_TOKENS | NO_ENTRIES | NOT_ENOUGH));
            row_.comes = !(missing_ & NO_TOKENS) && row_.token < static_cast<u32>(tokens.low);
            row_.routing = missing_ & NO_ENTRIES ? NOWHERE : routing.low;
            const bool wanted = __ballot_sync(0xFFFFFFFF, static_cast<u32>(row_.routing) != NOWHERE) != 0;
            settled_ = !(missing_ & NO_TOKENS) && (!row_.comes || (!(missing_ & NO_ENTRIES) && (here || !wanted)));
            return settled_ || !(missing_ & NOT_ENOUGH);
        };
        // A unit that is not settled lacks data of its own source, whatever else is missing.
        auto missed = [&](u64& seen) {
            seen = missing_ & NO_TOKENS ? first_stale(tokens_at + 8, 1, 16, epoch_)
                   : missing_ & NO_ENTRIES ? first_stale(routing_at + 8, p_.topk, 16, epoch_)
                                        : units_.seen(row_);
            return row_.source;
        };
        return wait_as_warp(looked, missed, epoch_, p_.op, p_.watch);
    }

    // Copies the unit's part of the row to its places. Returns false if this thread's entry contradicts the source's
    // counts.
    __device__ __forceinline__ bool place(const Places& where) {
        if (!row_.comes) {
            return true;
        }
        const u32 lane = threadIdx.x % 32;
        u32 place = NOWHERE;
        if (lane < p_.topk) {
            place = where.place(row_.source, static_cast<u32>(row_.routing));
            if (row_.unit == 0) {
                const u64 entry = static_cast<u64>(row_.token) * p_.topk + lane;
                plan_entry(p_, row_.source, entry, row_.routing, place, false, 0);
            }
        }
        if (__ballot_sync(0xFFFFFFFF, place != NOWHERE) != 0) {
            trace_first(p_.trace, AT_FIRST_ROW);
            units_.place(row_, place);
            trace(p_.trace, AT_LAST_ROW);
        }
        return lane >= p_.topk || place != NOWHERE || static_cast<u32>(row_.routing) == NOWHERE;
    }

  private:
    static constexpr u32 NO_TOKENS = 1u << 31;   // the source's number of tokens has not come
    static constexpr u32 NO_ENTRIES = 1u << 30;  // a routing entry of the row has not come
    static constexpr u32 NOT_ENOUGH = 1u << 29;  // `enough` is false in some thread

    const DispatchLlParams& p_;
    u64 epoch_;
    ArrivingUnits units_;
    Arriving row_{};
    u32 missing_ = 0;  // what has not come: bit i for group i of the unit, and the bits above
    bool settled_ = false;
};

// Places this block's units. All threads of the block call this. Returns false if this thread's part was not done, or
// the step is refused. If a wait fails, the last block out stores counts of 0.
__device__ inline bool place_ll(const DispatchLlParams& p, u64 epoch, const Role& role, u8* shared, u8* stages) {
    PlacementWarp placement_warp(p, epoch, stages);
    EarlyCounts counts(p, epoch);
    const u32 units = p.placed.all(p.slot_tokens), first = role.warp();
    if (role.round != 0 && role.number * WARPS >= units) {
        return true;
    }
    bool ok = true, here = first < units;
    Places where(p, reinterpret_cast<u32*>(shared));
    if (here) {
        placement_warp.begin(first);
        ok = placement_warp.await([&] { return counts.look(); });
    }
    where.find([&](u32 source, u32 expert) {
        u32 count = 0;
        ok = counts.wait(source, expert, count) && ok;
        return count;
    });
    trace(p.trace, AT_COUNTS);
    if (!__syncthreads_and(ok)) {
        return false;
    }
    // Before the gaps, which no rank waits for.
    if (ArrivingUnits::BRIEF && here && placement_warp.settled() && where.fits()) {
        ok = placement_warp.place(where);
        here = false;
    }
    if (role.round == 0) {
        // This block's share of the gaps, or of the work if rows do not fit. Gaps begin with the last placement block,
        // because few rows begin with the first one.
        begin_placing(p, where, {p.arriving_sms - 1 - role.place, p.arriving_sms}, NO_INDEX);
    }
    for (u32 u = first; where.fits();) {
        if (here) {
            if (!placement_warp.settled() && !placement_warp.await([] { return false; })) {
                return false;
            }
            ok = placement_warp.place(where) && ok;
        }
        u += role.warps();
        if (u >= units) {
            break;
        }
        placement_warp.begin(u);
        here = placement_warp.row().token < where.tokens(placement_warp.row().source);
    }
    trace(p.trace, AT_PLACED);
    return ok && where.fits();
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, raymoe::WARPS > 8 ? 1 : 2)
    dispatch_ll(const __grid_constant__ raymoe::DispatchLlParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    const DispatchBeginning beginning(p);
    u8* stages = shared + ((Places::shared_words(p) * 4 + 15) & ~15u);  // of the warps, after the words of `Places`
    const Role role(p.leaving_sms, p.arriving_sms);
    Sender sender(p, stages, role.warp(), role.warps());
    LlCountingBlock counting_block(p, role.place, shared);
    const bool routes = (MIXED_ROLES || !role.leaves) && role.round == 0 && role.place < p.counting_blocks;
    if (role.leaves && Leaving::EARLY) {
        sender.begin();
        if constexpr (MIXED_ROLES) {
            if (routes) {
                counting_block.begin();
            }
        }
    } else if (routes) {
        counting_block.begin();
    }
    const auto [epoch, tokens, may] = beginning.run();
    bool ok = may && !beginning.refused();
    if (!MIXED_ROLES && may && role.leaves) {
        sender.run(epoch, tokens);
    } else if (may) {
        if (routes) {
            ok = counting_block.run(epoch, tokens) && ok;
            __syncthreads();  // the placement blocks use the counting blocks' shared memory
        }
        if constexpr (MIXED_ROLES) {
            sender.run(epoch, tokens);  // before this block waits: peers wait for its rows
        }
        ok = place_ll(p, epoch, role, shared, stages) && ok;
    }
    trace(p.trace, AT_END);
    // The last block out may reset the counts.
    const bool stores_counts = (MIXED_ROLES || !role.leaves) && role.place + 1 == p.arriving_sms;
    const Ending ending = block_is_out(p.operation, !ok, stores_counts || AGAIN);
    if (!ending.last) {
        return;
    }
    bool lost = ending.trouble && poisoned(p.watch);
    if (AGAIN && !lost) {
        lost = !compare_passes_ll(p, epoch);
    }
    if (lost) {
        store_no_counts(p);
    }
    if (threadIdx.x == 0) {
        give_ticket_back(p.operation);
    }
    if (threadIdx.x == 0 && !lost) {
        trace(p.trace, AT_ALL_AWAITED);
        if (ending.trouble) {
            p.summary->refusal = refusal_of(p, epoch);
        } else {
            p.summary->refusal = {CAUSE_NONE, 0, epoch};
        }
        p.summary->number = epoch;
        finish_run(p.operation, epoch);
    }
}
