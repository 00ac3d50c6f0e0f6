// Combine of few tokens: what combine.cu does, in half of the trips.
//
// One launch, all blocks alike: every warp first sums what this rank's experts made of peers' tokens and sends the sums
// in lines (lines.cuh), then adds up what the ranks have sent for tokens of this rank. No flag, no fence.
//
// Memory map of every rank's heap; d is the rank whose experts it was, "half" the epoch of combine mod 2:
//   rows [2][d][token]   lines, by the number of the owner's token
//   statuses [2][d]      two words: {cause and other, epoch}, {number, epoch} of d's refusal
// All are written by d, at every rank, and read by the owner. The epoch is the one of combine.cu's operation.
//
// Why no line is overwritten before it is read: as in dispatch_few.cu. Every block awaits the statuses of all ranks in
// every epoch, and whatever was sent to a rank in an epoch has been read there when its kernel ends, unless a rank
// refused the step: then nobody reads, and nothing of that epoch is ever looked at again.

#include "raymoe/combine.cuh"
#include "raymoe/lines.cuh"
#include "raymoe/vectors.cuh"

namespace raymoe {

constexpr u32 TOGETHER = 4;  // rows whose loads are under way at a time

__device__ __forceinline__ u8* line_slot(const CombineParams& p, u32 peer, u32 half, u32 rank, u32 token) {
    const u64 row_lines = static_cast<u64>(lines_of(p.row_bytes)) * LINE_BYTES;
    return p.peers.slot(peer, p.few_rows[half], static_cast<u64>(rank) * p.slot_tokens + token, row_lines);
}

__device__ __forceinline__ u8* status_word(const CombineParams& p, u32 peer, u32 half, u32 rank, u32 word) {
    return p.peers.slot(peer, p.few_statuses[half], rank * 2ull + word, 16);
}

__device__ inline void send_status(const CombineParams& p, u64 epoch) {
    if (threadIdx.x < p.peers.ranks) {
        const Refusal& mine = p.got->refusal;
        const u64 first = static_cast<u64>(mine.other) << 32 | mine.cause;
        ptx::store_relaxed_sys_16(status_word(p, threadIdx.x, epoch & 1, p.peers.rank, 0), {first, epoch});
        ptx::store_relaxed_sys_16(status_word(p, threadIdx.x, epoch & 1, p.peers.rank, 1), {mine.number, epoch});
    }
}

// By a whole block: the refusals of all ranks, into shared memory. False: a wait failed.
__device__ inline bool await_refusals(const CombineParams& p, u64 epoch, u64 (*words)[2]) {
    bool ok = true;
    if (threadIdx.x < 2 * p.peers.ranks) {
        const u32 rank = threadIdx.x / 2, word = threadIdx.x % 2;
        ok = wait_for_word(status_word(p, p.peers.rank, epoch & 1, rank, word), epoch, Waiting{p.op, rank, epoch},
                           p.watch, words[rank][word]);
    }
    return __syncthreads_and(ok);
}

__device__ inline bool any_refused(const CombineParams& p, const u64 (*words)[2]) {
    bool refused = false;
    for (u32 rank = 0; rank < p.peers.ranks; ++rank) {
        refused = refused || static_cast<u32>(words[rank][0]) != CAUSE_NONE;
    }
    return refused;
}

// By a whole warp: this rank's experts' rows of a token, a part of them, summed in the order of k and rounded once.
template <class Type>
__device__ __forceinline__ ptx::Bytes16 sum_experts(const CombineParams& p, u64 entry, u32 hits, const Part& part) {
    float sums[Type::COUNT] = {};
    while (hits != 0) {
        ptx::Bytes16 loaded[TOGETHER];
        float weights[TOGETHER];
        u32 count = 0;
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            if (hits != 0) {
                const u64 chosen = __shfl_sync(0xFFFFFFFF, entry, __ffs(hits) - 1);
                hits &= hits - 1;
                loaded[i] = part.load(p.expert_rows + static_cast<u64>(static_cast<u32>(chosen)) * p.row_bytes);
                weights[i] = p.weighted ? __uint_as_float(static_cast<u32>(chosen >> 32)) : 1.0f;
                ++count;
            }
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            if (i < count) {
                float values[Type::COUNT];
                Type::unpack(loaded[i], values);
#pragma unroll
                for (u32 j = 0; j < Type::COUNT; ++j) {
                    sums[j] += weights[i] * values[j];
                }
            }
        }
    }
    return Type::pack(sums);
}

