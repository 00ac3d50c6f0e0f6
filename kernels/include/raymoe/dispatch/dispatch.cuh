// What the parts of a dispatch share: its parameters, and the words between ranks. dispatch.cu tells the protocol.
#pragma once

#include "raymoe/ll/dealing.cuh"
#include "raymoe/base/peer.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"
#include "raymoe/base/trace.cuh"

namespace raymoe {

#ifndef ROW_TYPE
#define ROW_TYPE Bf16  // of vectors.cuh: what rows are made of
#endif
#ifndef WIRE_FP8
#define WIRE_FP8 0  // 1: rows cross as 8-bit floats, with a scale for each BLOCK of them
#endif

#ifndef STAMPED
#define STAMPED 0  // 1: every slot ends in a stamp of its epoch, which whoever reads the slot checks. For tests
#endif
constexpr bool STAMPS = STAMPED;
constexpr u32 STAMP_BYTES = 16;

// A row of a peer that crosses as it is may as well be read out of x where the peer is this rank itself. One that is
// quantised goes through a slot at home too, so that all rows are what they are by one piece of code.
constexpr bool FP8 = WIRE_FP8;
constexpr bool OWN_FROM_X = !FP8;
constexpr u32 BLOCK = 128;

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8  // a kernel or a build may say 16, which fill a multiprocessor
#endif
constexpr u32 WARPS = BLOCK_WARPS;
constexpr u32 THREADS = WARPS * 32;
constexpr u32 MAX_DONE = 272;  // words of one rank at a peer, one for each block: more than a GPU has multiprocessors

// A fence waits for the words that its thread stored before, a whole trip over the link. So words go several at a time.
constexpr u32 MOST_TOGETHER = 4;

// Shared memory of a lane's ring; the next lane's begins behind it. The same sum: raymoe/device/dispatch_grid.py.
__device__ __forceinline__ u32 lane_memory(u32 stages, u32 stage_bytes) {
    return (stages * (stage_bytes + 8) + 127) & ~127u;
}

// What `parts` of the work a launch does. All of them: the fused kernel.
constexpr u32 PART_ROUTE = 1;  // counts, and what is told of each row
constexpr u32 PART_SEND = 2;   // rows to the peers
constexpr u32 PART_PLACE = 4;  // rows to their places; the end of the run

// Told of entry k of token t: {place, weight}. `place` is {local expert, how many of the source's entries for that
// expert come before}, or NOWHERE where the entry's expert is on another rank.
constexpr u32 RANK_BITS = 21;
constexpr u32 RANK_MASK = (1u << RANK_BITS) - 1;
constexpr u32 NOWHERE = 0xFFFFFFFF;

// Why the data of a step is refused; raymoe/exchange/refusal.py has the same numbers.
constexpr u32 CAUSE_NONE = 0;      // number: the epoch of the dispatch; other: in a combine whether it is weighted
constexpr u32 CAUSE_ID = 1;        // other: the token, number: the id
constexpr u32 CAUSE_CAPACITY = 2;  // number: the rows that were needed
constexpr u32 CAUSE_EXPERT = 4;    // other: the source, number: the local expert that it named
constexpr u32 CAUSE_TOKENS = 5;    // other: rows of x, number: the tokens asked for

// Why a rank refuses the data, or of which dispatch it combines the rows. 16 bytes, as they travel with a combine.
struct Refusal {
    u32 cause;
    u32 other;
    u64 number;
};
static_assert(sizeof(Refusal) == 16, "");

// What a dispatch leaves for its combine, besides `home` and `masks`. Device memory of this rank.
struct Got {
    u32 tokens[MAX_RANKS];  // that each source has sent; the own ones: rows of y from there on are zero
    Refusal refusal;
};
static_assert(sizeof(Got) == MAX_RANKS * 4 + 16, "");

// An expert's number as it stands in memory; where numbers have 4 bytes, `high` says nothing.
struct Id {
    u32 low, high;
};
constexpr Id NO_ID{NOWHERE, NOWHERE};  // -1

// Words of this rank alone, kept from run to run; all ~0 or 0 between runs, as said.
struct Scratch {
    u64 bad_entry;  // the first entry with an id out of range; ~0: none. Lowered by routers, read and reset at the end
    u64 needed;     // rows that did not fit; 0: they did. Written by the first placer, reset at the end
    u64 liar;       // {source, expert} of the first told entry that its source's counts have no room for; ~0: none
    u32 routed;     // routers that are through; wraps
    u32 unused;
};
static_assert(sizeof(Scratch) == 32, "");

struct DispatchParams {
    Peers peers;
    Watch watch;

