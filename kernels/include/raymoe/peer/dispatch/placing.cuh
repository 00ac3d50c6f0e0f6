// The placement blocks of a dispatch copy rows from slots to their places, expert by expert, while other rows are on
// the way.
//
// From the counts of all sources every placement block knows where each source's entries of each expert begin. An
// entry's place is that plus its number among its source's entries. The first thread of a placement warp drives a ring.
// Warp q takes the tokens q, q + warps, ... of every source; the block's threads compute the places of its rows ahead.
//
// Each thread of a placement warp looks at the word of the next row of one source. The warp loads a row that has
// arrived, of any source, once and stores it to all its places. So a late row delays no row of another source. Warps
// that took the sources in turn needed 268 us instead of 263 for a dispatch of 4096 tokens (8-bit floats, 4x H200,
// 2026-11-22). The last rows of all sources come together. Rows of this rank itself come out of x and wait for nothing:
// a warp moves one whenever no row of a peer has arrived.
//
// In a build with CHUNKED_ROWS a row of this rank itself waits for its chunk (chunks.cuh), as a row of a peer waits for
// its word.
//
// With layout rank rows stay in their slots. The placement blocks only store the index, and copy own rows into their
// slots.
//
// If the routing is known (KNOWN), the places are those that an earlier dispatch has left in `entry_places`. A warp
// then waits for no counts, only for its rows. Rows go to their places with layout rank too, because slots change with
// the parity.
#pragma once

#include "raymoe/peer/dispatch/chunks.cuh"
#include "raymoe/peer/dispatch/dispatch.cuh"
#include "raymoe/peer/dispatch/known_places.cuh"
#include "raymoe/peer/dispatch/quantising.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/peer/dispatch/sending.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

constexpr u32 PLAN_BYTES = 32768;  // of places that are computed at a time; 4 bytes each
constexpr u32 QUEUE = 16;          // rows in a warp's ring, at most
constexpr u32 QUEUES_BYTES = WARPS * QUEUE * 4;

// The places of the rows of the window: [number][warp][step][k], the places of a row first, then ~0. The last step is
// this rank itself.
struct Plan {
    u32* places;
    u32 warps;
    u32 ranks;
    u32 topk;

    __device__ __forceinline__ u32* of(u32 number, u32 warp, u32 step) const {
        return places + ((number * warps + warp) * ranks + step) * topk;
    }
};

class PlacementWarp {
  public:
    // A ring; if rows are dequantised, also a stage for that.
    static __device__ __forceinline__ u32 memory(const DispatchParams& p) {
        return ring_memory(p.placement_stages, p.slot_bytes) + (dequantises(p) ? (p.row_bytes + 127) & ~127u : 0);
    }

    // `queue`: QUEUE words of shared memory.
    __device__ PlacementWarp(const DispatchParams& p, u64 epoch, u32 block, u32* queue, u8* memory, bool drives)
        : p_(p), epoch_(epoch), warp_(threadIdx.x / 32), first_token_(warp_ * p.placement_blocks + block),
          parity_(epoch & 1),
          leads_(thread() == 0), queue_(queue),
          whole_(ptx::shared_address(memory) + ring_memory(p.placement_stages, p.slot_bytes)),
          ring_(memory, p.placement_stages, p.slot_bytes, drives && leads_), x_(p) {}

    // Moves the warp's tokens number `first` to `first + count - 1` of every source. All threads of the warp call this.
    // Returns false if a wait failed.
    __device__ __forceinline__ bool run(const Plan& plan, u32 first, u32 count) {
        plan_ = plan;
        first_ = first;
        count_ = count;
        next_remote_ = next_own_ = 0;
        bool ok = true;
        u32 act;
        do {
            const Remote remote = look(ok);
            act = __shfl_sync(0xFFFFFFFF, leads_ ? step(remote, ok) : 0, 0);
            if (act & REMOTE) {
                next_remote_ += thread() == remote.step;
            }
            __syncwarp();
            if (act & STORE) {
                ok = store() && ok;
            } else if (act & WAIT) {
                ok = wait();
            }
        } while (!(act & END));
        return __shfl_sync(0xFFFFFFFF, ok, 0);
    }

    // Waits until every row is in its place.
    __device__ __forceinline__ void finish() {
        if (leads_) {
            ring_.drain();
        }
    }

  private:
    // The result of a step: whether it has begun to load a row of a peer, and the warp's next action.
    static constexpr u32 REMOTE = 1, STORE = 2, WAIT = 4, END = 8;
    static constexpr bool READS_STAGES = FP8 || STAMPS;  // by ordinary loads of all threads

