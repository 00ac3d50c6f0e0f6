// Dispatch of few tokens: what dispatch.cu does, in half of the trips.
//
// One launch. Some multiprocessors send, the others place (roles_ll.cuh); the first of these route before. Rows travel
// in lines, counts and told entries as words, all with the epoch in them (lines.cuh): no flag, no fence, nothing that
// is awaited at the sender. Who places looks at a row while it waits for the counts, because the row may be there with
// them. Rows come expert by expert only; with layout rank there are no plain rows to point at.
//
// Memory map of every rank's heap; s is the source, "half" the epoch mod 2:
//   rows [2][s][token]           lines, as many as a row takes (rows_ll.cuh, quantised_rows_ll.cuh)
//   told [2][s][token][k]        {told entry as in dispatch.cuh, epoch}
//   counts [2][s][expert + 1]    {entries for a local expert, epoch}; last, the tokens that s has sent
// All are written by s, at every rank, and read by the owner. The epoch is the one of dispatch.cu's operation.
//
// Why no line is overwritten before it is read. As in dispatch.cu; the word of epoch e + 1 that certifies a peer's
// readers of e is any of its counts, all of which every rank awaits in every epoch: each first block of a
// multiprocessor that places. Whatever was sent to a rank in an epoch has been read there when its kernel ends: it
// waits for every told entry of every token that was sent, and for every line of every row that these entries say is
// for it, unless its rows do not fit; then nobody reads, and nothing of that epoch is ever looked at again.
//
// Here `senders` and `placers` are multiprocessors. A launch has one block for each of these, or two.

#include "raymoe/dispatch/dispatch.cuh"
#include "raymoe/ll/quantised_rows_ll.cuh"
#include "raymoe/ll/quantising_ll.cuh"
#include "raymoe/ll/roles_ll.cuh"
#include "raymoe/ll/routing_ll.cuh"
#include "raymoe/ll/rows_ll.cuh"
#include "raymoe/ll/words_ll.cuh"
#include "raymoe/ll/lines.cuh"
#include "raymoe/dispatch/places.cuh"

namespace raymoe {

#if WIRE_FP8
using Leaving = QuantisedLeaving<ROW_TYPE>;
using ArrivingUnits = QuantisedArriving<ROW_TYPE>;
#else
using Leaving = PlainLeaving;
using ArrivingUnits = PlainArriving;
#endif

// A warp that sends: the first `tokens` rows of x, to the ranks of their experts.
class Sender {
  public:
    __device__ Sender(const DispatchParams& p, u8* stages, u32 warp, u32 warps)
        : p_(p), dealing_(p.ll_sent), leaving_(p, stages), at_(warp), warps_(warps) {}

    // Loads only, of rows that may turn out not to be sent: the epoch and the number of tokens need not be known.
    __device__ __forceinline__ void begin() {
        if (at_ < dealing_.all(p_.tokens)) {
            const u32 lane = threadIdx.x % 32;
            unit_ = dealing_.unit(at_);
            id_ = p_.id_if(lane < p_.topk, static_cast<u64>(unit_.token) * p_.topk + lane);
            leaving_.begin(unit_.token, unit_.number);
        }
    }

    // After `begin`, where there are registers for that.
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
    // Which ranks a token was sent to, for its combine.
    __device__ __forceinline__ void mark(u32 token, u32 mask) const {
        if (threadIdx.x % 32 == 0) {
            p_.masks[token] = mask;
        }
    }

    const DispatchParams& p_;
    const Dealing& dealing_;
    Leaving leaving_;
    u32 at_;
    u32 warps_;
    Unit unit_{};    // `at_`, which is loaded
    Id id_ = NO_ID;  // of entry k of the row, in thread k
};

// A warp that places: `begin` a unit, `await` it until it is `settled`, then `place` it.
class Placer {
  public:
    __device__ Placer(const DispatchParams& p, u64 epoch, u8* stages)
        : p_(p), epoch_(epoch), units_(p, epoch, stages) {}