    // Offsets in every rank's heap, for each half where there are two; `half` is the epoch mod 2.
    u64 rows[2];    // slots: row t of source s at (s * slot_tokens + t) * slot_bytes
    u64 told[2];    // 8 bytes for each (source, token, k)
    u64 counts[2];  // u32 for each (source, local expert), and behind a source's experts the tokens that it sent
    // Writer: a lane of source s, at each rank that a token's row went to, word (s, token): the epoch, after the row
    // has arrived. Reader: the owner, acquiring. Any lane may take any token, so words belong to tokens.
    u64 arrivals;
    // Writer: the senders of source s, at every other rank, word (s, sender): the epoch, after all that the sender has
    // pushed has arrived; also with nothing to send. Reader: the owner, acquiring.
    u64 done;
    // Writer: the last router of source s, at every rank, its own too; the epoch, after counts and told entries.
    // Reader: every placer of the owner, acquiring.
    u64 heads;

    // The regions of dispatch_ll.cu, likewise. What is a source's is so for every exchange of the workspace.
    u64 ll_rows[2];
    u64 ll_told[2];
    u64 ll_counts[2];

    // What this rank sends.
    const u8* x;            // [tokens][row_bytes]; already quantised: [tokens][hidden] 8-bit floats
    const u8* x_scales;     // [tokens][blocks] f32 of rows that are already quantised, else null
    const u8* ids;          // [tokens][topk], i32 or i64
    const u8* weights;      // [tokens][topk] f32
    const u32* num_tokens;  // null: all of them

    // What this rank gets.
    u8* out;          // [capacity][out_row_bytes], expert by expert
    u8* scales;       // f32, that of block b of row i at b * scale_stride + i; null: rows are given dequantised
    u8* out_weights;  // [capacity] f32
    u32* expert_offsets;  // [local + 1]
    u32* expert_counts;
    u8* index;  // [capacity] i64, the slot of each row; null unless rank_layout
    u8* home;   // [ranks][slot_tokens][topk]: {position or ~0, weight}
    u32* masks;  // [tokens]: ranks that token t was sent to
    Got* got;

    // Of this rank alone.
    u64* trace;  // [blocks][TRACE_POINTS], zero before; null unless the build traces
    Operation* operation;
    Scratch* scratch;
    u64* taken;  // tokens that lanes have asked for, besides the first of each; 0 again at the end of a run
    u64* router_words;   // [routers]: the epoch for which router c has counted
    u32* router_counts;  // [routers][experts]

    u64 half_slots;  // slot number of half 1's first; half 0 begins at 0
    u64 zero_slot;   // a slot of zeros, which `index` names in gaps
    u32 wide_ids;    // ids are i64
    u32 tokens;      // T', rows of x
    u32 slot_tokens;
    u32 topk;
    u32 experts;
    u32 local;  // experts a rank
    u32 local_inverse;  // for `rank_of`
    u32 row_bytes;
    u32 out_row_bytes;
    u32 slot_bytes;
    u32 hidden;
    u32 scale_stride;
    u32 alignment;
    u32 capacity;
    u32 zero_padding;
    u32 rank_layout;
    u32 op;
    u32 parts;
    u32 senders;        // blocks that send; the others route and place
    u32 sender_lanes;   // warps of each
    u32 sender_stages;  // of each lane's ring; where rows are quantised, of a block, for rows that leave
    u32 together;       // rows of a lane whose words go behind one fence, at most MOST_TOGETHER; not of quantised rows
    u32 at_once;        // rows of a source are announced by its senders' `done` alone
    u32 arrival_stride;  // words of a source
    u32 ll_lines;       // lines of a source
    u32 ll_entries;     // told entries of a source, of few tokens
    Dealing ll_sent;    // rows of x, to warps that send
    Dealing ll_placed;  // rows of all ranks, to warps that place
    u32 routers;        // of the placers, the first so many route
    u32 router_runs;    // of 32 entries, that each of them has; of few tokens
    u32 placers;
    u32 placer_lanes;
    u32 placer_stages;

