// Copies bytes between any two addresses that this GPU can reach, so one kernel does both push and pull.
//
// One launch serves up to MOST_TRANSFERS transfers. A transfer is a message, or a wait or a signal without bytes. A
// transfer with an `operation` takes part in a protocol between two ranks. Each of its runs has a number, the epoch:
//   1. the threads that work on the transfer wait, bounded, until the credit word in this rank's memory reaches the
//      epoch (less `lag`)
//   2. they move the bytes
//   3. the last part to finish releases the epoch into the signal word in the peer's memory, then stores it as this
//      rank's count
// Put: the sender runs it; the credit is the receiver's "ready", the signal is "sent". Get: the receiver runs it; the
// credit is the sender's "ready", the signal is "taken".
//
// The threads that work on a transfer:
//   no bytes             one thread of the last block, whose four warps take such transfers in turn
//   dst and src equal    thread 0 of each of the transfer's blocks drives a ring of bulk copies over the chunks between
//   mod 16               the first and the last 16-byte boundary of dst; the other warps of the transfer's first block
//                        move up to 15 bytes at either end
//   not equal            bulk copies cannot do it; warps 1 to 3 of the transfer's blocks load 16 aligned bytes twice
//                        and shift, and those of the first block move up to 31 bytes at either end. It is slow
// No byte outside [src, src + bytes) is read, and no byte outside [dst, dst + bytes) is written.
//
// Transfers have blocks of their own, or share blocks. A block works on its transfers in order, so one that waits
// delays all later ones. A ring continues with the next transfer's chunks while stores of the last one are in flight.
//
// Dynamic shared memory: the ring (ring.cuh). 128 threads a block; the whole grid is resident.

#include "raymoe/copy/transfers.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/base/sync.cuh"
#include "raymoe/copy/unaligned.cuh"

namespace raymoe {

constexpr u32 COPY_THREADS = 128;
constexpr u32 ORDINARY_THREADS = COPY_THREADS - 32;  // threads that move bytes by ordinary loads and stores
// Stores of a transfer until earlier transfers are announced: their stores have arrived by then.
constexpr u32 ANNOUNCE_AFTER = 8;

// The position of a block's ring: a transfer, and a chunk of it.
struct Place {
    u32 transfer;
    u64 at;    // where the chunk begins in the transfer's body
    u64 body;  // bytes of the transfer that bulk copies move
    u64 head;  // bytes before them

    // Goes to the first transfer from `from` on that this block's ring has a part of, or to `count` if there is none.
    __device__ __forceinline__ void enter(const CopyParams& p, u32 from) {
        for (transfer = from; transfer < p.count; ++transfer) {
            const Transfer& next = p.transfers[transfer];
            if (is_of_this_block(next) && same_alignment(next)) {
                head = head_of(next);
                body = (next.bytes - head) & ~15ull;
                at = static_cast<u64>(blockIdx.x - next.first) * p.stage_bytes;
                return;
            }
        }
    }

    __device__ __forceinline__ bool finished() const { return at >= body; }

    __device__ __forceinline__ u32 chunk(const CopyParams& p) const {
        return static_cast<u32>(min_of(p.stage_bytes, body - at));
    }

    __device__ __forceinline__ void step(const CopyParams& p) {
        at += static_cast<u64>(p.transfers[transfer].blocks) * p.stage_bytes;
    }
};

// Thread 0 of each block that moves bytes runs this. It moves the block's part of every transfer whose dst and src are
// equal mod 16.
class Driver {
  public:
    __device__ Driver(const CopyParams& p, u8* shared, u64* epochs)
        : p_(p), ring_(shared, p.stages, p.stage_bytes), epochs_(epochs) {
        loading_.enter(p, 0);
        storing_ = loading_;
        announced_ = loading_.transfer;
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
        while (loading_.transfer < p_.count && ring_.can_load()) {
            if (!open_ && !open_transfer()) {
                return;
            }
            if (loading_.finished()) {
                loading_.enter(p_, loading_.transfer + 1);
                open_ = false;
                continue;
            }
            ring_.load(Chunk{p_.transfers[loading_.transfer].src + loading_.head + loading_.at, loading_.chunk(p_)});
            loading_.step(p_);
        }
    }