// By the warps of all blocks: what this rank owes its peers.
template <class Type>
__device__ inline void reduce_few(const CombineParams& p, u64 epoch, u32 warp, u32 warps) {
    const u32 peers = p.peers.ranks - 1;
    u32 most = 0;
    for (u32 step = 0; step < peers; ++step) {
        most = max(most, p.got->tokens[p.peers.in_turn(step)]);
    }
    const Dealing dealing(p.row_bytes, most * peers, warps);
    for (u32 u = warp; u < most * peers * dealing.units; u += warps) {
        const u32 unit = u % dealing.units, source = p.peers.in_turn(u / dealing.units % peers);
        const u32 token = u / dealing.units / peers;
        const u64 entry = token < p.got->tokens[source] ? p.entry(source, token) : NOWHERE;
        const u32 hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(entry) != NOWHERE);
        for (u32 group = unit * dealing.each; hits != 0 && group < dealing.end(unit); ++group) {
            const Part part(group, p.row_bytes);
            u8* slot = line_slot(p, source, epoch & 1, p.peers.rank, token);
            part.send(slot, sum_experts<Type>(p, entry, hits, part), epoch);
        }
    }
}

// By a whole warp: groups of one row of y. False: a wait failed.
template <class Type>
__device__ inline bool sum_unit(const CombineParams& p, u64 epoch, const Dealing& dealing, u32 u) {
    const u32 unit = u % dealing.units, token = u / dealing.units, me = p.peers.rank;
    const u32 mask = p.masks[token];
    const u64 entry = mask >> me & 1 ? p.entry(me, token) : NOWHERE;
    const u32 hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(entry) != NOWHERE);
    for (u32 group = unit * dealing.each; group < dealing.end(unit); ++group) {
        const Part part(group, p.row_bytes);
        const ptx::Bytes16 own = hits != 0 ? sum_experts<Type>(p, entry, hits, part) : ptx::Bytes16{0, 0};
        float sums[Type::COUNT] = {};
        for (u32 left = mask; left != 0;) {
            // Up to TOGETHER ranks are asked for at a time, so that their trips are one.
            u32 ranks[TOGETHER];
            u32 count = 0;
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                ranks[i] = left == 0 ? me : __ffs(left) - 1;
                count += left == 0 ? 0 : 1;
                left &= left - 1;
            }
            ptx::Bytes16 came[TOGETHER];
            auto look = [&] {
#pragma unroll
                for (u32 i = 0; i < TOGETHER; ++i) {
                    came[i] = ranks[i] == me ? own : part.look(line_slot(p, me, epoch & 1, ranks[i], token));
                }
                bool whole = true;
#pragma unroll
                for (u32 i = 0; i < TOGETHER; ++i) {
                    whole = (ranks[i] == me || part.complete(came[i], epoch)) && whole;
                }
                return whole;
            };
            const Waiting who{p.op, ranks[0], epoch};
            if (!wait_as_warp(look, epoch, who, p.watch)) {
                return false;
            }
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                if (i < count) {
                    float values[Type::COUNT];
                    Type::unpack(came[i], values);
#pragma unroll
                    for (u32 j = 0; j < Type::COUNT; ++j) {
                        sums[j] += values[j];
                    }
                }
            }
        }
        part.store(p.y + static_cast<u64>(token) * p.row_bytes, Type::pack(sums));
    }
    return true;
}

template <class Type>
__device__ inline void sum_few(const CombineParams& p, u64 epoch, u32 warp, u32 warps) {
    const Dealing dealing(p.row_bytes, p.tokens, warps);
    bool ok = true;
    for (u32 u = warp; ok && u < p.tokens * dealing.units; u += warps) {
        ok = sum_unit<Type>(p, epoch, dealing, u);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 2)
    combine_few(const __grid_constant__ raymoe::CombineParams p) {
    using namespace raymoe;
    using Type = ROW_TYPE;
    __shared__ u64 refusals[MAX_RANKS][2];
    const auto [epoch, may] = begin_combine(p);
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = gridDim.x * WARPS;
    bool refused = false;
    if (may) {
        if (blockIdx.x == 0) {
            send_status(p, epoch);
        }
        if (p.got->refusal.cause == CAUSE_NONE) {
            reduce_few<Type>(p, epoch, warp, warps);
        }
        trace(p.trace, AT_SAID_DONE);
        if (await_refusals(p, epoch, refusals)) {
            trace(p.trace, AT_COUNTS);
            refused = any_refused(p, refusals);
            if (refused) {
                fill_with_nan<Type>(p, warp, warps);
            } else {
                sum_few<Type>(p, epoch, warp, warps);
            }
        }
    }
    trace(p.trace, AT_END);
    if (!block_is_last_out(p.operation)) {
        return;
    }
    if (poisoned(p.watch)) {
        fill_with_nan<Type>(p, threadIdx.x / 32, WARPS);
        return;
    }
    if (threadIdx.x != 0) {
        return;
    }
    if (refused) {
        tell_host(p, epoch, [&](u32 rank, u32 word) { return refusals[rank][word]; });
    }
    finish_run(p.operation, epoch);
}