    __device__ __forceinline__ u32 lanes() const { return senders * sender_lanes; }

    // expert / local, without a division, which takes long where little else is to do. raymoe/device/dispatch.py says
    // for which experts it is exact: for all that there may be.
    __device__ __forceinline__ u32 rank_of(u32 expert) const { return expert * local_inverse >> 20; }

    // expert % local
    __device__ __forceinline__ u32 local_of(u32 expert) const { return expert - rank_of(expert) * local; }

    __device__ __forceinline__ u32 blocks() const { return (hidden + BLOCK - 1) / BLOCK; }

    // Where a placed row goes: to its place, and with layout rank to its slot, by number.
    __device__ __forceinline__ u8* place_at(u32 place) const {
        return rank_layout ? peers.slot(peers.rank, rows[0], place, slot_bytes)
                           : out + static_cast<u64>(place) * out_row_bytes;
    }

    // Of a row of x.
    __device__ __forceinline__ u32 x_bytes() const { return FP8 && x_scales != nullptr ? hidden : row_bytes; }

    // Ranks whose rows come through slots, and which hear of arrivals: `in_turn` of these many.
    __device__ __forceinline__ u32 heard() const { return OWN_FROM_X ? peers.ranks - 1 : peers.ranks; }

    __device__ __forceinline__ u64 slot(u32 half, u32 source, u32 token) const {
        return half * half_slots + static_cast<u64>(source) * slot_tokens + token;
    }

    __device__ __forceinline__ u8* slot_at(u32 peer, u32 half, u32 source, u32 token) const {
        return peers.slot(peer, rows[half], static_cast<u64>(source) * slot_tokens + token, slot_bytes);
    }

    __device__ __forceinline__ u8* told_at(u32 peer, u32 half, u32 source, u64 entry) const {
        return peers.slot(peer, told[half], static_cast<u64>(source) * slot_tokens * topk + entry, 8);
    }

    __device__ __forceinline__ u8* counts_at(u32 peer, u32 half, u32 source, u32 expert) const {
        return peers.slot(peer, counts[half], static_cast<u64>(source) * (local + 1) + expert, 4);
    }

    __device__ __forceinline__ u64* arrival_at(u32 peer, u32 source, u32 token) const {
        return reinterpret_cast<u64*>(
            peers.slot(peer, arrivals, static_cast<u64>(source) * arrival_stride + token, 8));
    }

    __device__ __forceinline__ u64* done_at(u32 peer, u32 source, u32 sender) const {
        return reinterpret_cast<u64*>(peers.slot(peer, done, static_cast<u64>(source) * MAX_DONE + sender, 8));
    }

    // Of an entry where it is wanted, else NO_ID. Only loads: many may be under way.
    __device__ __forceinline__ Id id_if(bool wanted, u64 entry) const {
        const u8* at = ids + entry * (wide_ids ? 8 : 4);
        return {ptx::load_4_if(wanted, at, NO_ID.low), ptx::load_4_if(wanted && wide_ids, at + 4, NO_ID.high)};
    }

    // The expert; below 0: none. Anything from `experts` on, or below -1, is out of range.
    __device__ __forceinline__ long long number(const Id& id) const {
        return wide_ids ? static_cast<long long>(static_cast<u64>(id.high) << 32 | id.low)
                        : static_cast<long long>(static_cast<int>(id.low));
    }

    __device__ __forceinline__ long long id(u64 entry) const { return number(id_if(true, entry)); }

