// Rows that a warp adds come by asynchronous copies into shared memory, for builds with FED_ROWS: combines on few SMs.
//
// On few SMs the loads in flight limit a combine. A warp that adds rows out of registers has a step of two rows in
// flight, and only while it waits for them. With a feed it always has as many steps of rows in flight as there are
// slots: the loads of later rows, and of its next piece, go on while it adds.
//
// Each thread copies, and later reads, its own vectors of a row only. So no barrier and no fence stands between the
// copy, the reads and the next copy into a slot:
//   copy -> reads   cp.async.wait_group of the thread that copied
//   reads -> copy   the same thread, in its program order
//   word -> copy    of another rank's sum: acquire of a thread for each rank; __syncwarp; copies, which are ordinary
//                   accesses: cp.async is of the generic proxy, so no proxy fence is needed
//
// Rows are copied in the order in which the warp adds them:
//   of each piece, of each step   the experts' rows, in the order of k; in the final reduction then the sums of the
//                                 other ranks, in rank order
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/piece_arrivals.cuh"
#include "raymoe/peer/combine/sum_stages.cuh"

namespace raymoe {

// Slots of a warp, a step of a row in each. raymoe/exchange/peer/combine.py computes the memory of both.
constexpr u32 LOCAL_SLOTS = 5, FINAL_SLOTS = 6;
constexpr u32 SLOT_BYTES = STEP * 16;
constexpr u32 FED_WARP_BYTES = LOCAL_SLOTS * SLOT_BYTES + STEPS_UNDER_WAY * (SLOT_BYTES + STAMP_BYTES);
static_assert(Crossed::BYTES == 16, "slots hold experts' rows and sums");
static_assert((FINAL_SLOTS + 1) * SLOT_BYTES <= FED_WARP_BYTES, "a final reduction has a slot for its own sum too");

// A piece whose rows a warp adds.
struct FedPiece {
    u64 entry = NOWHERE;  // entry k of the piece's token, in thread k
    u32 hits = 0;         // bit k: the row of entry k is added
    u32 ranks = 0;        // bit r: the sum of rank r is added too; in the local reduction none
    u32 number = 0;
    u32 begin = 0;  // its vectors in a row
    u32 last = 0;

    __device__ __forceinline__ bool has_rows() const { return begin < last && (hits | ranks) != 0; }
};

// Adds this thread's vectors of a step in shared memory, times `weight`, to `sums`. Where a step has fewer vectors the
// others are old, and their sums are not used.
template <class Type>
__device__ __forceinline__ void add_vectors(u32 at, float weight, float (*sums)[Type::COUNT]) {
    ptx::Bytes16 loaded[UNROLL];
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        loaded[i] = ptx::shared_load_16(at + i * 512);
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        float values[Type::COUNT];
        Type::unpack(loaded[i], values);
#pragma unroll
        for (u32 j = 0; j < Type::COUNT; ++j) {
            sums[i][j] += weight * values[j];
        }
    }
}

// Copies the rows of pieces, one piece ahead of the one that is added. All threads of a warp call its functions.
// With SUMS also the sums of other ranks.
template <u32 SLOTS, bool SUMS>
class RowFeed {
  public:
    __device__ RowFeed(const CombineParams& p, u32 memory) : p_(p), memory_(memory + threadIdx.x % 32 * 16) {}

    __device__ __forceinline__ void begin(u64 epoch) { epoch_ = epoch; }

    // Names the piece that is added after those named before. Of these, all but the last one have been added. Returns
    // false if a wait for the words of its sums has failed.
    __device__ __forceinline__ bool follow(const FedPiece& piece) {
        if (piece.has_rows()) {
            if (pending_) {
                begin_pending();
            }
            next_ = piece;
            pending_ = true;
            p_.prefetch(piece.entry, piece.begin, piece.last);
            fill();
        }
        return ok_;
    }

    // Adds the next row, times `weight`, to `sums`, and begins to copy another one into its slot.
    template <class Type>
    __device__ __forceinline__ bool add(float weight, float (*sums)[Type::COUNT]) {
        if (copies_ == 0) {
            return false;  // a wait failed, so the row was not copied
        }
        wait_for_oldest();
        const u32 slot = memory_ + adding_ * SLOT_BYTES;
        adding_ = adding_ + 1 == SLOTS ? 0 : adding_ + 1;
        add_vectors<Type>(slot, weight, sums);
        --copies_;
        fill();
        return true;
    }

