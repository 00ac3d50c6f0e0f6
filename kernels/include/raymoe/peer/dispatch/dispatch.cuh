// The parameters of a dispatch, the structs around them, and the words between ranks. dispatch.cu has the protocol.
#pragma once

#include "raymoe/base/peer.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/base/sync.cuh"
#include "raymoe/base/trace.cuh"
#include "raymoe/peer/dispatch/block_barriers.cuh"

namespace raymoe {

#ifndef ROW_TYPE
#define ROW_TYPE Bf16  // of vectors.cuh: the element type of rows
#endif
#ifndef WIRE_FP8
#define WIRE_FP8 0  // 1: rows cross as 8-bit floats, with a scale for each BLOCK of elements
#endif

#ifndef KNOWN_ROUTING
#define KNOWN_ROUTING 0  // 1: rows go to the places that an earlier dispatch gave them. Its results are input
#endif
constexpr bool KNOWN = KNOWN_ROUTING;

#ifndef AGAIN_ROUTED
#define AGAIN_ROUTED 0  // 1: a dispatch of a backward pass, whose rows are routed again (passes.cuh)
#endif
constexpr bool AGAIN = AGAIN_ROUTED;
static_assert(!KNOWN || !WIRE_FP8, "only backward passes know the routing, and their rows do not cross as fp8");

#ifndef CHUNKED_ROWS
#define CHUNKED_ROWS 0  // 1: rows of x come in chunks while the kernel runs (chunks.cuh)
#endif
constexpr bool CHUNKED = CHUNKED_ROWS;

#ifndef STAMPED
#define STAMPED 0  // 1: every slot ends in a stamp of its epoch, and every reader checks it. For tests
#endif
constexpr bool STAMPS = STAMPED;
constexpr u32 STAMP_BYTES = 16;

// A placement block reads this rank's own rows out of x if rows cross as they are. If rows are quantised, own rows go
// through slots too, so that one piece of code makes all rows.
constexpr bool FP8 = WIRE_FP8;
constexpr bool OWN_FROM_X = !FP8;
constexpr u32 BLOCK = 128;

constexpr u32 MAX_DONE = 272;  // words of one rank at a peer, one for each block: more than a GPU has SMs

// A fence waits for the words that its thread stored before: a round trip over the link. So words go several at a time.
constexpr u32 MOST_TOGETHER = 4;

// Shared memory of a warp's ring; the next warp's follows. raymoe/exchange/peer/dispatch_grid.py computes the same sum.
__device__ __forceinline__ u32 ring_memory(u32 stages, u32 stage_bytes) {
    return (stages * (stage_bytes + 8) + 127) & ~127u;
}

// The parts of the work that a launch does; all of them: the fused kernel.
constexpr u32 PART_ROUTE = 1;  // counts and routing entries
constexpr u32 PART_SEND = 2;   // rows to the peers
constexpr u32 PART_PLACE = 4;  // rows to their places; the end of the run

// The routing entry k of token t: {place, weight}. `place` is {local expert, number of the source's entries for that
// expert before this one}, or NOWHERE if the entry's expert is on another rank.
constexpr u32 RANK_BITS = 21;
constexpr u32 RANK_MASK = (1u << RANK_BITS) - 1;
constexpr u32 NOWHERE = 0xFFFFFFFF;

// Why a step's data is refused; raymoe/exchange/refusal.py has the same numbers.
constexpr u32 CAUSE_NONE = 0;      // number: the epoch of the dispatch; other: see combine.cuh, passes.cuh
constexpr u32 CAUSE_ID = 1;        // other: the token, number: the id
constexpr u32 CAUSE_CAPACITY = 2;  // number: the rows needed
constexpr u32 CAUSE_EXPERT = 4;    // other: the source, number: the local expert that it named
constexpr u32 CAUSE_TOKENS = 5;    // other: rows of x, number: the tokens asked for
constexpr u32 SITE_SHIFT = 2;      // of the call site's number, in `other` without a cause

// Why a rank refuses the data, or else which dispatch it combines. These 16 bytes travel with a combine.
struct Refusal {
    u32 cause;
    u32 other;
    u64 number;
};
static_assert(sizeof(Refusal) == 16, "");

// The results of a dispatch for its combine, besides `entry_places` and `masks`. Device memory of this rank.
struct DispatchSummary {
    u32 tokens[MAX_RANKS];  // sent by each source; rows of y from this rank's own number on are zero
    Refusal refusal;
    u64 number;  // the epoch, also if the data is refused
};
static_assert(sizeof(DispatchSummary) == MAX_RANKS * 4 + 24, "");

// The statuses of the last run that was refused: of combines, and of dispatches in backward passes. In host memory that
// the GPU has mapped. Writer: the last block out; `epoch` last, by a release at system scope. Reader: the host, at any
// time, `epoch` first. The host remembers the epoch that it has raised.
struct RefusalRecord {
    u64 epoch;
    u64 unused;
    Refusal refusals[MAX_RANKS];
};
static_assert(sizeof(RefusalRecord) == 16 + 16 * MAX_RANKS, "");

// Reports to the host that this run is refused. `status(rank, word)` returns a word of a rank's Refusal. One thread
// calls this.
template <class Status>
__device__ inline void report_refusal(RefusalRecord* record, u32 ranks, u64 epoch, Status status) {
#pragma unroll 1
    for (u32 rank = 0; rank < ranks; ++rank) {
        u64* into = reinterpret_cast<u64*>(&record->refusals[rank]);
        ptx::store_relaxed_sys(into, status(rank, 0));
        ptx::store_relaxed_sys(into + 1, status(rank, 1));
    }
    ptx::store_release_sys(&record->epoch, epoch);  // orders the refusals before the epoch that announces them
}

// An expert id as it is in memory; if ids have 4 bytes, `high` has no meaning.
struct Id {
    u32 low, high;
};
constexpr Id NO_ID{NOWHERE, NOWHERE};  // -1

// Words of this rank alone, which stay from run to run. Between runs each has the value named first.
struct Scratch {
    u64 bad_entry;  // ~0: none; the first entry with a wrong id. Counting blocks lower it; read and reset at the end
    u64 needed;     // 0: the rows fit; the rows needed. The first placement block writes it; reset at the end
    u64 bad_count;  // ~0: none; {source, expert} of the first routing entry that its source's count does not cover
    u32 routed;     // 0; finished counting blocks; wraps
    u32 unused;
};
static_assert(sizeof(Scratch) == 32, "");

// The parameters that all kernels of a dispatch read: the tensors of a call, and sizes. The struct ends without
// padding, at a multiple of 8 bytes. So the fields of a struct that inherits it follow directly, as in its Python twin.
// Two u32 that a kernel reads together are one load if they begin at a multiple of 8.
struct DispatchCall {
    Peers peers;
    Watch watch;

