// Rows that a warp adds come by bulk loads into stages in shared memory, for builds with STAGED_ROWS.
//
// On few SMs the loads in flight limit a combine. A warp that adds rows out of registers has two rows in flight. With
// stages it has as many steps of rows as there are stages, and the loads of its next piece begin while it adds this one.
//
// A warp's first thread begins the loads, in the order in which the warp reads the rows:
//   of each piece, of each step   the experts' rows, in the order of k; in the final reduction also the sums of the
//                                 other ranks, in rank order
// Each stage has a barrier with one arrival, that of the first thread with the bytes. All threads wait for its phase.
// A thread sees only the parity of a phase. It never waits two phases ahead: a stage is loaded again only after all
// threads of the warp have read it.
//
// Order, at each place where a stage changes hands:
//   load -> reads     each thread's wait for the barrier acquires the bytes that completed it
//   reads -> load     fence.proxy.async of each reading thread, __syncwarp, bulk load of the first thread: a bulk load
//                     is of the other proxy, so a barrier alone does not order it after ordinary reads
//   word -> load      of another rank's sum: acquire of a thread for each rank; __syncwarp; the first thread:
//                     fence.proxy.async, bulk load of the slot
// A warp reads all that it has loaded before it ends, also if a wait failed: a block must not end before its loads.
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/sum_stages.cuh"

namespace raymoe {

// A warp's stages, read in the order in which they are loaded. All threads of the warp call its functions.
class RowStages {
  public:
    // `memory` holds `stages` stages of `bytes`, and a barrier of 8 bytes for each.
    __device__ RowStages(u32 memory, u32 stages, u32 bytes)
        : memory_(memory), stages_(stages), bytes_(bytes), leads_(threadIdx.x % 32 == 0) {
        if (leads_) {
            for (u32 stage = 0; stage < stages; ++stage) {
                ptx::barrier_init(barrier(stage), 1);
            }
            ptx::fence_barrier_init();  // orders the inits before the bulk loads that complete on them
        }
        __syncwarp();  // hands the initialised barriers to all threads
    }

    __device__ __forceinline__ bool can_load() const { return loads_ != stages_; }

    __device__ __forceinline__ bool any_loaded() const { return loads_ != 0; }

    __device__ __forceinline__ void load(const u8* from, u32 bytes) {
        if (leads_) {
            ptx::barrier_expect(barrier(loading_), bytes);
            ptx::bulk_load(memory_ + loading_ * bytes_, from, bytes, barrier(loading_));
        }
        loading_ = loading_ + 1 == stages_ ? 0 : loading_ + 1;
        ++loads_;
    }

    // Waits for the oldest load; returns its shared address.
    __device__ __forceinline__ u32 await() const {
        while (!ptx::barrier_try_wait(barrier(reading_), parity_)) {
        }
        return memory_ + reading_ * bytes_;
    }

    // This thread has read the oldest stage.
    __device__ __forceinline__ void give_back() {
        ptx::fence_proxy_async_shared();  // orders this thread's reads of the stage before the next bulk load into it
        __syncwarp();                     // all threads of the warp have read it
        if (++reading_ == stages_) {
            reading_ = 0;
            parity_ ^= 1;
        }
        --loads_;
    }

  private:
    __device__ __forceinline__ u32 barrier(u32 stage) const { return memory_ + stages_ * bytes_ + stage * 8; }

    u32 memory_;
    u32 stages_;
    u32 bytes_;
    bool leads_;
    u32 loads_ = 0;    // stages that are loaded and not given back
    u32 loading_ = 0;  // the next stage to load
    u32 reading_ = 0;  // the oldest one
    u32 parity_ = 0;   // of the phase of its barrier
};

// A piece whose rows a warp adds.
struct StagedPiece {
    u64 entry = NOWHERE;  // entry k of the piece's token, in thread k
    u32 hits = 0;         // bit k: the row of entry k is added
    u32 ranks = 0;        // bit r: the sum of rank r is added too; in the local reduction none
    u32 number = 0;
    u32 begin = 0;  // its vectors in a row
    u32 last = 0;

    __device__ __forceinline__ bool has_rows() const { return begin < last && (hits | ranks) != 0; }
};

// The bytes of a stage: a step of an expert's row, or of a sum.
constexpr u32 STAGE_BYTES = STEP * (Crossed::BYTES > 16 ? Crossed::BYTES : 16);

// Loads the rows of pieces, one piece ahead of the one that is added. With SUMS also the sums of other ranks. All
// threads of the warp call its functions.
template <bool SUMS>
class RowFeed {
  public:
    __device__ RowFeed(const CombineParams& p, u32 memory)
        : p_(p), stages_(memory, p.stages, STAGE_BYTES), leads_(threadIdx.x % 32 == 0) {}

    __device__ __forceinline__ void begin(u64 epoch) { epoch_ = epoch; }

    // Names the piece that is added after those named before. Of these, all but the last one have been added.
    __device__ __forceinline__ void follow(const StagedPiece& piece) {
        if (!piece.has_rows()) {
            return;
        }
        if (pending_) {
            begin_pending();
        }
        next_ = piece;
        pending_ = true;
        feed();
    }

    // Whether the sums of other ranks that belong to this piece may be loaded. If not, a wait for their words and
    // `arrived` must follow. The piece is the one that is added.
    __device__ __forceinline__ bool has_words(u32 number) const { return arrived_ || piece_.number != number; }

    // The words of the piece that is added have come: each thread has acquired the one of its rank.
    __device__ __forceinline__ void arrived() {
        hand_words_over();
        feed();
    }

    // Waits for the next row; returns its shared address. `take` follows.
    __device__ __forceinline__ u32 await() const { return stages_.await(); }

