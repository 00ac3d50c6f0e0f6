// The parameters of a combine, the structs around them, and the words between ranks. combine.cu has the protocol.
#pragma once

#include "raymoe/base/column_pieces.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/base/vectors.cuh"

#ifdef WIRE_TYPE  // of vectors.cuh: the type in which sums cross, if it is not ROW_TYPE
#define RETYPES 1
#else
#define WIRE_TYPE ROW_TYPE
#define RETYPES 0
#endif

#ifndef CARRIES
#define CARRIES 0  // 1: a float32 number of each entry (token, k) is returned beside the sum of its token
#endif

#ifndef BESIDE_PRODUCT
#define BESIDE_PRODUCT 0  // 1: runs beside the product that stores the experts' rows, in pieces of columns
#endif

namespace raymoe {

using Crossed = Crossing<ROW_TYPE, WIRE_TYPE>;

// The vectors of a piece are a multiple of this, so that it begins at a multiple of 16 bytes on the wire.
constexpr u32 PIECE_OF = Crossed::BYTES < 16 ? 16 / Crossed::BYTES : 1;

constexpr u32 PART_REDUCE = 1;  // sums of this rank's experts to the sources
constexpr u32 PART_SUM = 2;     // sums of the ranks' rows; the end of the run

// The parameters that both kernels of a combine read: the tensors of a call, and sizes. The struct ends without
// padding, as DispatchCall does.
struct CombineCall {
    Peers peers;
    Watch watch;

    const u8* expert_rows;   // [capacity][row_bytes]
    const u8* entry_places;  // of the dispatch: see DispatchCall
    const u32* masks;
    const DispatchSummary* summary;
    u8* y;  // [tokens][row_bytes]

    u64* trace;  // [blocks][TRACE_POINTS], zero before; null unless the build traces
    Operation* operation;
    RefusalRecord* record;

    u32 slot_tokens;  // T, of each source
    u32 tokens;       // T', rows of y
    u32 topk;
    u32 row_bytes;
    u32 weighted;
    u32 op;
    u32 site;  // of the call, such as a layer, below 2^29; 0: none
    u32 unused;

    // For thread k of a warp: the place of entry k of the token on this rank, and its weight. NOWHERE from topk on, or
    // if not `wanted`.
    __device__ __forceinline__ u64 entry(u32 source, u32 token, bool wanted = true) const {
        const u32 k = threadIdx.x % 32;
        const u64 first = (static_cast<u64>(source) * slot_tokens + token) * topk;
        return ptx::load_8_if(wanted && k < topk, entry_places + (first + k) * 8, NOWHERE);
    }
};

// The parameters of combine.cu. combine_ll.cu: peer/ll/sums_ll.cuh.
struct CombineParams : CombineCall {
    // Offsets in every rank's heap, for each parity. The parity is the epoch of combine mod 2.
    u64 rows[2];      // slots: the sum of rank d for token t of the owner, at (d * slot_tokens + t) * slot_bytes
    u64 statuses[2];  // a Refusal for each rank; all must be equal, and none may have a cause
    // Writer: a warp of rank d, at the rank that a piece went to, word (d, number of the piece): the epoch, after the
    // piece has arrived. Reader: the owner, with acquire. Any warp may take any piece, so words belong to pieces.
    u64 arrivals;
    // Writer: the local-reduction blocks of rank d, at every other rank, word (d, block): the epoch, after all pieces
    // of the block have arrived; also with nothing to push. Reader: the owner, with acquire.
    u64 done;
    // Writer: rank d, at every rank, its own too: the epoch, after its status. Reader: the owner, with acquire.
    u64 heads;

    // Items that warps of the local reduction have taken, then pieces that warps of the final one have taken, besides
    // the first two of each. Both are 0 again at the end of a run.
    u64* taken;

    // With BESIDE_PRODUCT the pieces of the experts' rows that are there, or null if a kernel before has all of them.
    // Pieces of this kernel are those of the product.
    const ColumnPieces* stored;

    // With CARRIES, else null.
    const u8* numbers;     // float[capacity]: the number of each place
    u8* returned_numbers;  // float[tokens][topk]: the numbers of this rank's entries, zero for one without an expert

    u32 wire_row_bytes;  // of a sum on the wire, a multiple of 16
    u32 slot_bytes;      // of a sum, the numbers after it, and with stamps a stamp for each of its pieces
    u32 parts;
    u32 local_blocks;    // of the local reduction: they sum this rank's experts' rows
    u32 local_warps;     // warps of each that reduce; each has stages in shared memory
    u32 together;        // pieces of a warp whose words share a fence, at most MOST_TOGETHER
    u32 final_blocks;    // of the final reduction: they add the ranks' sums
    u32 pieces;          // of a row; warps take pieces, so that few rows are work for many of them
    u32 arrival_stride;  // words of a rank
    // The tokens of each source that this launch combines: from 0, T of them. Where it combines some only,
    // `entry_places`, `masks` and `y` begin at `first_token`, and the kernel counts tokens from there. With CARRIES it
    // combines all.
    u32 first_token;
    u32 most_tokens;
    // Of the numbers in a slot, a multiple of 16; 0 without CARRIES. They are float[topk]: those of the entries whose
    // experts are on rank d, and zeros.
    u32 number_bytes;
    u32 stored_vectors;  // with BESIDE_PRODUCT, 16-byte vectors of a piece in `stored`; else 0
    u32 unused_too;

    __device__ __forceinline__ u32 reduction_warps() const { return local_blocks * local_warps; }

    __device__ __forceinline__ u8* slot_at(u32 peer, u32 parity, u32 rank, u32 token) const {
        return peers.slot(peer, rows[parity], static_cast<u64>(rank) * slot_tokens + token, slot_bytes);
    }