    // Input: the tokens of this rank.
    const u8* x;             // [tokens][row_bytes]; if already quantised: [tokens][hidden] 8-bit floats
    const u8* x_scales;      // [tokens][blocks] f32 if rows are already quantised, else null
    const u8* topk_idx;      // [tokens][topk], i32 or i64
    const u8* topk_weights;  // [tokens][topk] f32
    const u32* num_tokens;   // tokens to send; null: all

    // Output: the rows for this rank's experts.
    u8* out;              // [capacity][out_row_bytes], expert by expert
    u8* scales;           // f32, of block b of row i at b * scale_stride + i; null: rows are dequantised
    u8* out_weights;      // [capacity] f32
    u32* expert_offsets;  // [local + 1]
    u32* expert_counts;   // [local]
    u8* index;            // [capacity] i64, the slot of each row; null with layout expert
    u8* entry_places;     // [ranks][slot_tokens][topk]: {place or ~0, weight}
    u32* masks;           // [tokens]: bit r: token t was sent to rank r
    DispatchSummary* summary;

    // In a backward pass, else null (passes.cuh).
    const DispatchSummary* forward;  // of the dispatch to which it belongs
    const u64* mark;                 // not 0: ranks of other domains run another backward pass; null: there are none
    RefusalRecord* record;           // for ranks that run the backward passes of different dispatches