    __device__ __forceinline__ void begin(u32 u) {
        const Unit unit = p_.ll_placed.unit(u);
        row_ = {p_.peers.in_turn(unit.step), unit.token, unit.number, false, NOWHERE};
        missing_ = NO_TOKENS | NO_TOLD;
        settled_ = false;
        units_.begin(row_);
    }

    __device__ __forceinline__ const Arriving& row() const { return row_; }

    // All of the unit is here, or it is known not to come.
    __device__ __forceinline__ bool settled() const { return settled_; }

    // Until it is settled, or `enough()` in every thread, which makes loads of the caller's own at the same time: what
    // is awaited is looked at in one trip, as often as it takes. False: the wait failed.
    template <class Enough>
    __device__ __forceinline__ bool await(Enough enough) {
        const u32 lane = threadIdx.x % 32;
        const u64 entry = static_cast<u64>(row_.token) * p_.topk + lane;
        const u8* told_at = told_word(p_, p_.peers.rank, epoch_ & 1, row_.source, entry);
        const u8* tokens_at = count_word(p_, p_.peers.rank, epoch_ & 1, row_.source, p_.local);
        auto looked = [&] {
            const bool unknown = missing_ & (NO_TOKENS | NO_TOLD);
            const auto tokens =
                ptx::load_relaxed_sys_16_if(unknown, tokens_at, {row_.comes ? ~0u : 0u, epoch_});
            const auto told = ptx::load_relaxed_sys_16_if(unknown && lane < p_.topk, told_at, {row_.told, epoch_});
            units_.ask();
            const bool others = enough();
            const u32 stale = units_.stale() | (tokens.high == epoch_ ? 0 : NO_TOKENS) |
                              (told.high == epoch_ ? 0 : NO_TOLD) | (others ? 0 : NO_OTHERS);
            missing_ = __reduce_or_sync(0xFFFFFFFF, stale);
            const bool here = units_.settle(missing_ & ~(NO_TOKENS | NO_TOLD | NO_OTHERS));
            row_.comes = !(missing_ & NO_TOKENS) && row_.token < static_cast<u32>(tokens.low);
            row_.told = missing_ & NO_TOLD ? NOWHERE : told.low;
            const bool wanted = __ballot_sync(0xFFFFFFFF, static_cast<u32>(row_.told) != NOWHERE) != 0;
            settled_ = !(missing_ & NO_TOKENS) && (!row_.comes || (!(missing_ & NO_TOLD) && (here || !wanted)));
            return settled_ || !(missing_ & NO_OTHERS);
        };
        // A unit that is not settled lacks something of its own source, whatever else is missing.
        auto missed = [&](u64& seen) {
            seen = missing_ & NO_TOKENS ? first_stale(tokens_at + 8, 1, 16, epoch_)
                   : missing_ & NO_TOLD ? first_stale(told_at + 8, p_.topk, 16, epoch_)
                                        : units_.seen(row_);
            return row_.source;
        };
        return wait_as_warp(looked, missed, epoch_, p_.op, p_.watch);
    }

    // False: in this thread the source contradicts its counts.
    __device__ __forceinline__ bool place(const Places& where) {
        if (!row_.comes) {
            return true;
        }
        const u32 lane = threadIdx.x % 32;
        u32 place = NOWHERE;
        if (lane < p_.topk) {
            place = where.place(row_.source, static_cast<u32>(row_.told));
            if (row_.unit == 0) {
                plan_entry(p_, row_.source, static_cast<u64>(row_.token) * p_.topk + lane, row_.told, place, 0);
            }
        }
        if (__ballot_sync(0xFFFFFFFF, place != NOWHERE) != 0) {
            trace_first(p_.trace, AT_FIRST_ROW);
            units_.place(row_, place);
            trace(p_.trace, AT_LAST_ROW);
        }
        return lane >= p_.topk || place != NOWHERE || static_cast<u32>(row_.told) == NOWHERE;
    }

