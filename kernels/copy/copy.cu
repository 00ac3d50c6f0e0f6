// Copies bytes between any two addresses that this GPU can reach, so one kernel does both push and pull.
//
// One launch serves up to COPY_LANES lanes. A lane is a message, or a wait or a signal without bytes. A lane with an
// `operation` takes part in a protocol between two ranks. Each of its runs has a number, the epoch:
//   1. the threads that work on the lane wait, bounded, until the credit word in this rank's memory reaches the epoch
//      (less `lag`)
//   2. they move the bytes
//   3. the last part to finish releases the epoch into the signal word in the peer's memory, then stores it as this
//      rank's count
// Put: the sender runs it; the credit is the receiver's "ready", the signal is "sent". Get: the receiver runs it; the
// credit is the sender's "ready", the signal is "taken".
//
// The threads that work on a lane:
//   no bytes             one thread of the last block, whose four warps take such lanes in turn
//   dst and src equal    thread 0 of each of the lane's blocks drives a ring of bulk copies over the chunks between the
//   mod 16               first and the last 16-byte boundary of dst; the other warps of the lane's first block move up
//                        to 15 bytes at either end
//   not equal            bulk copies cannot do it; warps 1 to 3 of the lane's blocks load 16 aligned bytes twice and
//                        shift, and those of the first block move up to 31 bytes at either end. It is slow
// No byte outside [src, src + bytes) is read, and no byte outside [dst, dst + bytes) is written.
//
// Lanes have blocks of their own, or share blocks. A block works on its lanes in order, so one lane that waits delays
// all later ones. A ring continues with the next lane's chunks while stores of the last lane are in flight.
//
// Dynamic shared memory: the ring (ring.cuh). 128 threads a block; the whole grid is resident.

#include "raymoe/copy/lanes.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/base/sync.cuh"
#include "raymoe/copy/unaligned.cuh"

namespace raymoe {

constexpr u32 COPY_THREADS = 128;
constexpr u32 ORDINARY_THREADS = COPY_THREADS - 32;  // threads that move bytes by ordinary loads and stores
constexpr u32 ANNOUNCE_AFTER = 8;  // stores of a lane until earlier lanes are announced: theirs have arrived by then

// The position of a block's ring: a lane, and a chunk of it.
struct Place {
    u32 lane;
    u64 at;    // where the chunk begins in the lane's body
    u64 body;  // bytes of the lane that bulk copies move
    u64 head;  // bytes before them

    // Goes to the first lane from `from` on that this block's ring has a part of, or to `count` if there is none.
    __device__ __forceinline__ void enter(const CopyParams& p, u32 from) {
        for (lane = from; lane < p.count; ++lane) {
            const CopyLane& found = p.lanes[lane];
            if (is_of_this_block(found) && same_alignment(found)) {
                head = head_of(found);
                body = (found.bytes - head) & ~15ull;
                at = static_cast<u64>(blockIdx.x - found.first) * p.stage_bytes;
                return;
            }
        }
    }

    __device__ __forceinline__ bool finished() const { return at >= body; }

    __device__ __forceinline__ u32 chunk(const CopyParams& p) const {
        return static_cast<u32>(min_of(p.stage_bytes, body - at));
    }

    __device__ __forceinline__ void step(const CopyParams& p) {
        at += static_cast<u64>(p.lanes[lane].blocks) * p.stage_bytes;
    }
};

// Run by thread 0 of each block that moves bytes: its part of every lane whose dst and src are equal mod 16.
class Driver {
  public:
    __device__ Driver(const CopyParams& p, u8* shared, u64* epochs)
        : p_(p), ring_(shared, p.stages, p.stage_bytes), epochs_(epochs) {
        loading_.enter(p, 0);
        storing_ = loading_;
        announced_ = loading_.lane;
    }

    __device__ __forceinline__ void run() {
        while (true) {
            load_ahead();
            if (!ring_.any_loading()) {
                break;
            }
            store_one();
        }
        ring_.drain();  // the stores must have arrived before the tickets, because the signals announce them
        announce(p_.count);
    }

  private:
    __device__ __forceinline__ void load_ahead() {
        while (loading_.lane < p_.count && ring_.can_load()) {
            if (!open_ && !open_lane()) {
                return;
            }
            if (loading_.finished()) {
                loading_.enter(p_, loading_.lane + 1);
                open_ = false;
                continue;
            }
            ring_.load(Chunk{p_.lanes[loading_.lane].src + loading_.head + loading_.at, loading_.chunk(p_)});
            loading_.step(p_);
        }
    }

