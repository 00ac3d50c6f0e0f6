// The senders of a dispatch: rows out of x into the slots of every rank that has an expert of the token.
//
// A lane is a warp, whose first thread drives a ring of its own. Lane l takes the tokens l, l + lanes, ...; a row is
// loaded once and stored to up to all ranks. Nothing needs to be counted first: the slot of a row is its token's
// number. Two lanes on a multiprocessor keep the link busy while one of them waits for its stores before a word of
// progress.
#pragma once

#include "raymoe/dispatch.cuh"
#include "raymoe/ring.cuh"

namespace raymoe {

constexpr u32 MASK_WINDOW = 4096;  // tokens of a block whose destinations are worked out at a time; 2 bytes each
constexpr u32 MASK_BYTES = MASK_WINDOW * 2;

// Rows whose stores may be under way while older ones are announced. Waiting for all of them would drain the lane.
constexpr u32 YOUNGER = 2;

// The words of progress of a lane; by the thread that pushes its rows.
class Announcing {
  public:
    __device__ Announcing(const DispatchParams& p, u64 epoch, u32 lane) : p_(p), epoch_(epoch), lane_(lane) {}

    // A row's stores have been committed, as one group.
    __device__ __forceinline__ void pushed() { ++groups_; }

    // So many of the lane's tokens have been pushed. The word of a chunk follows when YOUNGER more rows have been, so
    // that the wait is a short one.
    __device__ __forceinline__ void through(u32 tokens) {
        if (marked_ == 0 && tokens % p_.chunk == 0) {
            marked_ = tokens;
            marked_groups_ = groups_;
        }
        if (marked_ != 0 && groups_ - marked_groups_ >= YOUNGER) {
            ptx::bulk_wait<YOUNGER>();
            ptx::fence_acq_rel_sys();  // orders the rows, whose bulk stores this thread has awaited, before the words
            for (u32 step = 0; step < p_.heard(); ++step) {
                ptx::store_relaxed_sys(p_.progress_at(p_.peers.in_turn(step), p_.peers.rank, lane_),
                                       progress(epoch_, marked_));
            }
            marked_ = 0;
        }
    }

  private:
    const DispatchParams& p_;
    u64 epoch_;
    u32 lane_;
    u32 groups_ = 0;
    u32 marked_ = 0;
    u32 marked_groups_ = 0;
};

// By the thread that pushes the row: the epoch, at the end of what leaves.
__device__ __forceinline__ void stamp(u32 stage, u32 slot_bytes, u64 epoch) {
    if (STAMPS) {
        ptx::shared_store_16(stage + slot_bytes - STAMP_BYTES, {epoch, epoch});
        ptx::fence_proxy_async_shared();  // orders the stamp before the bulk stores out of the stage
    }
}

class SendLane {
  public:
    static __device__ __forceinline__ u32 memory(const DispatchParams& p) {
        return lane_memory(p.sender_stages, p.slot_bytes);
    }

    __device__ SendLane(const DispatchParams& p, u64 epoch, u32 lane, u8* memory, bool drives)
        : p_(p), epoch_(epoch), lane_(lane), half_(epoch & 1),
          ring_(memory, p.sender_stages, p.slot_bytes, drives && threadIdx.x % 32 == 0), announcing_(p, epoch, lane) {}

    // Sends the lane's tokens number `first` to `first + count - 1`; mask `i * stride` is that of number first + i.
    __device__ __forceinline__ void run(u32 first, u32 count, const unsigned short* masks, u32 stride) {
        if (threadIdx.x % 32 != 0) {
            return;
        }
        u32 ahead = 0;
        for (u32 i = 0; i < count; ++i) {
            for (; ahead < count && ring_.can_load(); ++ahead) {
                if (masks[ahead * stride] != 0) {
                    ring_.load({p_.x + static_cast<u64>(token(first + ahead)) * p_.row_bytes, p_.row_bytes});
                }
            }
            if (const u32 mask = masks[i * stride]) {
                const u32 stage = ring_.await();
                stamp(stage, p_.slot_bytes, epoch_);
                pace_.keep(p_.pace(mask));
                for (u32 step = 0; step < p_.peers.ranks; ++step) {
                    const u32 peer = p_.peers.in_turn(step);
                    if (mask >> peer & 1) {
                        ptx::bulk_store(p_.slot_at(peer, half_, p_.peers.rank, token(first + i)), stage, p_.slot_bytes);
                    }
                }
                ring_.stored();
                trace_first(p_.trace, AT_FIRST_PUSH);
                trace(p_.trace, AT_LAST_PUSH);
                announcing_.pushed();
            }
            announcing_.through(first + i + 1);
        }
    }

    // Until every row has arrived.
    __device__ __forceinline__ void finish() {
        if (threadIdx.x % 32 == 0) {
            ring_.drain();
        }
    }

  private:
    __device__ __forceinline__ u32 token(u32 number) const { return lane_ + number * p_.lanes(); }

    const DispatchParams& p_;
    u64 epoch_;
    u32 lane_;
    u32 half_;
    Ring ring_;
    Pace pace_;
    Announcing announcing_;
};

// By a whole block, each of whose lanes has awaited its rows: that they have nothing more to send, to every peer, also
// where there was nothing to send. One fence for all of them.
__device__ inline void say_done(const DispatchParams& p, u64 epoch, u32 sender) {
    __syncthreads();  // hands what the lanes have awaited to the threads below
    if (threadIdx.x >= 32) {
        return;
    }
    trace(p.trace, AT_ARRIVED);
    ptx::fence_acq_rel_sys();  // orders the rows before the words
    for (u32 i = threadIdx.x; i < p.sender_lanes * p.heard(); i += 32) {
        const u32 lane = sender * p.sender_lanes + i % p.sender_lanes;
        ptx::store_relaxed_sys(p.progress_at(p.peers.in_turn(i / p.sender_lanes), p.peers.rank, lane),
                               progress(epoch, ALL_DONE));
    }
    trace(p.trace, AT_SAID_DONE);
}

// By a whole block, the `sender`-th. Sends the first `n` tokens of x.
template <class Lane>
__device__ inline void send_rows(const DispatchParams& p, u64 epoch, u32 n, u32 sender, u8* shared) {
    const u32 warp = threadIdx.x / 32;
    const bool drives = warp < p.sender_lanes;
    unsigned short* masks = reinterpret_cast<unsigned short*>(shared);
    const u32 wanted = OWN_FROM_X ? ~(1u << p.peers.rank) : ~0u;
    const u32 lanes = p.lanes();
    const u32 numbers = (n + lanes - 1) / lanes;
    const u32 window = MASK_WINDOW / p.sender_lanes;
    Lane lane(p, epoch, sender * p.sender_lanes + warp, shared + MASK_BYTES + warp * Lane::memory(p), drives);
    for (u32 first = 0; first < numbers; first += window) {
        const u32 count = numbers - first < window ? numbers - first : window;
        for (u32 i = threadIdx.x; i < count * p.sender_lanes; i += THREADS) {
            const u32 token = sender * p.sender_lanes + i % p.sender_lanes + (first + i / p.sender_lanes) * lanes;
            masks[i] = token < n ? p.ranks_of(token) & wanted : 0;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            trace_first(p.trace, AT_DESTINATIONS);
        }
        if (drives) {
            lane.run(first, count, masks + warp, p.sender_lanes);
        }
        __syncthreads();
    }
    if (drives) {
        lane.finish();
    }
    say_done(p, epoch, sender);
}

}  // namespace raymoe
