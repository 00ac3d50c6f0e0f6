// Copies bytes: from anywhere to anywhere that this GPU can address, so a push and a pull are the same kernel.
//
// One launch serves up to COPY_LANES lanes: messages, and waits or signals without bytes. A lane with an `operation`
// takes part in a protocol between two ranks, and every run of it has a number, the epoch:
//   1. whoever works on the lane waits, bounded, until the credit word in this rank's memory has come to the epoch
//      (less `lag`)
//   2. the bytes are moved
//   3. the last one to have done its part releases the epoch into the signal word in the peer's memory, then makes it
//      this rank's count
// Put: the sender runs it, the credit is the receiver's "ready", the signal its "sent". Get: the receiver runs it, the
// credit is the sender's "ready", the signal its "taken".
//
// Who works on a lane:
//   no bytes           one thread of the last block, whose four warps take such lanes in turn
//   dst, src alike     thread 0 of each of the lane's blocks drives a ring of bulk copies over the chunks between the
//   mod 16             first and the last 16-byte boundary of dst; up to 15 bytes at either end are moved by the other
//                      warps of the lane's first block
//   not alike          bulk copies cannot do it; warps 1 to 3 of the lane's blocks load 16 aligned bytes twice and
//                      shift, and those of the first move up to 31 bytes at either end. Right, not fast
// Nothing outside [src, src + bytes) is read and nothing outside [dst, dst + bytes) is written.
//
// Lanes may have blocks of their own, or share them; a block works on its lanes in their order, so all of its lanes can
// wait for one. A ring goes on to the next lane's chunks while the last lane's stores are under way.
//
// Dynamic shared memory: the ring (ring.cuh). 128 threads a block; the grid is resident all at once.

#include "raymoe/copy/lanes.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/base/sync.cuh"
#include "raymoe/copy/unaligned.cuh"

namespace raymoe {

constexpr u32 COPY_THREADS = 128;
constexpr u32 HANDS = COPY_THREADS - 32;  // threads that move bytes by ordinary loads and stores
constexpr u32 LATE = 8;  // stores after which the lane before is looked at: by then its own have arrived

// Where a block's ring is: at which of its lanes, and at which chunk of that.
struct Place {
    u32 lane;
    u64 at;    // the chunk begins here in the lane's body
    u64 body;  // bytes of the lane that are moved by bulk copies
    u64 head;  // bytes before them

    // The first lane from `from` on that this block's ring has a part of; `count` where there is none.
    __device__ __forceinline__ void enter(const CopyParams& p, u32 from) {
        for (lane = from; lane < p.count; ++lane) {
            const CopyLane& found = p.lanes[lane];
            if (is_of_this_block(found) && alike(found)) {
                head = head_of(found);
                body = (found.bytes - head) & ~15ull;
                at = static_cast<u64>(blockIdx.x - found.first) * p.stage_bytes;
                return;
            }
        }
    }

    __device__ __forceinline__ bool through() const { return at >= body; }

    __device__ __forceinline__ u32 chunk(const CopyParams& p) const {
        return static_cast<u32>(min_of(p.stage_bytes, body - at));
    }

    __device__ __forceinline__ void step(const CopyParams& p) {
        at += static_cast<u64>(p.lanes[lane].blocks) * p.stage_bytes;
    }
};

// By thread 0 of each block that moves: its part of every lane whose ends lie alike.
class Driver {
  public:
    __device__ Driver(const CopyParams& p, u8* shared, u64* epochs)
        : p_(p), ring_(shared, p.stages, p.stage_bytes), epochs_(epochs) {
        loading_.enter(p, 0);
        storing_ = loading_;
        told_ = loading_.lane;
    }

    __device__ __forceinline__ void run() {
        while (true) {
            load_ahead();
            if (!ring_.any_loading()) {
                break;
            }
            store_one();
        }
        ring_.drain();  // before the tickets, which the signals count on
        tell(p_.count);
    }

  private:
    __device__ __forceinline__ void load_ahead() {
        while (loading_.lane < p_.count && ring_.can_load()) {
            if (!open_ && !open_lane()) {
                return;
            }
            if (loading_.through()) {
                loading_.enter(p_, loading_.lane + 1);
                open_ = false;
                continue;
            }
            ring_.load(Chunk{p_.lanes[loading_.lane].src + loading_.head + loading_.at, loading_.chunk(p_)});
            loading_.step(p_);
        }
    }