    // The state of the rows that come through slots.
    struct Remote {
        bool any;      // any are left
        bool arrived;  // one has arrived: the next row of the source below
        u32 step;      // of the source
        u32 number;    // of the warp's tokens of that source
    };

    // With layout rank rows stay quantised, and no scales are stored.
    static __device__ __forceinline__ bool dequantises(const DispatchParams& p) {
        return FP8 && !p.rank_layout && p.scales == nullptr;
    }

    static __device__ __forceinline__ u32 thread() { return threadIdx.x % 32; }

    // Looks for a row that has arrived, unless a wait has failed. All threads of the warp call this; each of the first
    // threads looks at one source.
    __device__ __forceinline__ Remote look(bool ok) {
        while (thread() < p_.ranks_through_slots() && next_remote_ < count_ &&
               *plan_.of(next_remote_, warp_, thread()) == NOWHERE) {
            ++next_remote_;
        }
        left_ = ok && thread() < p_.ranks_through_slots() && next_remote_ < count_;
        const u32 there = __ballot_sync(0xFFFFFFFF, left_ && arrived());
        if (there == 0) {
            return {__any_sync(0xFFFFFFFF, left_) != 0, false, 0, 0};
        }
        const u32 step = __ffs(there) - 1, number = __shfl_sync(0xFFFFFFFF, next_remote_, step);
        __syncwarp();  // hands what a thread has acquired to the one that leads
        return {true, true, step, number};
    }

    // Decides the next action, and begins loads itself. The leading thread calls this. A load always has room, because
    // the step before returns STORE if there would be none. If a wait has failed, `ok` is false.
    __device__ __forceinline__ u32 step(const Remote& remote, bool ok) {
        const u32 own = p_.ranks_through_slots();  // the step of this rank itself
        while (OWN_FROM_X && next_own_ < count_ && *plan_.of(next_own_, warp_, own) == NOWHERE) {
            ++next_own_;
        }
        const bool own_left = OWN_FROM_X && next_own_ < count_ && (!CHUNKED || ok);
        const bool own_there = own_left && x_.there(token_of(next_own_));
        if (remote.arrived || own_there) {
            if (remote.arrived) {
                load_remote(remote.number, remote.step);
            } else {
                const u8* row = p_.x + static_cast<u64>(token_of(next_own_)) * p_.row_bytes;
                load({row, p_.row_bytes}, plan_.of(next_own_, warp_, own));
                ++next_own_;
            }
            return (remote.arrived ? REMOTE : 0) | (ring_.can_load() && !ring_.loaded() ? 0 : STORE);
        }
        if (ring_.any_loading()) {
            return STORE;
        }
        if (remote.any || (CHUNKED && own_left)) {
            return WAIT;
        }
        ring_.settle();
        return END;
    }

    __device__ __forceinline__ u32 token_of(u32 number) const {
        return first_token_ + (first_ + number) * p_.placement_blocks * p_.placement_warps;
    }

    __device__ __forceinline__ const u64* word(u32 number, u32 step) const {
        return p_.arrival_at(p_.peers.rank, p_.peers.in_turn(step), token_of(number));
    }

    // Whether this thread's next row has arrived. There must be one.
    __device__ __forceinline__ bool arrived() const {
        return p_.at_once || ptx::load_acquire_sys(word(next_remote_, thread())) >= epoch_;
    }

    // Waits until the next row of one of the sources has arrived, or this rank's own next row is there. All threads of
    // the warp call this. Returns false if a wait failed.
    __device__ __forceinline__ bool wait() const {
        __shared__ u32 any[WARPS];  // of each warp: 1 if a row has arrived
        const u32 found = ptx::shared_address(any + warp_);
        if (leads_) {
            ptx::shared_store_4(found, 0);
        }
        __syncwarp();
        bool ok = true;
#if CHUNKED_ROWS
        const u32 own = __shfl_sync(0xFFFFFFFF, next_own_, 0);  // only the leading thread counts own rows
        // The thread after the sources' threads waits for this rank's own row.
        const bool for_own = OWN_FROM_X && own < count_ && thread() == p_.ranks_through_slots();
        const u64* at = for_own ? x_.word(token_of(own)) : word(next_remote_, thread());
        const u64 wanted = for_own ? x_.crossing() : epoch_;
        const Waiting who = for_own ? x_.waiting() : Waiting{p_.op, p_.peers.in_turn(thread()), epoch_};
        if (left_ || for_own) {
            auto look = [&](u64& seen) {
                seen = ptx::load_acquire_sys(at);
                if (seen >= wanted) {
                    ptx::shared_store_4(found, 1);
                }
                return ptx::shared_load_4(found) != 0;
            };
            ok = wait_until(look, wanted, who, p_.watch);
        }
#else
        if (left_) {
            const u32 step = thread();
            auto look = [&](u64& seen) {
                seen = ptx::load_acquire_sys(word(next_remote_, step));
                if (seen >= epoch_) {
                    ptx::shared_store_4(found, 1);
                }
                return ptx::shared_load_4(found) != 0;
            };
            ok = wait_until(look, epoch_, Waiting{p_.op, p_.peers.in_turn(step), epoch_}, p_.watch);
        }
#endif
        return __all_sync(0xFFFFFFFF, ok);
    }