    // This thread has read the row.
    __device__ __forceinline__ void take() {
        stages_.give_back();
        feed();
    }

    // Waits for all rows that are still loading, after a wait that failed.
    __device__ __forceinline__ void drain() {
        while (stages_.any_loaded()) {
            stages_.await();
            stages_.give_back();
        }
    }

  private:
    // Loads rows while there are stages and rows, and words if they are needed.
    __device__ __forceinline__ void feed() {
        while (stages_.can_load()) {
            const u32 vectors = min(step_ + STEP, piece_.last) - step_;
            if (hits_left_ != 0) {
                const u32 place = static_cast<u32>(__shfl_sync(0xFFFFFFFF, piece_.entry, __ffs(hits_left_) - 1));
                hits_left_ &= hits_left_ - 1;
                stages_.load(p_.expert_rows + static_cast<u64>(place) * p_.row_bytes + step_ * 16ull, vectors * 16);
            } else if (SUMS && ranks_left_ != 0) {
                // A look takes a trip to memory, for which the warp waits. So it looks once, when the piece is added: it
                // is then if another one is named.
                if (!arrived_ && (looked_ || !pending_ || !look())) {
                    return;
                }
                const u32 rank = __ffs(ranks_left_) - 1;
                ranks_left_ &= ranks_left_ - 1;
                const u8* slot = p_.slot_at(p_.peers.rank, epoch_ & 1, rank, piece_.number / p_.pieces);
                stages_.load(slot + static_cast<u64>(step_) * Crossed::BYTES, (vectors * Crossed::BYTES + 15) & ~15u);
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

    __device__ __forceinline__ void begin_pending() {
        piece_ = next_;
        pending_ = false;
        step_ = piece_.begin;
        arrived_ = piece_.ranks == 0;
        looked_ = false;
        begin_step();
    }

    __device__ __forceinline__ void begin_step() {
        hits_left_ = piece_.hits;
        ranks_left_ = piece_.ranks;
    }

    // Looks once whether the piece has arrived from all its ranks, a thread for each.
    __device__ __forceinline__ bool look() {
        looked_ = true;
        const u32 rank = threadIdx.x % 32;
        const bool waits = piece_.ranks >> rank & 1;
        const bool there =
            !waits || ptx::load_acquire_sys(p_.arrival_at(p_.peers.rank, rank, piece_.number)) >= epoch_;
        if (!__all_sync(0xFFFFFFFF, there)) {
            return false;
        }
        hand_words_over();
        return true;
    }

    __device__ __forceinline__ void hand_words_over() {
        __syncwarp();  // hands what the threads have acquired to the one that loads
        if (leads_) {
            ptx::fence_proxy_async();  // orders the words before the bulk loads of what they announce
        }
        arrived_ = true;
    }

    const CombineParams& p_;
    RowStages stages_;
    bool leads_;
    u64 epoch_ = 0;
    StagedPiece piece_;  // whose rows are loaded
    StagedPiece next_;
    bool pending_ = false;  // there is a next one, of which nothing is loaded yet
    bool arrived_ = true;   // the sums of other ranks of the piece may be loaded
    bool looked_ = false;   // the warp has looked for its words
    u32 step_ = 0;          // the step whose rows are loaded
    u32 hits_left_ = 0;     // its rows that are not loaded yet
    u32 ranks_left_ = 0;
};

// The float of a weighted row: the weight of entry k.
__device__ __forceinline__ float weight_of_entry(const CombineCall& p, u64 entry, u32 k) {
    const u64 chosen = __shfl_sync(0xFFFFFFFF, entry, k);
    return p.weighted ? __uint_as_float(static_cast<u32>(chosen >> 32)) : 1.0f;
}

// Shared memory of a warp: stages for sums, stages for rows and their barriers. raymoe/exchange/peer/combine.py computes
// the same sum.
__device__ __forceinline__ u32 leaving_memory() { return STEPS_UNDER_WAY * SumStages::bytes(STAGE_BYTES); }

__device__ __forceinline__ u32 staged_memory(const CombineCall& p) {
    return (leaving_memory() + p.stages * (STAGE_BYTES + 8) + 127) & ~127u;
}

// Adds the row at `row` in shared memory, times `weight`, to `sums`: the vectors `thread` + 32 * i that are below
// `vectors`. All threads of the warp call this.
template <class Vector>
__device__ __forceinline__ void add_row(u32 row, float weight, u32 vectors, float (*sums)[Vector::COUNT]) {
    const u32 thread = threadIdx.x % 32;
    Vector loaded[UNROLL];
    if (vectors == STEP) {  // without branches, so that the loads overlap
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            loaded[i] = Vector::shared_load(row + (thread + 32 * i) * Vector::BYTES);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (thread + 32 * i < vectors) {
                loaded[i] = Vector::shared_load(row + (thread + 32 * i) * Vector::BYTES);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
        float values[Vector::COUNT];
        loaded[i].unpack(values);
#pragma unroll
        for (u32 j = 0; j < Vector::COUNT; ++j) {
            sums[i][j] += weight * values[j];
        }
    }
}

// Adds the experts' rows of a step of `vectors` vectors, in the order of k. All threads of the warp call this.
template <class Type, class Feed>
__device__ __forceinline__ void add_staged_experts(const CombineCall& p, Feed& feed, const StagedPiece& piece,
                                                   u32 vectors, float (*sums)[Type::COUNT]) {
    for (u32 hits = piece.hits; hits != 0; hits &= hits - 1) {
        const float weight = weight_of_entry(p, piece.entry, __ffs(hits) - 1);
        add_row<Crossing<Type, Type>>(feed.await(), weight, vectors, sums);
        feed.take();
    }
}

}  // namespace raymoe
