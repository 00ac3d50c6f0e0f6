// Words and ordinary copies of raymoe/base/ptx.cuh.
//
// A store waits in the list of its thread. It becomes visible to others at a random later moment, in any order with
// other stores, except those of the same bytes. A release or a fence first publishes all stores that the thread has
// made or knows of. At GPU scope it publishes to this GPU only.
//
// A load that orders nothing may return the value of any time since the thread last acquired something, but with later
// writes of its own block: caches may hold old lines.

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "raymoe/base/ptx_matrix.cuh"
#include "raymoe/base/ptx.cuh"

namespace emulator {

Region& checked(const void* at, u64 bytes, u32 alignment, const char* does) {
    const auto address = reinterpret_cast<u64>(at);
    Region* region = machine->memory.find(address);
    const int rank = self()->block->launch->rank->number;
    const char* wrong = region == nullptr                           ? "outside every region"
                        : address + bytes > region->end             ? "which ends before"
                        : region->rank != rank && !region->shared   ? "which only that rank has mapped"
                        : address % alignment != 0                  ? "not aligned to "
                                                                    : nullptr;
    if (wrong != nullptr) {
        machine->fail(std::string(does) + " " + std::to_string(bytes) + " bytes of " +
                      machine->memory.name_of(address) + ", " + wrong +
                      (address % alignment != 0 ? std::to_string(alignment) : ""));
    }
    return *region;
}

Store* add_store(Thread* thread, Region& region, void* at, const void* bytes, u32 size, u64 delay) {
    Store* store = machine->memory.new_store();
    store->at = static_cast<u8*>(at);
    std::memcpy(store->bytes, bytes, size);
    store->size = size;
    store->rank = thread->block->launch->rank->number;
    store->block = thread->block->number;
    store->line = &region.touched(reinterpret_cast<u64>(at));
    store->line->pending.push_back(store);
    thread->known.hold(store);
    if (thread->known.stores.size() % 512 == 0) {
        thread->known.forget_done();
    }
    if (delay != NEVER) {
        machine->later(delay, [store] { machine->memory.publish(store, machine->ticks); });
    }
    return store;
}

namespace {

enum class View { STRONG, ACQUIRE, ANY_SINCE };

// A random time since the thread last acquired something; mostly that time itself, which finds most bugs.
u64 some_time_since(u64 since) {
    const u64 kind = machine->random() % 4, now = machine->ticks;
    return kind == 0 ? now : kind == 1 ? since + machine->random() % (now - since + 1) : since;
}

void load_at(Thread* me, Region& region, const void* at, u32 size, u64 time, void* into) {
    const u8* from = static_cast<const u8*>(at);
    u8* bytes = static_cast<u8*>(into);
    machine->memory.as_of(region, from, size, time, me->block->launch->rank->number, me->block->number, bytes);
    const Line* line = region.line_at(reinterpret_cast<u64>(at));
    for (std::size_t i = 0; line != nullptr && i < line->pending.size(); ++i) {
        const Store* store = line->pending[i];
        if (!knows(me, store, time)) {
            continue;
        }
        for (u32 part = 0; part < store->size; ++part) {
            const std::ptrdiff_t byte = store->at + part - from;
            if (byte >= 0 && byte < static_cast<std::ptrdiff_t>(size)) {
                bytes[byte] = store->bytes[part];
            }
        }
    }
}

void load(Thread* me, const void* at, u32 size, View view, void* into) {
    Region& region = checked(at, size, size, "loads");
    const u64 time = view == View::ANY_SINCE ? some_time_since(me->seen_time) : machine->ticks;
    load_at(me, region, at, size, time, into);
    if (view == View::ACQUIRE) {
        me->seen_time = machine->ticks;
    }
}

template <class T>
T load(const void* at, View view) {
    T value;
    load(self(), at, sizeof(T), view, &value);
    return value;
}

// Loads a word that a thread may be polling.
template <class T>
T load_word(const T* word, View view) {
    machine->yield();
    const T value = load<T>(word, view);
    Thread* me = self();
    me->doing = "last looked at";
    me->where = reinterpret_cast<u64>(word);
    me->what = value;
    return value;
}

template <class T>
void store(void* at, const T& value, u64 delay) {
    machine->maybe_yield();
    Region& region = checked(at, sizeof(T), sizeof(T), "stores");
    add_store(self(), region, at, &value, sizeof(T), delay);
}

// Stores a word that a thread may be polling.
template <class T>
void store_word(T* word, T value) {
    store(word, value, machine->delay());
}

// Reads and writes a word in one step, visible to all at once.
template <class T, class Change>
T exchange(T* word, Change change) {
    Region& region = checked(word, sizeof(T), sizeof(T), "changes");
    if (const Line* line = region.line_at(reinterpret_cast<u64>(word))) {
        const auto pending = line->pending;
        for (Store* each : pending) {
            machine->memory.publish(each, machine->ticks);
        }
    }
    const T before = *word;
    const T after = change(before);
    if (after != before) {
        const u64 now = machine->ticks;
        machine->memory.write(region, reinterpret_cast<u8*>(word), &after, sizeof(T),
                              {now, now, self()->block->launch->rank->number, self()->block->number});
    }
    return before;
}

// Moves a line. The last of the eight threads calls this for all of them. The line arrives whole, as between GPUs on
// NVLink, unless the fault `torn_lines` is set.
void move_line(Warp& warp, u32 first, const Octet& octet) {
    Store* stores[8];
    Region& region = checked(octet.line, 128, 128, octet.stores ? "stores" : "loads");
    for (u32 part = 0; part < 8; ++part) {
        Thread* each = warp.threads[first + part];
        u8* at = octet.line + part * LINE;
        if (octet.stores) {
            stores[part] = add_store(each, region, at, each->wide, LINE, machine->delay());
        } else {
            load(each, at, LINE, View::STRONG, each->wide);
        }
    }
    const u32 together = machine->torn_lines ? 4 : 8;
    for (u32 part = 0; octet.stores && part < 8; ++part) {
        stores[part]->twin = stores[part / together * together + (part + 1) % together];
    }
}

void line_part(u8* line, u32 part, bool stores) {
    machine->yield();
    Thread* me = self();
    const u32 first = me->index % 32 / 8 * 8;
    Octet& octet = me->warp->octets[first / 8];
    if (part != me->index % 8) {
        machine->fail("part " + std::to_string(part) + " of a line");
    }
    if (octet.arrived != 0 && (octet.line != line || octet.stores != stores)) {
        machine->fail("its eight threads move different lines");
    }
    octet.line = line;
    octet.stores = stores;
    if (++octet.arrived < 8) {
        me->doing = "waits for its neighbours at the line";
        me->where = reinterpret_cast<u64>(line);
        machine->block_thread();
        return;
    }
    octet.arrived = 0;
    move_line(*me->warp, first, octet);
    for (u32 i = first; i < first + 8; ++i) {
        Thread* each = me->warp->threads[i];
        each->doing = "has last moved a part of the line";
        each->where = reinterpret_cast<u64>(line);
        if (each != me) {
            machine->make_ready(each);
        }
    }
}

void shared_check(u32 at, u32 size, const char* does) {
    const Block& block = *self()->block;
    if (at % size != 0 || at + size > block.shared_bytes) {
        machine->fail(std::string(does) + " " + std::to_string(size) + " bytes of shared memory at " +
                      std::to_string(at) + "; there are " + std::to_string(block.shared_bytes));
    }
}

template <class T>
T shared_load(u32 at) {
    machine->maybe_yield();
    shared_check(at, sizeof(T), "loads");
    note_shared_load({at, sizeof(T), sizeof(T) == 4});
    T value;
    std::memcpy(&value, self()->block->shared + at, sizeof(T));
    return value;
}

template <class T>
void shared_store(u32 at, const T& value) {
    machine->maybe_yield();
    shared_check(at, sizeof(T), "stores");
    note_shared_store({at, sizeof(T), sizeof(T) == 4, false, &value});
    std::memcpy(self()->block->shared + at, &value, sizeof(T));
}

}  // namespace

void load_ordinary(Thread* thread, const void* at, u32 size, void* into) {
    load_at(thread, *machine->memory.find(reinterpret_cast<u64>(at)), at, size, some_time_since(thread->seen_time),
            into);
}

}  // namespace emulator