    // Whether the next lane may be loaded. If its credit has not come, first the loaded chunks are stored, then the
    // lanes before it are announced: the peer that gives the credit may wait for those.
    __device__ __forceinline__ bool open_lane() {
        const CopyLane& lane = p_.lanes[loading_.lane];
        u64 epoch;
        Gate gate = gate_of(p_, lane, epoch);
        if (gate == Gate::SHUT) {
            if (ring_.any_loading()) {
                return false;
            }
            ring_.drain();
            announce(loading_.lane);
            const Waiting who{lane.op, lane.peer, epoch};
            gate = wait_for_epoch(lane.credit, epoch - lane.lag, who, p_.watch) ? Gate::OPEN : Gate::STOPPED;
        }
        if (gate == Gate::STOPPED) {
            stopped_ = true;
            loading_.lane = p_.count;  // loads nothing more: no later lane may begin either
            return false;
        }
        epochs_[loading_.lane] = epoch;
        open_ = true;
        // Orders the acquired credit, and what earlier kernels of the stream wrote to src, before this thread's bulk
        // copies.
        ptx::fence_proxy_async();
        return true;
    }

    __device__ __forceinline__ void store_one() {
        while (storing_.finished()) {
            storing_.enter(p_, storing_.lane + 1);
            stores_of_lane_ = 0;
        }
        const u32 stage = ring_.await();
        pace_.keep(p_.pace_ns);
        ptx::bulk_store(p_.lanes[storing_.lane].dst + storing_.head + storing_.at, stage, storing_.chunk(p_));
        ring_.stored();
        storing_.step(p_);
        if (++stores_of_lane_ == ANNOUNCE_AFTER && announced_ < storing_.lane) {
            ptx::bulk_wait<ANNOUNCE_AFTER>();  // all stores but these have arrived, so those of the lanes before have
            announce(storing_.lane);
        }
    }

    // Announces the lanes before `to`: this block's part of them is done, and its stores have arrived.
    __device__ void announce(u32 to) {
        for (; announced_ < to; ++announced_) {
            const CopyLane& lane = p_.lanes[announced_];
            if (is_of_this_block(lane) && same_alignment(lane)) {
                finish_part(p_, lane, epochs_[announced_], !stopped_);
            }
        }
    }

    const CopyParams& p_;
    Ring ring_;
    u64* epochs_;  // of the lanes that have begun
    Place loading_;
    Place storing_;
    Pace pace_;
    u32 announced_;           // the lanes before this one are announced
    u32 stores_of_lane_ = 0;  // stores of the lane that is being stored
    bool open_ = false;
    bool stopped_ = false;
};

// Run by warps 1 to 3 of each block that moves bytes: its part of the bytes that bulk copies cannot move, lane by lane.
__device__ __forceinline__ void move_by_loads_and_stores(const CopyParams& p) {
    __shared__ bool may;
    const u32 thread = threadIdx.x - 32;
    for (u32 i = 0; i < p.count; ++i) {
        const CopyLane& lane = p.lanes[i];
        const bool ring = same_alignment(lane);
        if (!is_of_this_block(lane) || (ring && (!has_ends(lane) || blockIdx.x != lane.first))) {
            continue;
        }
        u64 epoch = 0;
        if (thread == 0) {
            may = may_begin(p, lane, epoch);
        }
        ptx::barrier_of_warps(1, ORDINARY_THREADS);  // hands `may` and the acquired credit to the others
        const bool moves = may;
        const Span span{lane.dst, lane.src, lane.bytes};
        if (moves && ring) {
            const u64 head = head_of(lane);
            copy_ends(span, head, head + ((lane.bytes - head) & ~15ull), thread);
        } else if (moves) {
            const u64 threads = static_cast<u64>(lane.blocks) * ORDINARY_THREADS;
            copy_by_shifting(span,
                             Group{static_cast<u64>(blockIdx.x - lane.first) * ORDINARY_THREADS + thread, threads});
        }
        ptx::barrier_of_warps(1, ORDINARY_THREADS);  // orders the stores of all before the first thread's ticket
        if (thread == 0) {
            finish_part(p, lane, epoch, moves);
        }
    }
}

// Run by the first thread of each warp of the block after those that move bytes: waits and signals.
__device__ __forceinline__ void wait_and_signal(const CopyParams& p) {
    u32 turn = 0;
    for (u32 i = 0; i < p.count; ++i) {
        const CopyLane& lane = p.lanes[i];
        if (lane.bytes != 0 || turn++ % (COPY_THREADS / 32) != threadIdx.x / 32) {
            continue;
        }
        u64 epoch;
        if (may_begin(p, lane, epoch) && lane.operation != nullptr) {
            finish_lane(lane, epoch);
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::COPY_THREADS, 1)
    copy(const __grid_constant__ raymoe::CopyParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 epochs[COPY_LANES];
    if (blockIdx.x >= p.movers) {
        if (threadIdx.x % 32 == 0) {
            wait_and_signal(p);
        }
    } else if (threadIdx.x == 0) {
        Driver(p, shared, epochs).run();
    } else if (threadIdx.x >= 32) {
        move_by_loads_and_stores(p);
    }
}