  private:
    static constexpr u32 NO_TOKENS = 1u << 31;  // it is not known how many tokens the source has sent
    static constexpr u32 NO_TOLD = 1u << 30;    // nor where the entries of the row go
    static constexpr u32 NO_OTHERS = 1u << 29;  // a thread of the caller's has not enough

    const DispatchParams& p_;
    u64 epoch_;
    ArrivingUnits units_;
    Arriving row_{};
    u32 missing_ = 0;  // of the unit: groups, and what is said of its row
    bool settled_ = false;
};

// By a whole block. False: this thread's part was not done, or the step is refused; the last block out makes good what
// a failed wait leaves undone.
__device__ inline bool place_ll(const DispatchParams& p, u64 epoch, const Role& role, u8* shared, u8* stages) {
    Placer placer(p, epoch, stages);
    EarlyCounts counts(p, epoch);
    const u32 units = p.ll_placed.all(p.slot_tokens), first = role.warp();
    if (role.round != 0 && role.number * WARPS >= units) {
        return true;
    }
    bool ok = true, here = first < units;
    Places where(p, reinterpret_cast<u32*>(shared));
    if (here) {
        placer.begin(first);
        ok = placer.await([&] { return counts.look(); });
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
    if (ArrivingUnits::BRIEF && here && placer.settled() && where.fits()) {  // before the gaps, which nobody waits for
        ok = placer.place(where);
        here = false;
    }
    if (role.round == 0) {
        // Its share of the gaps, which begin with the last placer as few rows begin with the first one, and of what is
        // to do where rows do not fit.
        begin_placing(p, where, p.placers - 1 - role.place);
    }
    for (u32 u = first; where.fits();) {
        if (here) {
            if (!placer.settled() && !placer.await([] { return false; })) {
                return false;
            }
            ok = placer.place(where) && ok;
        }
        u += role.warps();
        if (u >= units) {
            break;
        }
        placer.begin(u);
        here = placer.row().token < where.tokens(placer.row().source);
    }
    trace(p.trace, AT_PLACED);
    return ok && where.fits();
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 2)
    dispatch_ll(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    const DispatchBeginning beginning(p);
    u8* stages = shared + ((Places::shared_words(p) * 4 + 15) & ~15u);  // of the warps, behind what the placers share
    const Role role(p.senders, p.placers);
    Sender sender(p, stages, role.warp(), role.warps());
    LlRouter router(p, role.place, shared);
    const bool routes = !role.leaves && role.round == 0 && role.place < p.routers;
    if (role.leaves && Leaving::EARLY) {
        sender.begin();
    } else if (routes) {
        router.begin();
    }
    const auto [epoch, tokens, may] = beginning.run();
    bool ok = may && !beginning.refused();
    if (may && role.leaves) {
        sender.run(epoch, tokens);
    } else if (may) {
        if (routes) {
            ok = router.run(epoch, tokens) && ok;
            __syncthreads();  // the placers use the routers' shared memory
        }
        ok = place_ll(p, epoch, role, shared, stages) && ok;
    }
    trace(p.trace, AT_END);
    const bool tells_counts = !role.leaves && role.place + 1 == p.placers;  // which `place_nothing` takes back
    const Ending ending = block_is_out(p.operation, !ok, tells_counts);
    if (!ending.last) {
        return;
    }
    const bool lost = ending.trouble && poisoned(p.watch);
    if (lost) {
        place_nothing(p);
    }
    if (threadIdx.x == 0) {
        give_ticket_back(p.operation);
    }
    if (threadIdx.x == 0 && !lost) {
        trace(p.trace, AT_ALL_AWAITED);
        if (ending.trouble) {
            p.got->refusal = refusal_of(p, epoch);
        } else {
            p.got->refusal = {CAUSE_NONE, 0, epoch};
        }
        finish_run(p.operation, epoch);
    }
}
