// Plain accesses: those that a kernel makes by pointers and not by raymoe/base/ptx.cuh.
//
// Kernels are compiled with -fsanitize=thread, without its library. The compiler puts a call before every access, and
// the calls come here. An access to shared memory is checked for races. An access to global memory behaves as an
// ordinary load or store: before a load, memory is set to what this thread may see; after a store, to what it held
// before, and the store waits in its thread's list. No other thread runs between the access and `settle_plain`.

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

namespace {

struct PlainAccess {
    u8* at = nullptr;
    u32 bytes;
    bool stores;
    u8 before[LINE];
};

PlainAccess open_access;  // of the running thread; completed before another thread runs

void begin_global(u8* at, u32 bytes, bool stores) {
    Region& region = checked(at, bytes, 1, stores ? "stores" : "loads");
    open_access = {at, bytes, stores, {}};
    std::memcpy(open_access.before, at, bytes);
    if (!stores) {
        u8 seen[LINE];
        load_ordinary(self(), at, bytes, seen);
        std::memcpy(at, seen, bytes);
    } else {
        region.touched(reinterpret_cast<u64>(at));
    }
}

void access(void* address, u64 bytes, bool stores) {
    if (machine == nullptr || machine->running == nullptr) {
        return;
    }
    u8* at = static_cast<u8*>(address);
    const u64 in_shared = static_cast<u64>(at - machine->shared);
    if (in_shared < machine->shared_bytes) {
        settle_plain();
        const Access made{static_cast<u32>(in_shared), static_cast<u32>(bytes)};
        if (stores) {
            note_shared_store(made);
        } else {
            note_shared_load(made);
        }
        return;
    }
    if (!machine->memory.maps(at)) {
        return;  // the thread's own memory, or a parameter
    }
    machine->maybe_yield();
    if (reinterpret_cast<u64>(at) % LINE + bytes > LINE) {
        machine->fail("a plain access across a boundary of 16 bytes, which the emulator does not support");
    }
    begin_global(at, static_cast<u32>(bytes), stores);
}

}  // namespace

void settle_plain() {
    if (open_access.at == nullptr) {
        return;
    }
    const PlainAccess done = open_access;
    open_access.at = nullptr;
    if (done.stores) {
        u8 stored[LINE];
        std::memcpy(stored, done.at, done.bytes);
        std::memcpy(done.at, done.before, done.bytes);
        Region& region = *machine->memory.find(reinterpret_cast<u64>(done.at));
        add_store(self(), region, done.at, stored, done.bytes, machine->store_delay());
    } else {
        std::memcpy(done.at, done.before, done.bytes);
    }
}

u32 shared_add(u32* word, u32 value) {
    machine->maybe_yield();
    const u32 at = static_cast<u32>(reinterpret_cast<u8*>(word) - machine->shared);
    const Access made{at, 4, false, true};
    note_shared_load(made);
    note_shared_store(made);
    const u32 before = *word;
    *word = before + value;
    return before;
}

}  // namespace emulator

extern "C" {

void __tsan_init() {}

#define RAYMOE_ACCESS(bytes)                                                                    \
    void __tsan_read##bytes(void* at) { emulator::access(at, bytes, false); }                  \
    void __tsan_write##bytes(void* at) { emulator::access(at, bytes, true); }                  \
    void __tsan_unaligned_read##bytes(void* at) { emulator::access(at, bytes, false); }        \
    void __tsan_unaligned_write##bytes(void* at) { emulator::access(at, bytes, true); }

RAYMOE_ACCESS(1)
RAYMOE_ACCESS(2)
RAYMOE_ACCESS(4)
RAYMOE_ACCESS(8)
RAYMOE_ACCESS(16)

void __tsan_read_range(void* at, unsigned long bytes) { emulator::access(at, bytes, false); }
void __tsan_write_range(void* at, unsigned long bytes) { emulator::access(at, bytes, true); }
}