    // Whether the next transfer may be loaded. If its credit has not come, first the loaded chunks are stored, then the
    // transfers before it are announced: the peer that gives the credit may wait for those.
    __device__ __forceinline__ bool open_transfer() {
        const Transfer& transfer = p_.transfers[loading_.transfer];
        u64 epoch;
        Gate gate = gate_of(p_, transfer, epoch);
        if (gate == Gate::SHUT) {
            if (ring_.any_loading()) {
                return false;
            }
            ring_.drain();
            announce(loading_.transfer);
            const Waiting who{transfer.op, transfer.peer, epoch};
            gate = wait_for_epoch(transfer.credit, epoch - transfer.lag, who, p_.watch) ? Gate::OPEN : Gate::STOPPED;
        }
        if (gate == Gate::STOPPED) {
            stopped_ = true;
            loading_.transfer = p_.count;  // loads nothing more: no later transfer may begin either
            return false;
        }
        epochs_[loading_.transfer] = epoch;
        open_ = true;
        // Orders the acquired credit, and what earlier kernels of the stream wrote to src, before this thread's bulk
        // copies.
        ptx::fence_proxy_async();
        return true;
    }

    __device__ __forceinline__ void store_one() {
        while (storing_.finished()) {
            storing_.enter(p_, storing_.transfer + 1);
            stores_of_transfer_ = 0;
        }
        const u32 stage = ring_.await();
        pace_.keep(p_.pace_ns);
        ptx::bulk_store(p_.transfers[storing_.transfer].dst + storing_.head + storing_.at, stage, storing_.chunk(p_));
        ring_.stored();
        storing_.step(p_);
        if (++stores_of_transfer_ == ANNOUNCE_AFTER && announced_ < storing_.transfer) {
            ptx::bulk_wait<ANNOUNCE_AFTER>();  // all stores but these have arrived, so those of earlier transfers too
            announce(storing_.transfer);
        }
    }

    // Announces the transfers before `to`: this block's part of them is done, and its stores have arrived.
    __device__ void announce(u32 to) {
        for (; announced_ < to; ++announced_) {
            const Transfer& transfer = p_.transfers[announced_];
            if (is_of_this_block(transfer) && same_alignment(transfer)) {
                finish_part(p_, transfer, epochs_[announced_], !stopped_);
            }
        }
    }

    const CopyParams& p_;
    Ring ring_;
    u64* epochs_;  // of the transfers that have begun
    Place loading_;
    Place storing_;
    Pace pace_;
    u32 announced_;               // the transfers before this one are announced
    u32 stores_of_transfer_ = 0;  // stores of the transfer that is being stored
    bool open_ = false;
    bool stopped_ = false;
};

// Warps 1 to 3 of each block that moves bytes call this. They move the block's part of the bytes that bulk copies
// cannot move, transfer by transfer.
__device__ __forceinline__ void move_by_loads_and_stores(const CopyParams& p) {
    __shared__ bool may;
    const u32 thread = threadIdx.x - 32;
    for (u32 i = 0; i < p.count; ++i) {
        const Transfer& transfer = p.transfers[i];
        const bool ring = same_alignment(transfer);
        if (!is_of_this_block(transfer) || (ring && (!has_ends(transfer) || blockIdx.x != transfer.first))) {
            continue;
        }
        u64 epoch = 0;
        if (thread == 0) {
            may = may_begin(p, transfer, epoch);
        }
        ptx::barrier_of_warps(1, ORDINARY_THREADS);  // hands `may` and the acquired credit to the others
        const bool moves = may;
        const Span span{transfer.dst, transfer.src, transfer.bytes};
        if (moves && ring) {
            const u64 head = head_of(transfer);
            copy_ends(span, head, head + ((transfer.bytes - head) & ~15ull), thread);
        } else if (moves) {
            const u64 threads = static_cast<u64>(transfer.blocks) * ORDINARY_THREADS;
            copy_by_shifting(span,
                             Group{static_cast<u64>(blockIdx.x - transfer.first) * ORDINARY_THREADS + thread, threads});
        }
        ptx::barrier_of_warps(1, ORDINARY_THREADS);  // orders the stores of all before the first thread's ticket
        if (thread == 0) {
            finish_part(p, transfer, epoch, moves);
        }
    }
}

// The first thread of each warp of the last block calls this: it waits and signals.
__device__ __forceinline__ void wait_and_signal(const CopyParams& p) {
    u32 turn = 0;
    for (u32 i = 0; i < p.count; ++i) {
        const Transfer& transfer = p.transfers[i];
        if (transfer.bytes != 0 || turn++ % (COPY_THREADS / 32) != threadIdx.x / 32) {
            continue;
        }
        u64 epoch;
        if (may_begin(p, transfer, epoch) && transfer.operation != nullptr) {
            finish_transfer(transfer, epoch);
        }
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::COPY_THREADS, 1)
    copy(const __grid_constant__ raymoe::CopyParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 epochs[MOST_TRANSFERS];
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