    // Those of `entry` and each `stride`-th one after it, -1 from `end` on. All loads are under way together.
    template <u32 COUNT>
    __device__ __forceinline__ void ids_of(u64 entry, u32 stride, u64 end, long long (&into)[COUNT]) const {
        Id loaded[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            loaded[i] = id_if(entry + i * stride < end, entry + i * stride);
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            into[i] = number(loaded[i]);
        }
    }

    // Bit r: token t has an expert on rank r.
    __device__ __forceinline__ u32 ranks_of(u32 token) const {
        const u64 first = static_cast<u64>(token) * topk;
        u32 mask = 0;
        for (u32 k = 0; k < topk; k += 8) {
            long long eight[8];
            ids_of(first + k, 1, first + topk, eight);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                if (eight[i] >= 0 && eight[i] < experts) {
                    mask |= 1u << rank_of(static_cast<u32>(eight[i]));
                }
            }
        }
        return mask;
    }
};

// What every block of a dispatch knows first.
struct DispatchRun {
    u64 epoch;
    u32 tokens;  // of x that are sent; none where more are asked for than there are, which is refused
    bool may;    // the workspace is not poisoned
};

// Loads it, and hands it to the block. What stands between the two is done while the loads are under way.
class DispatchBeginning {
  public:
    __device__ __forceinline__ explicit DispatchBeginning(const DispatchParams& p) : p_(p) {
        const bool first = threadIdx.x == 0;
        if (first) {
            trace(p.trace, AT_START);
        }
        asked_ = ptx::load_4_if(first && p.num_tokens != nullptr, p.num_tokens, p.tokens);
        before_.load(first, p.operation, p.watch);
    }

    // By a whole block.
    __device__ __forceinline__ DispatchRun run() const {
        __shared__ DispatchRun run;
        if (threadIdx.x == 0) {
            run = {before_.epoch + 1, refused() ? 0 : asked_, before_.poison == 0};
        }
        __syncthreads();
        return run;
    }

    // More tokens are asked for than there are. Known to the first thread.
    __device__ __forceinline__ bool refused() const { return asked_ > p_.tokens; }

  private:
    const DispatchParams& p_;
    Before before_;
    u32 asked_;
};

// By a whole block.
__device__ inline DispatchRun begin_dispatch(const DispatchParams& p) { return DispatchBeginning(p).run(); }

// By a whole block: until the heads of all ranks are of this epoch. False: a wait failed.
__device__ inline bool await_heads(const DispatchParams& p, u64 epoch) {
    bool ok = true;
    if (threadIdx.x < p.peers.ranks) {
        ok = wait_for_epoch(p.peers.flag_of(threadIdx.x, p.heads), epoch, Waiting{p.op, threadIdx.x, epoch}, p.watch);
    }
    return __syncthreads_and(ok);
}

// What is wrong with the data of this step, from what the blocks left in `scratch`, which is made ready for the next.
__device__ inline Refusal refusal_of(const DispatchParams& p, u64 epoch) {
    Scratch& scratch = *p.scratch;
    const u64 bad = ptx::load_relaxed_gpu(&scratch.bad_entry), needed = ptx::load_relaxed_gpu(&scratch.needed);
    const u64 liar = ptx::load_relaxed_gpu(&scratch.liar);
    scratch.bad_entry = scratch.liar = ~0ull;
    scratch.needed = 0;
    if (p.num_tokens != nullptr && *p.num_tokens > p.tokens) {
        const int asked = static_cast<int>(*p.num_tokens);  // below 0 is refused too, and told as such
        return {CAUSE_TOKENS, p.tokens, static_cast<u64>(static_cast<long long>(asked))};
    }
    if (bad != ~0ull) {
        return {CAUSE_ID, static_cast<u32>(bad / p.topk), static_cast<u64>(p.id(bad))};
    }
    if (liar != ~0ull) {
        return {CAUSE_EXPERT, static_cast<u32>(liar >> 32), liar & 0xFFFFFFFF};
    }
    return needed != 0 ? Refusal{CAUSE_CAPACITY, 0, needed} : Refusal{CAUSE_NONE, 0, epoch};
}

}  // namespace raymoe
