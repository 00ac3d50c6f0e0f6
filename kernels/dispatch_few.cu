// Dispatch of few tokens: what dispatch.cu does, in half of the trips.
//
// One launch, all blocks alike: first they send (the first block routes instead), then they place. Rows travel in
// lines, counts and told entries as words, all with the epoch in them (lines.cuh): no flag, no fence, nothing that is
// awaited at the sender. Rows come expert by expert only; with layout rank there are no plain rows to point at.
//
// Memory map of every rank's heap; s is the source, "half" the epoch mod 2:
//   rows [2][s][token]           lines, as many as a row takes (few_rows.cuh)
//   told [2][s][token][k]        {told entry as in dispatch.cuh, epoch}
//   counts [2][s][expert + 1]    {entries for a local expert, epoch}; last, the tokens that s has sent
// All are written by s, at every rank, and read by the owner. The epoch is the one of dispatch.cu's operation.
//
// Why no line is overwritten before it is read. As in dispatch.cu; the word of epoch e + 1 that certifies a peer's
// readers of e is any of its counts, all of which every block of every rank awaits in every epoch. Whatever was sent to
// a rank in an epoch has been read there when its kernel ends: it waits for every told entry of every token that was
// sent, and for every line of every row that these entries say is for it.

#include "raymoe/dispatch.cuh"
#include "raymoe/few_rows.cuh"
#include "raymoe/lines.cuh"
#include "raymoe/places.cuh"
#include "raymoe/routing.cuh"

namespace raymoe {

__device__ __forceinline__ u8* told_word(const DispatchParams& p, u32 peer, u32 half, u32 source, u64 entry) {
    return p.peers.slot(peer, p.few_told[half], static_cast<u64>(source) * p.slot_tokens * p.topk + entry, 16);
}

__device__ __forceinline__ u8* count_word(const DispatchParams& p, u32 peer, u32 half, u32 source, u32 expert) {
    return p.peers.slot(peer, p.few_counts[half], static_cast<u64>(source) * (p.local + 1) + expert, 16);
}

// Words that each say of which epoch they are.
struct TellInWords {
    const DispatchParams& p;
    u64 epoch;

    __device__ __forceinline__ void entry(u32 peer, u64 entry, u64 value) const {
        ptx::store_relaxed_sys_16(told_word(p, peer, epoch & 1, p.peers.rank, entry), {value, epoch});
    }

    __device__ __forceinline__ void count(u32 peer, u32 expert, u32 value) const {
        ptx::store_relaxed_sys_16(count_word(p, peer, epoch & 1, p.peers.rank, expert), {value, epoch});
    }

    __device__ __forceinline__ void end() const {}
};

#if WIRE_FP8
using Units = QuantisedUnits<ROW_TYPE>;
#else
using Units = PlainUnits;
#endif

// By the warps of all blocks but the first: the first `tokens` rows of x, to the ranks of their experts.
__device__ inline void send_few(const DispatchParams& p, u64 epoch, u32 tokens, u8* stages) {
    const u32 warps = (gridDim.x - 1) * WARPS, lane = threadIdx.x % 32;
    const u32 wanted = OWN_FROM_X ? ~(1u << p.peers.rank) : ~0u;
    trace(p.trace, AT_DESTINATIONS);
    Units units(p, epoch, stages, tokens, warps);
    for (u32 u = (blockIdx.x - 1) * WARPS + threadIdx.x / 32; u < tokens * units.units(); u += warps) {
        const u32 token = u / units.units(), unit = u % units.units();
        units.begin(token, unit);
        u32 mine = 0;
        if (lane < p.topk) {
            const long long expert = p.id(static_cast<u64>(token) * p.topk + lane);
            mine = expert >= 0 && expert < p.experts ? 1u << (static_cast<u32>(expert) / p.local) : 0;
        }
        const u32 mask = __reduce_or_sync(0xFFFFFFFF, mine) & wanted;
        if (mask != 0) {
            units.send(token, unit, mask);
        }
    }
}

// By a whole warp: one unit of a row, to all its places. False: a wait failed.
__device__ inline bool place_unit(const DispatchParams& p, const Places& where, u64 epoch, Units& units, u32 u) {
    Arriving row{p.peers.in_turn(u / units.units() % p.peers.ranks), u / units.units() / p.peers.ranks,
                 u % units.units(), NOWHERE, 0};
    if (row.token >= where.tokens(row.source)) {
        return true;
    }
    const Waiting who{p.op, row.source, epoch};
    const u32 lane = threadIdx.x % 32;
    const u64 entry = static_cast<u64>(row.token) * p.topk + lane;
    u64 told = NOWHERE;
    const bool came =
        lane >= p.topk ||
        wait_for_word(told_word(p, p.peers.rank, epoch & 1, row.source, entry), epoch, who, p.watch, told);
    if (!__all_sync(0xFFFFFFFF, came)) {
        return false;
    }
    if (lane < p.topk) {
        row.place = row.unit == 0 ? plan_entry(p, where, row.source, entry, told, 0)
                                  : where.place(row.source, static_cast<u32>(told));
    }
    row.hits = __ballot_sync(0xFFFFFFFF, row.place != NOWHERE);
    if (row.hits == 0) {
        return true;
    }
    trace_first(p.trace, AT_FIRST_ROW);
    const bool placed = units.place(row, who);
    trace(p.trace, AT_LAST_ROW);
    return placed;
}

// By a whole block. What a failed wait leaves undone, the last block out makes good.
__device__ inline void place_few(const DispatchParams& p, u64 epoch, u8* shared, u8* stages) {
    bool ok = true;
    const Places where(p, reinterpret_cast<u32*>(shared), [&](u32 source, u32 expert) {
        u64 count = 0;
        const u8* at = count_word(p, p.peers.rank, epoch & 1, source, expert);
        ok = wait_for_word(at, epoch, Waiting{p.op, source, epoch}, p.watch, count) && ok;
        return static_cast<u32>(count);
    });
    trace(p.trace, AT_COUNTS);
    if (!__syncthreads_and(ok) || !begin_placing(p, where, blockIdx.x)) {
        return;
    }
    const u32 warps = gridDim.x * WARPS, rows = where.most_tokens() * p.peers.ranks;
    Units units(p, epoch, stages, rows, warps);
    for (u32 u = blockIdx.x * WARPS + threadIdx.x / 32; ok && u < rows * units.units(); u += warps) {
        ok = place_unit(p, where, epoch, units, u);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 2)
    dispatch_few(const __grid_constant__ raymoe::DispatchParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    const auto [epoch, tokens, may] = begin_dispatch(p);
    u8* stages = shared + ((Places::shared_words(p) * 4 + 15) & ~15u);  // of the warps, behind what the placers share
    if (may) {
        if (blockIdx.x == 0) {
            Router<TellInWords>(p, epoch, tokens, 0, shared).run();
            __syncthreads();  // the placers use the routers' shared memory
        } else {
            send_few(p, epoch, tokens, stages);
        }
        place_few(p, epoch, shared, stages);
    }
    trace(p.trace, AT_END);
    if (!block_is_last_out(p.operation)) {
        return;
    }
    if (poisoned(p.watch)) {
        place_nothing(p);
    } else if (threadIdx.x == 0) {
        trace(p.trace, AT_ALL_AWAITED);
        p.got->refusal = refusal_of(p);
        finish_run(p.operation, epoch);
    }
}
