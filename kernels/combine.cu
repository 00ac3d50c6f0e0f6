// Combine: what the experts made of each token, back to the token's rank, summed.
//
// One kernel, two kinds of work, on blocks that are all resident at once:
//   reducers  sum this rank's experts' rows of each token of each peer, and push the sum to that peer (reducing.cuh)
//   summers   add the ranks' sums of each token of this rank, in rank order, as they arrive; what this rank's own
//             experts made of it never leaves the rank, but is rounded as if it had, to what sums cross as
// Both take pieces of rows, so that a few tokens are work for many warps.
//
// Memory map of every rank's heap; d is the rank whose experts it was, "half" the epoch of combine mod 2:
//   rows [2][d][token]   slots, by the number of the owner's token
//   statuses [2][d]      why rank d refuses the data of this step, if it does
//   arrivals [d][number] the epoch for which piece `number` of d has arrived
//   done [d][reducer]    the epoch for which a reducer of d has nothing more to push
//   heads [d]            the epoch for which d's status is there
// All are written by d, at every rank, and read by the owner; statuses and heads at d itself too.
//
// A status travels with every combine, ahead of the rows, so all ranks learn of a refusal in the same combine: each of
// them gives NaN and tells its host. The next step works.
//
// Why no slot is overwritten before it is read: as in dispatch.cu, with combine's own epochs. The readers of epoch e
// are the summers of e, which are done when the kernel ends.
//
// A failed wait poisons (sync.cuh). From then on every launch returns at once, stores nothing to peers, and gives NaN.

#include "raymoe/combine.cuh"
#include "raymoe/ptx.cuh"
#include "raymoe/reducing.cuh"
#include "raymoe/sync.cuh"
#include "raymoe/vectors.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16  // of vectors.cuh: what rows are made of
#endif

namespace raymoe {

// By the threads of one block: this rank's status to every rank, its own too.
__device__ inline void tell_status(const CombineParams& p, u64 epoch) {
    if (threadIdx.x < p.peers.ranks) {
        const Refusal& mine = p.got->refusal;
        u8* at = p.status_at(threadIdx.x, epoch & 1, p.peers.rank);
        ptx::store_8(at, static_cast<u64>(mine.other) << 32 | mine.cause);
        ptx::store_8(at + 8, mine.number);
        ptx::store_release_sys(p.peers.flag(threadIdx.x, p.heads), epoch);  // orders the status before the epoch
    }
}

__device__ inline u64 status_words(const CombineParams& p, u64 epoch, u32 rank, u32 word) {
    return ptx::load_8(p.status_at(p.peers.rank, epoch & 1, rank) + word * 8);
}

// What a block has heard of all ranks.
struct Heard {
    bool ok;       // no wait failed
    bool refused;  // by at least one of them
};

// By a whole block, each word by a thread of its own, so that all take one trip: until the statuses of all ranks are
// here, and with `done` until no reducer of any peer has anything more to push; then nothing may be poisoned either.
__device__ inline Heard hear_all(const CombineParams& p, u64 epoch, bool done) {
    const u32 ranks = p.peers.ranks, me = p.peers.rank, words = ranks + (done ? (ranks - 1) * p.reducers : 0);
    bool ok = !done || threadIdx.x != THREADS - 1 || !poisoned(p.watch), refused = false;
    for (u32 i = threadIdx.x; i < words && ok; i += THREADS) {
        const u32 reducer = i - ranks, rank = i < ranks ? i : p.peers.in_turn(reducer / p.reducers);
        const u64* word = i < ranks ? p.peers.at<u64>(me, p.heads + rank * 128ull)
                                    : p.done_at(me, rank, reducer % p.reducers);
        ok = wait_for_epoch(word, epoch, Waiting{p.op, rank, epoch}, p.watch);
        refused = refused || (ok && i < ranks && static_cast<u32>(status_words(p, epoch, rank, 0)) != CAUSE_NONE);
    }
    ok = __syncthreads_and(ok);
    return {ok, !__syncthreads_and(!refused)};
}

// Whether the piece that came from a rank is of this epoch; without stamps it is taken to be.
__device__ inline bool is_of(const CombineParams& p, u64 epoch, u32 rank, u32 number) {
    if (!STAMPS) {
        return true;
    }
    const u8* slot = p.slot_at(p.peers.rank, epoch & 1, rank, number / p.pieces);
    const u64 seen = ptx::load_8(slot + p.stamp_at(number % p.pieces));
    if (seen != epoch) {
        fail(p.watch, FAILURE_STALE, Waiting{p.op, rank, epoch}, epoch, seen, 0);
    }
    return seen == epoch;
}

// By a whole warp: one piece of a row of y, from the sums of the ranks in `mask`, in rank order.
template <class Type>
__device__ inline void sum_piece(const CombineParams& p, u64 epoch, u32 number, u32 mask) {
    const u32 token = number / p.pieces, me = p.peers.rank;
    const u32 begin = number % p.pieces * p.piece_vectors(), last = min(begin + p.piece_vectors(), p.vectors());
    u8* row = p.y + static_cast<u64>(token) * p.row_bytes;
    const u64 entry = mask >> me & 1 ? p.entry(me, token) : NOWHERE;
    const u32 hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(entry) != NOWHERE);
    auto slot = [&](u32 rank) { return Term{p.slot_at(me, epoch & 1, rank, token), 1.0f}; };
    for (u32 step = begin; step < last; step += 32 * UNROLL) {
        const u32 first = step + threadIdx.x % 32;
        Crossed own[UNROLL];  // rounded, as a peer's sum is; made first, so that fewer registers live at a time
        if (hits != 0) {
            float sums[UNROLL][Type::COUNT] = {};
            add_experts<Type>(p, entry, hits, first, last, sums);
#pragma unroll
            for (u32 i = 0; i < UNROLL; ++i) {
                own[i] = Crossed::pack(sums[i]);
            }
        }
        float sums[UNROLL][Type::COUNT] = {};
        for (u32 left = mask; left != 0; left &= left - 1) {
            const u32 rank = __ffs(left) - 1;
            if (rank == me) {
#pragma unroll
                for (u32 i = 0; i < UNROLL; ++i) {
                    float values[Type::COUNT];
                    own[i].unpack(values);
#pragma unroll
                    for (u32 j = 0; j < Type::COUNT; ++j) {
                        sums[i][j] += values[j];
                    }
                }
                continue;
            }
            const u32 next = left & (left - 1);
            const bool both = next != 0 && __ffs(next) - 1 != me;
            add_two<Crossed>(slot(rank), slot(both ? __ffs(next) - 1 : rank), both, first, last, sums);
            left = both ? next : left;
        }
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (first + 32 * i < last) {
                ptx::store_16(row + (first + 32 * i) * 16ull, Type::pack(sums[i]));
            }
        }
    }
}