    // Adds the experts' rows of a step, in the order of k. Returns false if a wait failed.
    template <class Type>
    __device__ __forceinline__ bool add_experts(const FedPiece& piece, float (*sums)[Type::COUNT]) {
        bool ok = true;
        for (u32 hits = piece.hits; ok && hits != 0; hits &= hits - 1) {
            const u64 chosen = __shfl_sync(0xFFFFFFFF, piece.entry, __ffs(hits) - 1);
            ok = add<Type>(p_.weighted ? __uint_as_float(static_cast<u32>(chosen >> 32)) : 1.0f, sums);
        }
        return ok;
    }

    // Waits for all copies: a block does not end before them.
    __device__ __forceinline__ void drain() const { ptx::copies_wait<0>(); }

  private:
    // Copies rows while there are slots and rows.
    __device__ __forceinline__ void fill() {
        while (copies_ != SLOTS && ok_) {
            const u32 vectors = min(step_ + STEP, piece_.last) - step_;
            if (hits_left_ != 0) {
                const u32 place = static_cast<u32>(__shfl_sync(0xFFFFFFFF, piece_.entry, __ffs(hits_left_) - 1));
                hits_left_ &= hits_left_ - 1;
                copy(p_.expert_rows + static_cast<u64>(place) * p_.row_bytes, vectors);
            } else if (SUMS && ranks_left_ != 0) {
                if (!arrived_) {
                    ok_ = PieceArrivals(p_, epoch_).await(piece_.number, piece_.ranks);
                    arrived_ = true;
                    continue;
                }
                const u32 rank = __ffs(ranks_left_) - 1;
                ranks_left_ &= ranks_left_ - 1;
                copy(p_.slot_at(p_.peers.rank, epoch_ & 1, rank, piece_.number / p_.pieces), vectors);
            } else if (step_ + STEP < piece_.last) {
                step_ += STEP;
                begin_step();
            } else if (pending_) {
                begin_pending();
            } else {
                return;
            }
        }
    }

    __device__ __forceinline__ void copy(const u8* row, u32 vectors) {
        const u32 slot = memory_ + copying_ * SLOT_BYTES, thread = threadIdx.x % 32;
        copying_ = copying_ + 1 == SLOTS ? 0 : copying_ + 1;
        const u8* from = row + (step_ + thread) * 16ull;
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            ptx::copy_16_if(thread + 32 * i < vectors, slot + i * 512, from + i * 512);
        }
        ptx::copies_commit();
        ++copies_;
    }

    // Waits for the oldest of `copies_`. The instruction takes a constant only.
    __device__ __forceinline__ void wait_for_oldest() const {
        switch (copies_) {
            case 1: ptx::copies_wait<0>(); break;
            case 2: ptx::copies_wait<1>(); break;
            case 3: ptx::copies_wait<2>(); break;
            case 4: ptx::copies_wait<3>(); break;
            case 5: ptx::copies_wait<4>(); break;
            case 6: ptx::copies_wait<5>(); break;
            default: ptx::copies_wait<6>();
        }
    }

    __device__ __forceinline__ void begin_pending() {
        piece_ = next_;
        pending_ = false;
        step_ = piece_.begin;
        arrived_ = false;
        begin_step();
    }

    __device__ __forceinline__ void begin_step() {
        hits_left_ = piece_.hits;
        ranks_left_ = piece_.ranks;
    }

    const CombineParams& p_;
    u32 memory_;  // of this thread's vectors in the first slot
    u64 epoch_ = 0;
    FedPiece piece_;  // whose rows are copied
    FedPiece next_;
    bool pending_ = false;  // there is a next one, of which nothing is copied yet
    bool arrived_ = false;  // the sums of other ranks of the piece may be copied
    bool ok_ = true;        // no wait has failed
    u32 step_ = 0;          // the step whose rows are copied
    u32 hits_left_ = 0;     // its rows that are not copied yet
    u32 ranks_left_ = 0;
    u32 copies_ = 0;   // slots that are copied into and not read yet
    u32 copying_ = 0;  // the next slot to copy into
    u32 adding_ = 0;   // the oldest one
};

}  // namespace raymoe