namespace raymoe::ptx {

using emulator::machine;
using emulator::self;
using emulator::View;

u64 load_acquire_sys(const u64* word) { return emulator::load_word(word, View::ACQUIRE); }
u64 load_relaxed_sys(const u64* word) { return emulator::load_word(word, View::STRONG); }
u64 load_relaxed_gpu(const u64* word) { return emulator::load_word(word, View::STRONG); }
u32 load_relaxed_gpu_32(const u32* word) { return emulator::load_word(word, View::STRONG); }

void store_relaxed_sys(u64* word, u64 value) { emulator::store_word(word, value); }
void store_relaxed_gpu(u64* word, u64 value) { emulator::store_word(word, value); }
void store_relaxed_gpu_32(u32* word, u32 value) { emulator::store_word(word, value); }

void store_release_sys(u64* word, u64 value) {
    machine->yield();
    emulator::publish_known(self(), true);
    emulator::store_word(word, value);
}

void store_release_gpu(u64* word, u64 value) {
    machine->yield();
    emulator::publish_known(self(), false);
    emulator::store_word(word, value);
}

void fence_acq_rel_sys() {
    machine->yield();
    emulator::publish_known(self(), true);
    self()->seen_time = machine->ticks;
}

void atomic_min(u64* word, u64 value) {
    machine->yield();
    emulator::exchange(word, [&](u64 before) { return value < before ? value : before; });
}

u64 atomic_add(u64* word, u64 value) {
    machine->yield();
    return emulator::exchange(word, [&](u64 before) { return before + value; });
}

u32 atomic_increment_wrapping(u32* word, u32 last) {
    machine->yield();
    emulator::publish_known(self(), false);
    self()->seen_time = machine->ticks;
    return emulator::exchange(word, [&](u32 before) { return before >= last ? 0 : before + 1; });
}

u32 atomic_increment_wrapping_relaxed(u32* word, u32 last) {
    machine->yield();
    return emulator::exchange(word, [&](u32 before) { return before >= last ? 0 : before + 1; });
}

u32 atomic_add_acq_rel(u32* word, u32 value) {
    machine->yield();
    emulator::publish_known(self(), false);
    self()->seen_time = machine->ticks;
    return emulator::exchange(word, [&](u32 before) { return before + value; });
}

u32 atomic_add_32(u32* word, u32 value) {
    machine->yield();
    return emulator::exchange(word, [&](u32 before) { return before + value; });
}

u64 atomic_compare_swap(u64* word, u64 expected, u64 value) {
    machine->yield();
    emulator::publish_known(self(), false);
    self()->seen_time = machine->ticks;
    return emulator::exchange(word, [&](u64 before) { return before == expected ? value : before; });
}

u64 nanoseconds() {
    machine->yield();
    return machine->now_ns & ~511ull;  // the clock ticks in steps
}

template <class T>
static T ordinary(const void* at) {
    machine->maybe_yield();
    return emulator::load<T>(at, View::ANY_SINCE);
}

Bytes16 load_relaxed_sys_16(const u8* at) {
    machine->yield();
    return emulator::load<Bytes16>(at, View::STRONG);
}

void store_relaxed_sys_16(u8* at, Bytes16 value) { emulator::store(at, value, machine->delay()); }

Bytes16 load_line_part(const u8* line, u32 part) {
    emulator::line_part(const_cast<u8*>(line), part, false);
    return {self()->wide[0], self()->wide[1]};
}

void store_line_part(u8* line, u32 part, Bytes16 value) {
    self()->wide[0] = value.low;
    self()->wide[1] = value.high;
    emulator::line_part(line, part, true);
}

Bytes16 load_16(const u8* at) { return ordinary<Bytes16>(at); }
u64 load_8(const void* at) { return ordinary<u64>(at); }
u32 load_4(const void* at) { return ordinary<u32>(at); }
u8 load_byte(const u8* at) { return ordinary<u8>(at); }
void store_16(u8* at, Bytes16 value) { emulator::store(at, value, machine->store_delay()); }
void store_8(void* at, u64 value) { emulator::store(at, value, machine->store_delay()); }
void store_4(void* at, u32 value) { emulator::store(at, value, machine->store_delay()); }
void store_byte(u8* at, u8 value) { emulator::store(at, value, machine->store_delay()); }

void shared_store_16(u32 at, Bytes16 value) { emulator::shared_store(at, value); }
Bytes16 shared_load_16(u32 at) { return emulator::shared_load<Bytes16>(at); }
void shared_store_8(u32 at, u64 value) { emulator::shared_store(at, value); }
u64 shared_load_8(u32 at) { return emulator::shared_load<u64>(at); }
void shared_store_4(u32 at, u32 value) { emulator::shared_store(at, value); }
u32 shared_load_4(u32 at) { return emulator::shared_load<u32>(at); }
void barrier_of_warps(u32 number, u32 threads) { emulator::named_barrier(number, threads); }

}  // namespace raymoe::ptx