    __device__ __forceinline__ void load_remote(u32 number, u32 step) {
        ptx::fence_proxy_async();  // orders the word that was acquired before the bulk load of what it announces
        const u8* slot = p_.slot_at(p_.peers.rank, parity_, p_.peers.in_turn(step), token_of(number));
        trace_first(p_.trace, AT_FIRST_ROW);
        trace(p_.trace, AT_LAST_ROW);
        load({slot, p_.slot_bytes}, plan_.of(number, warp_, step));
    }

    __device__ __forceinline__ void load(const Chunk& row, const u32* places) {
        ring_.load(row);
        queue_[loads_++ % QUEUE] = static_cast<u32>(places - plan_.places);
    }

    // Stores the oldest row of the ring to all its places. All threads of the warp call this. Returns false if the slot
    // holds the row of another epoch.
    __device__ __forceinline__ bool store() {
        const u32 row = __shfl_sync(0xFFFFFFFF, leads_ ? ring_.await() : 0, 0);
        if (READS_STAGES) {
            __syncwarp();  // hands the row, which one thread has awaited, to the others; a shuffle orders no memory
        }
        const u32 at = queue_[stores_++ % QUEUE];
        const u32* places = plan_.places + at;
        const u32 step = at / p_.topk % p_.peers.ranks;
        if (STAMPS && step < p_.ranks_through_slots()) {
            const u64 seen = ptx::shared_load_8(row + p_.slot_bytes - STAMP_BYTES);
            if (seen != epoch_) {
                fail(p_.watch, FAILURE_STALE, Waiting{p_.op, p_.peers.in_turn(step), epoch_}, epoch_, seen, 0);
                give_back();
                return false;
            }
        }
        u32 from = row;
        if (dequantises(p_)) {
            from = whole_;
            if (leads_) {
                ptx::bulk_wait_read<0>();  // the previous row has been read out of this stage
            }
            __syncwarp();
            dequantise<ROW_TYPE>(row, whole_, p_.hidden);
            ptx::fence_proxy_async_shared();  // orders this thread's stores before the bulk stores out of the stage
            __syncwarp();
        }
        for (u32 k = 0; k < p_.topk && places[k] != NOWHERE; ++k) {
            if (leads_) {
                ptx::bulk_store(p_.place_at(places[k]), from, p_.out_row_bytes);
            }
            if (FP8 && p_.scales != nullptr) {
                store_scales(row, places[k]);
            }
        }
        give_back();
        return true;
    }

    // Frees the oldest stage of the ring after all of its bulk stores have been issued. All threads of the warp call
    // this.
    __device__ __forceinline__ void give_back() {
        if (READS_STAGES) {
            // Orders this warp's ordinary loads of the row before the bulk load that fills its stage again.
            ptx::fence_proxy_async_shared();
            __syncwarp();
        }
        if (leads_) {
            ring_.stored();
        }
    }

    __device__ __forceinline__ void store_scales(u32 row, u32 place) {
        for (u32 block = thread(); block < p_.blocks(); block += 32) {
            const u64 at = static_cast<u64>(block) * p_.scale_stride + place;
            ptx::store_4(p_.scales + at * 4, ptx::shared_load_4(row + p_.hidden + block * 4));
        }
    }

    const DispatchParams& p_;
    u64 epoch_;
    u32 warp_;
    u32 first_token_;
    u32 parity_;
    bool leads_;
    u32* queue_;  // where in the plan the places of the rows in the ring begin
    u32 whole_;   // the stage in which rows are dequantised
    Ring ring_;
    Plan plan_{};
    u32 first_ = 0;
    u32 count_ = 0;
    u32 next_remote_ = 0;  // next row of this thread's source
    bool left_ = false;    // there is such a row
    u32 next_own_ = 0;
    RowsOfX x_;  // of the leading thread
    u32 loads_ = 0;
    u32 stores_ = 0;
};

}  // namespace raymoe