    // Whether the lane that is to be loaded may be. Where not yet, what is loaded goes out first; then what is out is
    // announced, since whoever gives the credit may be waiting for that.
    __device__ __forceinline__ bool open_lane() {
        const CopyLane& lane = p_.lanes[loading_.lane];
        u64 epoch;
        Gate gate = look(p_, lane, epoch);
        if (gate == Gate::SHUT) {
            if (ring_.any_loading()) {
                return false;
            }
            ring_.drain();
            tell(loading_.lane);
            const Waiting who{lane.op, lane.peer, epoch};
            gate = wait_for_epoch(lane.credit, epoch - lane.lag, who, p_.watch) ? Gate::OPEN : Gate::STOPPED;
        }
        if (gate == Gate::STOPPED) {
            stopped_ = true;
            loading_.lane = p_.count;  // nothing more is loaded; nor could any later lane begin
            return false;
        }
        epochs_[loading_.lane] = epoch;
        open_ = true;
        // Orders what the credit has let this rank read or overwrite, and what earlier kernels of the stream wrote to
        // src, before this thread's bulk copies.
        ptx::fence_proxy_async();
        return true;
    }

    __device__ __forceinline__ void store_one() {
        while (storing_.through()) {
            storing_.enter(p_, storing_.lane + 1);
            since_ = 0;
        }
        const u32 stage = ring_.await();
        pace_.keep(p_.pace_ns);
        ptx::bulk_store(p_.lanes[storing_.lane].dst + storing_.head + storing_.at, stage, storing_.chunk(p_));
        ring_.stored();
        storing_.step(p_);
        if (++since_ == LATE && told_ < storing_.lane) {
            ptx::bulk_wait<LATE>();  // all but these stores have arrived, so those of the lanes before have
            tell(storing_.lane);
        }
    }

    // Lanes before `to` are done as far as this block goes, and their stores have arrived.
    __device__ void tell(u32 to) {
        for (; told_ < to; ++told_) {
            const CopyLane& lane = p_.lanes[told_];
            if (is_of_this_block(lane) && alike(lane)) {
                finish_part(p_, lane, epochs_[told_], !stopped_);
            }
        }
    }

    const CopyParams& p_;
    Ring ring_;
    u64* epochs_;  // of the lanes that were opened
    Place loading_;
    Place storing_;
    Pace pace_;
    u32 told_;        // the lanes before it are told
    u32 since_ = 0;   // stores since the storing came to its lane
    bool open_ = false;
    bool stopped_ = false;
};

// By warps 1 to 3 of each block that moves: its part of what bulk copies leave out, lane by lane.
__device__ __forceinline__ void move_by_hand(const CopyParams& p) {
    __shared__ bool may;
    const u32 hand = threadIdx.x - 32;
    for (u32 i = 0; i < p.count; ++i) {
        const CopyLane& lane = p.lanes[i];
        const bool ring = alike(lane);
        if (!is_of_this_block(lane) || (ring && (!has_ends(lane) || blockIdx.x != lane.first))) {
            continue;
        }
        u64 epoch = 0;
        if (hand == 0) {
            may = may_begin(p, lane, epoch);
        }
        ptx::barrier_of_warps(1, HANDS);  // hands `may` and the order that an acquired credit gives to the others
        const bool moves = may;
        const Span span{lane.dst, lane.src, lane.bytes};
        if (moves && ring) {
            const u64 head = head_of(lane);
            copy_ends(span, head, head + ((lane.bytes - head) & ~15ull), hand);
        } else if (moves) {
            const u64 threads = static_cast<u64>(lane.blocks) * HANDS;
            copy_by_shifting(span, Group{static_cast<u64>(blockIdx.x - lane.first) * HANDS + hand, threads});
        }
        ptx::barrier_of_warps(1, HANDS);  // orders the stores of all before the first thread's ticket
        if (hand == 0) {
            finish_part(p, lane, epoch, moves);
        }
    }
}

// By the first thread of each warp of the block behind those that move: waits and signals.
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
        move_by_hand(p);
    }
}