// By a whole block, the `summer`-th. What a failed wait leaves undone, the last block out makes good.
template <class Type>
__device__ inline void sum_rows(const CombineParams& p, u64 epoch, u32 summer) {
    const Heard heard = hear_all(p, epoch, false);
    if (!heard.ok) {
        return;
    }
    trace(p.trace, AT_COUNTS);
    const u32 me = p.peers.rank, warp = threadIdx.x / 32 * p.summers + summer, warps = WARPS * p.summers;
    if (heard.refused) {
        fill_with_nan<Type>(p, warp, warps);
        return;
    }
    for (u32 number = warp; number < p.tokens * p.pieces; number += warps) {
        if (number % p.pieces * p.piece_vectors() >= p.vectors()) {
            continue;  // pieces of whole vectors may leave none for the last ones
        }
        const u32 mask = p.masks[number / p.pieces];
        const u32 rank = threadIdx.x % 32;
        bool ok = true;
        if (rank != me && mask >> rank & 1) {
            ok = wait_for_epoch(p.arrival_at(me, rank, number), epoch, Waiting{p.op, rank, epoch}, p.watch);
            ok = ok && is_of(p, epoch, rank, number);
        }
        if (!__all_sync(0xFFFFFFFF, ok)) {  // also hands what was acquired to the other threads of the warp
            return;
        }
        __syncwarp();
        trace_first(p.trace, AT_FIRST_ROW);
        trace(p.trace, AT_LAST_ROW);
        sum_piece<Type>(p, epoch, number, mask);
        trace(p.trace, AT_PLACED);
    }
}

// By the last block out, which has acquired what all the others did.
template <class Type>
__device__ inline void finish_combine(const CombineParams& p, const CombineRun& run) {
    const u64 epoch = run.epoch;
    const Heard heard = run.may ? hear_all(p, epoch, true) : Heard{false, false};
    if (!heard.ok) {
        fill_with_nan<Type>(p, threadIdx.x / 32, WARPS);
        return;
    }
    if (threadIdx.x != 0) {
        return;
    }
    if (heard.refused) {
        tell_host(p, epoch, [&](u32 rank, u32 word) { return status_words(p, epoch, rank, word); });
    }
    trace(p.trace, AT_ALL_AWAITED);
    *p.taken = 0;  // read by later kernels of this stream only
    finish_run(p.operation, epoch);
}

template <class Type>
__device__ inline void combine_rows(const CombineParams& p, u8* shared) {
    const CombineBeginning beginning(p);
    const u32 reducers = p.parts & PART_REDUCE ? p.reducers : 0;
    CombineRun run;
    if (blockIdx.x < reducers) {
        ReduceLane<Type> lane(p, blockIdx.x, shared);
        lane.begin();
        run = beginning.run();
        if (run.may && blockIdx.x == 0) {
            tell_status(p, run.epoch);
        }
        if (run.may) {
            lane.run(run.epoch);
            say_done(p, run.epoch, blockIdx.x);
        }
    } else {
        run = beginning.run();
        if (run.may) {
            sum_rows<Type>(p, run.epoch, blockIdx.x - reducers);
        }
    }
    if (!(p.parts & PART_SUM)) {
        return;
    }
    trace(p.trace, AT_END);
    if (block_is_last_out(p.operation)) {
        finish_combine<Type>(p, run);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    combine(const __grid_constant__ raymoe::CombineParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    combine_rows<ROW_TYPE>(p, shared);
}
