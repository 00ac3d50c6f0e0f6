// The order of the accesses of a block's threads to its shared memory.
//
// Accesses are stamped with the thread and its count. A clock holds the stamps that happened before, in the sense of
// the PTX memory model. Only barriers, arrivals on barriers and __syncwarp pass clocks on. If nothing orders two
// conflicting accesses, the run ends: a race is found in every interleaving that contains both accesses.
//
// Before a bulk copy, each thread must have fenced its own accesses to the stage (fence.proxy.async) before it hands
// the stage on. By the letter of PTX a fence of the thread that begins the copy is enough; the emulator does not accept
// that.
//
// Two idioms are allowed. A store may follow a load of the same warp after any collective, because a load is complete
// before its thread takes part. And a warp may poll a word that only its own shared_store_4 and shared_load_4 access.
#pragma once

#include <vector>

#include "memory.h"

namespace emulator {

constexpr u32 MOST_WARPS = 16;

struct Stamp {
    u32 thread, count;
};

// For each warp all stamps up to a count, and later stamps of single threads.
struct Clock {
    u32 warps[MOST_WARPS] = {};
    std::vector<Stamp> threads;

    bool knows(u32 thread, u32 count) const;
    void learn(u32 thread, u32 count);
    void join(const Clock& other);
    void forget_known();  // forgets stamps that the count of their warp covers
};

// The clocks of a thread or a barrier. `fenced`: the stamps before a proxy fence, so that the async proxy knows them.
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
    bool flag = true;  // all reads by shared_load_4
};

// The last writer of four bytes of shared memory, and the readers since.
struct Shadow {
    u32 count;   // of the writing thread; of a bulk load: the phase of its barrier
    u16 writer;  // the thread; of a bulk load: its barrier's address / 8
    Writer kind;
    bool flag;   // stored by shared_store_4
    Reads reads[2];
};

struct Access {
    u32 at, bytes;
    bool flag = false;  // by shared_load_4 or shared_store_4: a word that a warp may poll
    bool atomic = false;
    const void* value = nullptr;  // of a store
};

struct Thread;

void note_shared_load(const Access& access);
void note_shared_store(const Access& access);
void note_bulk_load(u32 at, u32 bytes, u32 barrier);
// A read by the async proxy, for an instruction of that thread.
void note_proxy_read(const Thread* thread, const Access& access, const char* does);
// The same by a product, whose operands must have been written.
void note_product_read(const Thread* thread, const Access& access);

// Whether a thread knows that something happened which that stamp was taken after.
bool knows(const Thread* me, Stamp stamp);

// Orders all accesses of these threads so far before all of their later ones.
void synchronise(const std::vector<Thread*>& threads);

void release_clocks(Clocks& into);        // by an arrival
void acquire_clocks(const Clocks& from);  // by a thread that finds a phase over
void fence_clocks();                      // by a proxy fence

}  // namespace emulator