    // Of this rank alone.
    u64* trace;  // [blocks][TRACE_POINTS], zero before; null unless the build traces
    Operation* operation;
    Scratch* scratch;

    u32 wide_topk_idx;  // topk_idx is i64
    u32 tokens;         // T', rows of x
    u32 slot_tokens;    // T, of each source
    u32 topk;
    u32 experts;
    u32 local;          // experts a rank
    u32 local_inverse;  // see `rank_of`
    u32 row_bytes;
    u32 out_row_bytes;
    u32 zero_padding;
    u32 hidden;
    u32 scale_stride;
    u32 alignment;
    u32 capacity;
    u32 op;
    u32 group;  // experts, neighbours in number, of which only the first is aligned (places.cuh, GROUPED_EXPERTS)
    u32 site;   // of the call, such as a layer, below 2^29; 0: none. Only backward passes read it
    u32 unused;

    // expert / local. A multiplication, because a division is slow compared to the other work of a small dispatch. It
    // is exact for all experts that the kernels take (raymoe/exchange/peer/dispatch.py).
    __device__ __forceinline__ u32 rank_of(u32 expert) const { return expert * local_inverse >> 20; }

    // expert % local
    __device__ __forceinline__ u32 local_of(u32 expert) const { return expert - rank_of(expert) * local; }

    __device__ __forceinline__ u32 blocks() const { return (hidden + BLOCK - 1) / BLOCK; }

    // The bytes of a row of x.
    __device__ __forceinline__ u32 x_bytes() const { return FP8 && x_scales != nullptr ? hidden : row_bytes; }

    // The id of an entry if `wanted`, else NO_ID. Only issues loads: many may be in flight.
    __device__ __forceinline__ Id id_if(bool wanted, u64 entry) const {
        const u8* at = topk_idx + entry * (wide_topk_idx ? 8 : 4);
        return {ptx::load_4_if(wanted, at, NO_ID.low), ptx::load_4_if(wanted && wide_topk_idx, at + 4, NO_ID.high)};
    }

    // The expert; below 0: none. Values of `experts` and more, or below -1, are out of range.
    __device__ __forceinline__ long long number(const Id& id) const {
        return wide_topk_idx ? static_cast<long long>(static_cast<u64>(id.high) << 32 | id.low)
                             : static_cast<long long>(static_cast<int>(id.low));
    }

    __device__ __forceinline__ long long id(u64 entry) const { return number(id_if(true, entry)); }
};

// The parameters of dispatch.cu, alltoallv.cu, announce.cu and pack.cu. dispatch_ll.cu: peer/ll/words_ll.cuh.
struct DispatchParams : DispatchCall {
    // Offsets in every rank's heap, for each parity if there are two buffers. The parity is the epoch mod 2.
    u64 rows[2];             // slots: row t of source s at (s * slot_tokens + t) * slot_bytes
    u64 routing_entries[2];  // 8 bytes for each (source, token, k)
    u64 counts[2];           // u32 for each (source, local expert); after a source's experts the tokens that it sent
    u64 passes[2];           // {pass, epoch} for each source (passes.cuh)
    // Writer: a sender warp of source s, at each rank that a token's row went to, word (s, token): the epoch, after the
    // row has arrived. Reader: the owner, with acquire. Any warp may take any token, so words belong to tokens.
    u64 arrivals;
    // Writer: the senders of source s, at every other rank, word (s, sender): the epoch, after all rows of the sender
    // have arrived; also with nothing to send. Reader: the owner, with acquire.
    u64 done;
    // Writer: the last counting block of source s, at every rank, its own too: the epoch, after counts and entries.
    // Reader: every placement block of the owner, with acquire.
    u64 heads;

