// A pipeline of bulk copies through shared memory: global -> stage -> global, driven by ONE thread of a block.
//
// No bulk copy goes from global to global memory. So every chunk is loaded into a stage and stored out of it. Loads and
// stores complete in different ways, which the instructions fix:
//   load    on the mbarrier of its stage, which is told the bytes to expect. A thread waits for a phase; phases
//           alternate in parity each time the stage is used
//   store   with the bulk group that it is committed to. Groups belong to the thread that commits them and complete in
//           order. A wait names how many of the youngest may still be in flight
//
// A wait for a store has two forms. With `.read`: the stage has been read and may be loaded again, but the writes may
// not have arrived. Without: the writes have been performed. The ring waits by `.read` and leaves the youngest stores
// in flight. A thread that will announce them calls `drain` first.
//
// Half of the stages hold loads in flight, the other half stores in flight. Draining the stores at each stage instead
// costs a quarter of the link (8 CTAs x 12 stages of 16 KiB: 278 against 360 GB/s; H200, 2026-11-21). A block moves
// about (bytes in flight / 2.1 us) until the link is full. Offering more than the link takes costs throughput as well.
//
// Dynamic shared memory: `stages` x `stage_bytes`, then 8 bytes a stage for the barriers.
// raymoe/transport/copy_kernel.py computes the same sum.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// Waits by .read until at most `younger` groups are in flight. The instruction takes a constant only. Between two
// constants the smaller one is taken: it waits for more than is asked, which is also right.
__device__ __forceinline__ void wait_stages_read(u32 younger) {
    switch (younger) {
        case 0: ptx::bulk_wait_read<0>(); break;
        case 1: ptx::bulk_wait_read<1>(); break;
        case 2: ptx::bulk_wait_read<2>(); break;
        case 3: ptx::bulk_wait_read<3>(); break;
        case 4: ptx::bulk_wait_read<4>(); break;
        case 5: ptx::bulk_wait_read<5>(); break;
        case 6: ptx::bulk_wait_read<6>(); break;
        case 7: ptx::bulk_wait_read<7>(); break;
        case 8: ptx::bulk_wait_read<8>(); break;
        default:
            if (younger >= 16) {
                ptx::bulk_wait_read<16>();
            } else if (younger >= 12) {
                ptx::bulk_wait_read<12>();
            } else {
                ptx::bulk_wait_read<8>();
            }
    }
}

// Keeps a thread's stores to a rate. A link that is offered more than it takes gives less (transport/tma.py has
// figures), so the caller gives the rate.
class Pace {
  public:
    // Waits until the next store is due, and makes the following one due `ns` later. The storing thread calls this. A
    // thread that is late makes up for MAKE_UP stores like this one at most, because more would be a burst.
    __device__ __forceinline__ void keep(u64 ns) {
        if (ns == 0) {
            return;
        }
        u64 now = ptx::nanoseconds();
        due_ = due_ == 0 ? now : due_;
        while (now < due_) {
            now = ptx::nanoseconds();
        }
        const u64 earliest = now - MAKE_UP * ns;
        due_ = (due_ < earliest ? earliest : due_) + ns;
    }

  private:
    static constexpr u64 MAKE_UP = 4;
    u64 due_ = 0;
};

struct Chunk {
    const u8* source;
    u32 bytes;  // a multiple of 16, at least 16, at most a stage
};

class Ring {
  public:
    // The thread that drives the ring makes it; `memory` is 128-byte aligned. Other threads may hold a Ring with
    // `drives` false: it touches nothing, and none of its functions may be called.
    __device__ Ring(u8* memory, u32 stages, u32 stage_bytes, bool drives = true)
        : memory_(ptx::shared_address(memory)),
          barriers_(memory_ + stages * stage_bytes),
          stages_(stages),
          stage_bytes_(stage_bytes),
          ahead_(stages - stages / 2) {
        if (!drives) {
            return;
        }
        for (u32 stage = 0; stage < stages; ++stage) {
            ptx::barrier_init(barriers_ + stage * 8, 1);  // one arrival: of the driving thread, with the expected bytes
        }
        ptx::fence_barrier_init();  // orders the inits before the bulk loads that complete on them
    }

    // Moves `count` chunks. `chunk_of(k)` returns the source of chunk k. `store(k, stage, bytes)` issues any number of
    // bulk stores of it out of that shared address. On return all loads are complete; stores may be in flight.
    template <class ChunkOf, class Store>
    __device__ __forceinline__ void run(u64 count, ChunkOf chunk_of, Store store) {
        const u64 first = count < ahead_ ? count : ahead_;
        for (u64 k = 0; k < first; ++k) {
            load(chunk_of(k));
        }
        for (u64 k = 0; k < count; ++k) {
            const Chunk chunk = chunk_of(k);
            store(k, await(), chunk.bytes);
            stored();
            if (k + ahead_ < count) {
                load(chunk_of(k + ahead_));
            }
        }
        settle();
    }

    // The same in steps, for callers that decide the next chunk late. `load` if `can_load`. For each load, in order:
    // `await` (or `loaded` and `await`), bulk stores out of that address, then `stored`. `settle` at the end.
    __device__ __forceinline__ bool can_load() const { return loads_ - stores_ < ahead_; }

    __device__ __forceinline__ bool any_loading() const { return loads_ != stores_; }

    __device__ __forceinline__ void load(const Chunk& chunk) {
        if (loads_ >= stages_) {
            // This stage held the chunk `stages` chunks before; the stores of all later ones may be in flight.
            wait_stages_read(stages_ - ahead_);
        }
        const u32 barrier = barriers_ + loading_.stage * 8;
        ptx::barrier_expect(barrier, chunk.bytes);
        ptx::bulk_load(memory_ + loading_.stage * stage_bytes_, chunk.source, chunk.bytes, barrier);
        loading_.step(stages_);
        ++loads_;
    }

    // Whether the oldest load is complete. There must be one.
    __device__ __forceinline__ bool loaded() const {
        return ptx::barrier_try_wait(barriers_ + storing_.stage * 8, storing_.parity);
    }

    // Waits for the oldest load; returns its shared address.
    __device__ __forceinline__ u32 await() const {
        while (!loaded()) {
        }
        return memory_ + storing_.stage * stage_bytes_;
    }

    // The caller has issued the stores out of the oldest stage.
    __device__ __forceinline__ void stored() {
        ptx::bulk_commit();
        storing_.step(stages_);
        ++stores_;
    }

    // Waits until every stage has been read: another ring, or ordinary stores, may then use the memory.
    __device__ __forceinline__ void settle() { wait_stages_read(0); }

    // Waits until every store issued so far has been performed and is visible to this thread, so that its release
    // covers them. It must stand before any flag that announces them.
    __device__ __forceinline__ void drain() { ptx::bulk_wait<0>(); }

  private:
    struct Cursor {
        u32 stage = 0;
        u32 parity = 0;  // of the current phase of the stage's barrier

        __device__ __forceinline__ void step(u32 stages) {
            if (++stage == stages) {
                stage = 0;
                parity ^= 1;
            }
        }
    };

    u32 memory_;
    u32 barriers_;
    u32 stages_;
    u32 stage_bytes_;
    u32 ahead_;  // loads in flight at most; with one stage, 1
    u64 loads_ = 0;
    u64 stores_ = 0;
    Cursor loading_;
    Cursor storing_;
};

}  // namespace raymoe
