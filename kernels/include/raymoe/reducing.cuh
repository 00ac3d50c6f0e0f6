// The reducers of a combine: for each token of each peer, the sum of what this rank's experts made of it, in float32,
// rounded once, pushed into the peer's slot.
//
// Rows are cut into pieces, and number n is piece n % pieces of token n / pieces. A lane is a warp with room for two
// pieces in shared memory: it sums into one while the other is being pushed. Lane l takes the numbers l, l + lanes, ...
// of every peer.
#pragma once

#include "raymoe/combine.cuh"
#include "raymoe/ring.cuh"
#include "raymoe/vectors.cuh"

namespace raymoe {

constexpr u32 UNROLL = 4;  // 16-byte vectors of a row that a thread has under way at a time; of two rows at a time

// A row to be added, and what it is multiplied by.
struct Term {
    const u8* row;
    float weight;
};

// Adds `a`, then `b`, to `sums`: vectors `first` + 32 * i below `last`. The loads of both are under way together.
template <class Type>
__device__ __forceinline__ void add_two(const Term& a, const Term& b, bool both, u32 first, u32 last,
                                        float (*sums)[Type::COUNT]) {
    ptx::Bytes16 loaded[2][UNROLL];
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        if (first + 32 * i < last) {
            loaded[0][i] = ptx::load_16(a.row + (first + 32 * i) * 16ull);
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        if (both && first + 32 * i < last) {
            loaded[1][i] = ptx::load_16(b.row + (first + 32 * i) * 16ull);
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        float values[Type::COUNT];
        Type::unpack(loaded[0][i], values);
#pragma unroll
        for (u32 j = 0; j < Type::COUNT; ++j) {
            sums[i][j] += a.weight * values[j];
        }
        if (both) {
            Type::unpack(loaded[1][i], values);
#pragma unroll
            for (u32 j = 0; j < Type::COUNT; ++j) {
                sums[i][j] += b.weight * values[j];
            }
        }
    }
}

// Adds to `sums` what the experts made of a token, in the order of k. By a whole warp; `entry` is that of
// CombineParams::entry, bit k of `hits` says that entry k is here.
template <class Type>
__device__ __forceinline__ void add_experts(const CombineParams& p, u64 entry, u32 hits, u32 first, u32 last,
                                            float (*sums)[Type::COUNT]) {
    auto term = [&](u32 k) {
        const u64 chosen = __shfl_sync(0xFFFFFFFF, entry, k);
        return Term{p.expert_rows + static_cast<u64>(static_cast<u32>(chosen)) * p.row_bytes,
                    p.weighted ? __uint_as_float(static_cast<u32>(chosen >> 32)) : 1.0f};
    };
    while (hits != 0) {
        const Term a = term(__ffs(hits) - 1);
        hits &= hits - 1;
        const bool both = hits != 0;
        const Term b = both ? term(__ffs(hits) - 1) : a;
        hits &= hits - 1;
        add_two<Type>(a, b, both, first, last, sums);
    }
}

// Of a lane's two stages, each.
__device__ __forceinline__ u32 stage_memory(const CombineParams& p) {
    return p.piece_vectors() * 16 + (STAMPS ? STAMP_BYTES : 0);
}

template <class Type>
class ReduceLane {
  public:
    __device__ ReduceLane(const CombineParams& p, u64 epoch, u32 reducer, u8* memory)
        : p_(p), epoch_(epoch), lane_(reducer * p.reducer_lanes + threadIdx.x / 32), half_(epoch & 1),
          leads_(threadIdx.x % 32 == 0), memory_(ptx::shared_address(memory)) {}

    // By a whole warp.
    __device__ __forceinline__ void run() {
        u32 most = 0;
        for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
            most = max(most, p_.got->tokens[p_.peers.in_turn(step)]);
        }
        u32 through = 0;
        for (u32 number = lane_; number < most * p_.pieces; number += p_.lanes()) {
            const u32 token = number / p_.pieces;
            for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
                const u32 source = p_.peers.in_turn(step);
                const u64 entry = token < p_.got->tokens[source] ? p_.entry(source, token) : NOWHERE;
                const u32 hits = __ballot_sync(0xFFFFFFFF, static_cast<u32>(entry) != NOWHERE);
                if (hits != 0) {
                    push(source, number, entry, hits);
                }
            }
            announce(++through);
        }
    }

    // Until every piece has arrived.
    __device__ __forceinline__ void finish() {
        if (leads_) {
            ptx::bulk_wait<0>();
        }
    }