    // Of this rank alone.
    u64* taken;  // tokens that sender warps have taken, besides the first of each; 0 again at the end of a run
    u64* counting_words;  // [counting_blocks]: the epoch for which counting block c has counted
    u32* counting_sums;   // [counting_blocks][experts]

    u64 half_slots;      // number of the first slot of parity 1; parity 0 begins at 0
    u64 zero_slot;       // a slot of zeros, to which `index` points in gaps
    u32 slot_bytes;
    u32 rank_layout;
    u32 parts;
    u32 senders;         // blocks that send; the other blocks count and place
    u32 sender_warps;    // warps of each
    u32 sender_stages;   // of each warp's ring; for quantised rows: stages of a block for leaving rows
    u32 together;        // rows of a warp whose words share a fence, at most MOST_TOGETHER; unused for quantised rows
    u32 at_once;         // 1: rows have no arrival words; `done` of its senders announces a source's rows
    u32 arrival_stride;  // words of a source
    u32 counting_blocks;   // the first so many placement blocks, which count before they place
    u32 placement_blocks;
    u32 placement_warps;   // warps of each
    u32 placement_stages;  // of each warp's ring

#if CHUNKED_ROWS
    const u64* chunks;  // {number of the crossing, word of each chunk}: chunks.cuh
    u32 chunk_tokens;   // of x in a chunk; the last chunk may have fewer
    u32 rail_op;        // the number of the operation that a wait for a chunk reports
#endif

    __device__ __forceinline__ u32 all_sender_warps() const { return senders * sender_warps; }

    // The address to which a row is copied: its place, or with layout rank its slot, by number.
    __device__ __forceinline__ u8* place_at(u32 place) const {
        return rank_layout ? peers.slot(peers.rank, rows[0], place, slot_bytes)
                           : out + static_cast<u64>(place) * out_row_bytes;
    }

    // The number of ranks whose rows come through slots: step `i` of them is `peers.in_turn(i)`.
    __device__ __forceinline__ u32 ranks_through_slots() const { return OWN_FROM_X ? peers.ranks - 1 : peers.ranks; }

    __device__ __forceinline__ u64 slot(u32 parity, u32 source, u32 token) const {
        return parity * half_slots + static_cast<u64>(source) * slot_tokens + token;
    }

    __device__ __forceinline__ u8* slot_at(u32 peer, u32 parity, u32 source, u32 token) const {
        return peers.slot(peer, rows[parity], static_cast<u64>(source) * slot_tokens + token, slot_bytes);
    }

    __device__ __forceinline__ u8* routing_entry_at(u32 peer, u32 parity, u32 source, u64 entry) const {
        return peers.slot(peer, routing_entries[parity], static_cast<u64>(source) * slot_tokens * topk + entry, 8);
    }

    __device__ __forceinline__ u8* counts_at(u32 peer, u32 parity, u32 source, u32 expert) const {
        return peers.slot(peer, counts[parity], static_cast<u64>(source) * (local + 1) + expert, 4);
    }

    __device__ __forceinline__ u8* pass_at(u32 peer, u32 parity, u32 source) const {
        return peers.slot(peer, passes[parity], source, 16);
    }

    __device__ __forceinline__ u64* arrival_at(u32 peer, u32 source, u32 token) const {
        return reinterpret_cast<u64*>(
            peers.slot(peer, arrivals, static_cast<u64>(source) * arrival_stride + token, 8));
    }

    __device__ __forceinline__ u64* done_at(u32 peer, u32 source, u32 sender) const {
        return reinterpret_cast<u64*>(peers.slot(peer, done, static_cast<u64>(source) * MAX_DONE + sender, 8));
    }

    // The ids of `entry` and each `stride`-th entry after it, -1 from `end` on. All loads are in flight together.
    template <u32 COUNT>
    __device__ __forceinline__ void topk_idx_of(u64 entry, u32 stride, u64 end, long long (&into)[COUNT]) const {
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
            topk_idx_of(first + k, 1, first + topk, eight);
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

#if CHUNKED_ROWS
using ChunkedDispatchParams = DispatchParams;
#endif

}  // namespace raymoe