    __device__ __forceinline__ u64* arrival_at(u32 peer, u32 rank, u32 number) const {
        return reinterpret_cast<u64*>(
            peers.slot(peer, arrivals, static_cast<u64>(rank) * arrival_stride + number, 8));
    }

    __device__ __forceinline__ u64* done_at(u32 peer, u32 rank, u32 block) const {
        return reinterpret_cast<u64*>(peers.slot(peer, done, static_cast<u64>(rank) * MAX_DONE + block, 8));
    }

    __device__ __forceinline__ u8* status_at(u32 peer, u32 parity, u32 rank) const {
        return peers.slot(peer, statuses[parity], rank, sizeof(Refusal));
    }

    // The number of the piece that is the `at`-th to leave, where each rank has `count` tokens: all pieces of a token,
    // then those of the next. Beside a product the first pieces of all tokens leave first, as they become ready.
    __device__ __forceinline__ u32 number_at(u32 at, u32 count) const {
        return BESIDE_PRODUCT ? at % count * pieces + at / count : at;
    }

    __device__ __forceinline__ u32 vectors() const { return row_bytes / 16; }

    // 16-byte vectors of a piece; the last one may have fewer.
    __device__ __forceinline__ u32 piece_vectors() const {
        if constexpr (BESIDE_PRODUCT) {
            return stored_vectors;
        }
        return ((vectors() + pieces - 1) / pieces + PIECE_OF - 1) / PIECE_OF * PIECE_OF;
    }

    // Prefetches to the L2 cache all that the warp will load of experts' rows for a piece: the warp's own loads in
    // flight are only a step of two rows. All threads of the warp call this before they sum the piece.
    __device__ __forceinline__ void prefetch(u64 entry, u32 begin, u32 last) const {
        const u32 place = static_cast<u32>(entry);
        const u8* row = expert_rows + static_cast<u64>(place) * row_bytes;
        ptx::prefetch_if(place != NOWHERE && begin < last, row + begin * 16ull, (last - begin) * 16);
    }

    // The offset of a piece's stamp in a slot.
    __device__ __forceinline__ u64 stamp_at(u32 piece) const {
        return wire_row_bytes + number_bytes + static_cast<u64>(piece) * STAMP_BYTES;
    }

    // For thread k of a warp: the bits of the number at the place of `entry`; zero if it is NOWHERE.
    __device__ __forceinline__ u32 number_of(u64 entry) const {
        const u32 place = static_cast<u32>(entry);
        return ptx::load_4_if(place != NOWHERE, numbers + place * 4ull, 0);
    }
};

// The piece that a warp has awaited last. It takes pieces in ascending order.
class StoredPieces {
  public:
    // Waits until the product beside this kernel has stored this piece. Returns false if the wait failed. All threads
    // of the warp call this.
    __device__ __forceinline__ bool await(const CombineParams& p, u32 piece) {
        if (!BESIDE_PRODUCT || p.stored == nullptr || piece == known_) {
            return true;
        }
        bool ok = true;
        if (threadIdx.x % 32 == 0) {
            const u64 number = ptx::load_8(&p.summary->number);
            ok = wait_for_epoch(&p.stored->ready[piece], number, Waiting{p.op, p.peers.rank, number}, p.watch);
        }
        ok = __all_sync(0xFFFFFFFF, ok);
        __syncwarp();  // hands what was acquired to the other threads of the warp
        known_ = piece;
        return ok;
    }

  private:
    u32 known_ = ~0u;
};

// The state that every block of a combine reads first.
struct CombineRun {
    u64 epoch;
    bool may;  // the workspace is not poisoned
};

// Loads that state, as `DispatchBeginning` does.
class CombineBeginning {
  public:
    __device__ __forceinline__ explicit CombineBeginning(const CombineCall& p) {
        const bool first = threadIdx.x == 0;
        if (first) {
            trace(p.trace, AT_START);
        }
        before_.load(first, p.operation, p.watch);
    }

    // All threads of the block call this.
    __device__ __forceinline__ CombineRun run() const {
        __shared__ CombineRun run;
        if (threadIdx.x == 0) {
            run = {before_.epoch + 1, before_.poison == 0};
        }
        __syncthreads();
        return run;
    }

  private:
    Before before_;
};

// Fills rows `first`, `first` + `stride`, ... of y with NaN. All threads of the warp call this.
template <class Type>
__device__ inline void fill_with_nan(const CombineCall& p, u32 first, u32 stride) {
    for (u32 token = first; token < p.tokens; token += stride) {
        for (u64 at = threadIdx.x % 32 * 16; at < p.row_bytes; at += 32 * 16) {
            ptx::store_16(p.y + static_cast<u64>(token) * p.row_bytes + at, {Type::NANS, Type::NANS});
        }
    }
}

// This rank's status for a combine, from what its dispatch left. Every rank compares the statuses of all ranks, so all
// reach the same verdict. No rank reads sums if one rank refuses, if two ranks combine different dispatches, or if only
// some apply weights or send numbers, or if they call from different sites.
__device__ __forceinline__ ptx::Bytes16 status_of(const CombineCall& p, const ptx::Bytes16& left) {
    const bool refuses = static_cast<u32>(left.low) != CAUSE_NONE;
    return {refuses ? left.low : static_cast<u64>(p.weighted | CARRIES << 1 | p.site << SITE_SHIFT) << 32, left.high};
}

__device__ __forceinline__ bool is_refused(const ptx::Bytes16& mine, const ptx::Bytes16& other) {
    return static_cast<u32>(mine.low) != CAUSE_NONE || other.low != mine.low || other.high != mine.high;
}

}  // namespace raymoe