  private:
    __device__ __forceinline__ void push(u32 source, u32 number, u64 entry, u32 hits) {
        const u32 begin = number % p_.pieces * p_.piece_vectors();
        const u32 last = min(begin + p_.piece_vectors(), p_.vectors());
        if (begin >= last) {
            return;
        }
        const u32 stage_bytes = stage_memory(p_);
        const u32 stage = memory_ + groups_ % 2 * stage_bytes;
        if (leads_) {
            ptx::bulk_wait_read<1>();  // the piece before the last has been read out of this stage
        }
        __syncwarp();
        for (u32 step = begin; step < last; step += 32 * UNROLL) {
            const u32 first = step + threadIdx.x % 32;
            float sums[UNROLL][Type::COUNT] = {};
            add_experts<Type>(p_, entry, hits, first, last, sums);
#pragma unroll
            for (u32 i = 0; i < UNROLL; ++i) {
                if (first + 32 * i < last) {
                    ptx::shared_store_16(stage + (first + 32 * i - begin) * 16, Type::pack(sums[i]));
                }
            }
        }
        ptx::fence_proxy_async_shared();  // orders this thread's stores to the stage before the bulk store out of it
        __syncwarp();
        if (leads_) {
            pace_.keep(p_.pace_ns);
            u8* slot = p_.slot_at(source, half_, p_.peers.rank, number / p_.pieces);
            ptx::bulk_store(slot + begin * 16ull, stage, (last - begin) * 16);
            if (STAMPS) {
                const u32 stamp = stage + stage_bytes - STAMP_BYTES;
                ptx::shared_store_16(stamp, {epoch_, epoch_});
                ptx::fence_proxy_async_shared();  // orders the stamp before the bulk store of it
                ptx::bulk_store(slot + p_.stamp_at(number % p_.pieces), stamp, STAMP_BYTES);
            }
            ptx::bulk_commit();
            trace_first(p_.trace, AT_FIRST_PUSH);
            trace(p_.trace, AT_LAST_PUSH);
        }
        ++groups_;
    }

    // The word of a chunk follows when one more piece has been pushed, so that the wait is a short one.
    __device__ __forceinline__ void announce(u32 through) {
        if (marked_ != 0 && groups_ != marked_groups_) {
            if (leads_) {
                ptx::bulk_wait<1>();
                publish(marked_);
            }
            marked_ = 0;
        }
        if (marked_ == 0 && through % p_.chunk == 0) {
            marked_ = through;
            marked_groups_ = groups_;
        }
    }

    __device__ __forceinline__ void publish(u64 done) {
        ptx::fence_acq_rel_sys();  // orders the pieces, whose bulk stores this thread has awaited, before the words
        for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
            ptx::store_relaxed_sys(p_.progress_at(p_.peers.in_turn(step), p_.peers.rank, lane_),
                                   progress(epoch_, done));
        }
    }

    const CombineParams& p_;
    u64 epoch_;
    u32 lane_;
    u32 half_;
    bool leads_;
    u32 memory_;
    Pace pace_;
    u32 groups_ = 0;
    u32 marked_ = 0;
    u32 marked_groups_ = 0;
};

// By a whole block, each of whose lanes has awaited its pieces: that they have nothing more to push, to every peer,
// also where there was nothing to push. One fence for all of them.
__device__ inline void say_done(const CombineParams& p, u64 epoch, u32 reducer) {
    __syncthreads();  // hands what the lanes have awaited to the threads below
    if (threadIdx.x >= 32) {
        return;
    }
    trace(p.trace, AT_ARRIVED);
    ptx::fence_acq_rel_sys();  // orders the pieces before the words
    for (u32 i = threadIdx.x; i < p.reducer_lanes * (p.peers.ranks - 1); i += 32) {
        const u32 lane = reducer * p.reducer_lanes + i % p.reducer_lanes;
        ptx::store_relaxed_sys(p.progress_at(p.peers.in_turn(i / p.reducer_lanes), p.peers.rank, lane),
                               progress(epoch, ALL_DONE));
    }
    trace(p.trace, AT_SAID_DONE);
}

// By a whole block, the `reducer`-th.
template <class Type>
__device__ inline void reduce_rows(const CombineParams& p, u64 epoch, u32 reducer, u8* shared) {
    const u32 warp = threadIdx.x / 32;
    if (warp < p.reducer_lanes) {
        ReduceLane<Type> lane(p, epoch, reducer, shared + warp * 2ull * stage_memory(p));
        if (p.got->refusal.cause == CAUSE_NONE) {
            lane.run();
        }
        lane.finish();
    }
    say_done(p, epoch, reducer);
}

}  // namespace raymoe
