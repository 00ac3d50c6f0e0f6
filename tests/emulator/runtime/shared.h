// What the threads of a block know of one another's accesses to its shared memory.
//
// Accesses are stamped with the thread and its count. A clock says which stamps happened before, in the sense of the
// PTX memory model; only barriers, arrivals on barriers and __syncwarp hand clocks on. An access that nothing orders
// after the access that it conflicts with ends the run: a race is found wherever it is run, in any interleaving.
//
// Before a bulk copy, each thread must have fenced its own accesses to the stage (fence.proxy.async) before it hands
// them on. A fence by the thread that begins the copy would do by the letter of PTX; that is not relied on.
//
// Two idioms are let through. A store may follow a load of the same warp after any collective, since a thread has what
// it loads before it takes part. And a word that is only ever accessed by shared_store_4 and shared_load_4 of one warp
// may be polled by it.
#pragma once

#include <vector>

#include "memory.h"

namespace emulator {

constexpr u32 MOST_WARPS = 16;

struct Stamp {
    u32 thread, count;
};

// All stamps of a warp up to a count, and further ones of single threads.
struct Clock {
    u32 warps[MOST_WARPS] = {};
    std::vector<Stamp> threads;

    bool knows(u32 thread, u32 count) const;
    void learn(u32 thread, u32 count);
    void join(const Clock& other);
    void forget_known();  // stamps of threads that are among those of their warp
};

// A thread's, and a barrier's. `fenced`: what a proxy fence stands behind, so that the async proxy knows it too.
struct Clocks {
    Clock known, fenced;

    void join(const Clocks& other) {
        known.join(other.known);
        fenced.join(other.fenced);
    }
};

enum class Writer : u8 { NOBODY, THREAD, ATOMIC, BULK };

// The reads of a word by one warp since it was last written.
struct Reads {
    u32 count = 0, threads = 0, convergence = 0;  // the latest count, a bit for each thread
    u16 warp = 0;
    bool flag = true;  // all of them by shared_load_4
};

// Of four bytes of shared memory: their last writer, and who has read them since.
struct Shadow {
    u32 count;   // of the writing thread; of a bulk load: the phase of its barrier
    u16 writer;  // the thread; of a bulk load: its barrier's address / 8
    Writer kind;
    bool flag;   // stored by shared_store_4
    Reads reads[2];
};

struct Access {
    u32 at, bytes;
    bool flag = false;  // by shared_load_4 or shared_store_4, which a flag in shared memory may be polled by
    bool atomic = false;
    const void* value = nullptr;  // that a store stores
};

struct Thread;

void note_shared_load(const Access& access);
void note_shared_store(const Access& access);
void note_bulk_load(u32 at, u32 bytes, u32 barrier);
void note_bulk_store(u32 at, u32 bytes);

// All accesses of these threads so far happened before all later ones.
void synchronise(const std::vector<Thread*>& threads);

void release_clocks(Clocks& into);        // by an arrival
void acquire_clocks(const Clocks& from);  // by whoever finds a phase over
void fence_clocks();                      // by a proxy fence

}  // namespace emulator
