// Bulk copies of raymoe/base/ptx.cuh, and the barriers on which their loads complete.
//
// A load reads global memory at a random later moment, no later than it completes. It may return the bytes of any time
// since the last proxy fence before it: it need not see data that was acquired after that fence.
//
// A store reads its stage at a random later moment, and writes at another. A wait for reading completes the first step,
// a full wait both. After that only the thread that waited must see the bytes, until it releases them.

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "raymoe/base/ptx.cuh"

namespace emulator {

namespace {

void turn(ByteBarrier& barrier) {
    if (barrier.missing == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.over.forget();
        barrier.over.take(barrier.arriving);
        barrier.over_clocks = std::move(barrier.arriving_clocks);
        barrier.arriving_clocks = {};
        barrier.over_seen = barrier.arriving_seen;
        barrier.found_over.clear();
        barrier.missing = barrier.arrivals;
        for (Thread* each : barrier.waiting) {
            machine->make_ready(each);
        }
        barrier.waiting.clear();
    }
}

void check_stage(u32 shared, u32 bytes) {
    const Block& block = *self()->block;
    if (shared % 16 != 0 || bytes % 16 != 0 || bytes == 0 || shared + static_cast<u64>(bytes) > block.shared_bytes) {
        machine->fail("a bulk copy of " + std::to_string(bytes) + " bytes at " + std::to_string(shared) +
                      " of shared memory, which has " + std::to_string(block.shared_bytes));
    }
}

struct Load {
    Block* block;
    Region* region;
    const u8* global;
    u32 shared, bytes, barrier;
    u64 proxy_time;
};

void land(const Load& load) {
    const ProxyView view{load.block->launch->rank->number, load.proxy_time};
    for (u32 at = 0; at < load.bytes; at += LINE) {
        view.read_line(*load.region, load.global + at, load.block->shared + load.shared + at);
    }
    complete_load(*load.block, load.barrier, load.bytes);
}

void read_stage(BulkStore& store) {
    if (store.read) {
        return;
    }
    const Block& block = *store.owner->block;
    store.read = true;
    store.data.assign(block.shared + store.shared, block.shared + store.shared + store.bytes);
}

}  // namespace

ByteBarrier& byte_barrier(u32 at) {
    auto& known = self()->block->byte_barriers;
    const auto found = known.find(at);
    if (found == known.end() || !found->second.valid) {
        machine->fail("no barrier is initialised in shared memory at " + std::to_string(at));
    }
    if (!knows(self(), found->second.initialised)) {
        machine->fail("uses the barrier at " + std::to_string(at) + ", which thread " +
                      std::to_string(found->second.initialised.thread) +
                      " has initialised, and nothing orders the two");
    }
    return found->second;
}

ProxyView::ProxyView(int rank, u64 since) : rank_(rank), now_(machine->ticks), time_(since) {
    if (machine->chance(3)) {
        time_ += machine->random() % (now_ - since + 1);
    }
}

void ProxyView::read_line(const Region& region, const u8* at, u8* into) const {
    const u64 time = machine->chance(8) ? now_ : time_;
    machine->memory.as_of(region, at, LINE, time, rank_, NOBODY, into);
    const Line* line = region.line_at(reinterpret_cast<u64>(at));
    for (std::size_t i = 0; line != nullptr && i < line->pending.size(); ++i) {
        const Store* store = line->pending[i];
        if (store->level == Level::GPU && store->rank == rank_ && store->gpu_time <= time) {
            std::memcpy(into + (store->at - at), store->bytes, store->size);
        }
    }
}

void begin_load(u32 shared, u32 bytes, u32 barrier) {
    check_stage(shared, bytes);
    if (!byte_barrier(barrier).fenced) {
        machine->fail("a bulk load on a barrier that was initialised without a fence after it");
    }
    note_bulk_load(shared, bytes, barrier);
    ++self()->block->loads_under_way;
}

void complete_load(Block& block, u32 at, u32 bytes) {
    --block.loads_under_way;
    ByteBarrier& barrier = block.byte_barriers[at];
    barrier.bytes -= bytes;
    turn(barrier);
}

void write_global(BulkStore& store, Arrival arrival) {
    if (store.written) {
        return;
    }
    store.written = true;
    Region& region = *machine->memory.find(reinterpret_cast<u64>(store.global));
    if (arrival == Arrival::NOW || machine->chance(3)) {
        const u64 now = machine->ticks;
        machine->memory.write(region, store.global, store.data.data(), store.bytes,
                              {now, now, store.rank, store.block});
        return;
    }
    for (u32 at = 0; at < store.bytes; at += LINE) {
        add_store(store.owner, region, store.global + at, store.data.data() + at, LINE, machine->long_delay());
    }
}

}  // namespace emulator

namespace raymoe::ptx {

using emulator::BulkStore;
using emulator::machine;
using emulator::self;
using emulator::Thread;

void barrier_init(u32 barrier, u32 arrivals) {
    if (barrier % 8 != 0 || barrier + 8 > self()->block->shared_bytes) {
        machine->fail("a barrier at " + std::to_string(barrier) + " of shared memory: not aligned to 8, or outside");
    }
    emulator::ByteBarrier made;
    made.arrivals = made.missing = arrivals;
    made.initialised = {self()->index, self()->count};
    made.arriving.number = self()->block->lists++;
    made.over.number = self()->block->lists++;
    auto& kept = self()->block->byte_barriers[barrier];
    // A new life begins in an even phase. Loads that completed in the last one are behind it.
    made.phase = kept.arrivals == 0 ? 0 : (kept.phase + 2) & ~1ull;
    kept = made;
    self()->unfenced_barriers.push_back(barrier);
}

void barrier_invalidate(u32 barrier) {
    machine->maybe_yield();
    auto& found = emulator::byte_barrier(barrier);
    if (!found.waiting.empty() || found.bytes != 0) {
        machine->fail("the barrier at " + std::to_string(barrier) + " is invalidated while it is in use");
    }
    found.valid = false;
}

void fence_barrier_init() {
    for (const u32 barrier : self()->unfenced_barriers) {
        self()->block->byte_barriers[barrier].fenced = true;
    }
    self()->unfenced_barriers.clear();
}

void barrier_expect(u32 barrier, u32 bytes) {
    auto& found = emulator::byte_barrier(barrier);
    emulator::for_each_known(self(), [&](emulator::Known& known) { found.arriving.learn(known); });
    found.arriving_seen = std::max(found.arriving_seen, self()->seen_time);
    emulator::release_clocks(found.arriving_clocks);
    if (found.missing == 0) {
        machine->fail("one more arrival than the barrier at " + std::to_string(barrier) + " waits for in a phase");
    }
    --found.missing;
    found.bytes += bytes;
    if (found.bytes >= 1 << 20) {
        machine->fail("a barrier is told to expect 2^20 bytes or more");
    }
    emulator::turn(found);
}

void barrier_arrive(u32 barrier) {
    machine->maybe_yield();
    barrier_expect(barrier, 0);
}

bool barrier_is_over(u32 barrier, u32 parity) {
    machine->maybe_yield();
    auto& found = emulator::byte_barrier(barrier);
    const bool over = (found.phase & 1) != parity;
    if (over) {
        Thread* me = self();
        me->known.learn(found.over);
        me->seen_time = std::max(me->seen_time, found.over_seen);
        emulator::acquire_clocks(found.over_clocks);
        found.found_over.push_back({me->index, me->count});
    }
    return over;
}

bool barrier_try_wait(u32 barrier, u32 parity) {
    const bool over = barrier_is_over(barrier, parity);
    if (!over) {
        Thread* me = self();
        me->doing = "waits for the bytes of the barrier at";
        me->where = 0;
        me->what = barrier;
        emulator::byte_barrier(barrier).waiting.push_back(me);
        machine->block_thread();
    }
    return over;
}

void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
    machine->maybe_yield();
    Thread* me = self();
    auto& region = emulator::checked(global, bytes, 16, "bulk loads");
    emulator::begin_load(shared, bytes, barrier);
    const emulator::Load load{me->block, &region, static_cast<const u8*>(global), shared, bytes, barrier,
                              me->proxy_time};
    machine->later(machine->delay(), [load] { emulator::land(load); });
}

void bulk_store(void* global, u32 shared, u32 bytes) {
    machine->maybe_yield();
    Thread* me = self();
    emulator::checked(global, bytes, 16, "bulk stores");
    emulator::check_stage(shared, bytes);
    emulator::note_proxy_read(me, {shared, bytes}, "bulk stores out of");
    auto store = std::make_shared<BulkStore>();
    store->global = static_cast<u8*>(global);
    store->shared = shared;
    store->bytes = bytes;
    store->owner = me;
    store->block = me->block->number;
    store->rank = me->block->launch->rank->number;
    me->open.push_back(store);
    machine->later(machine->long_delay(), [store] {
        if (store->written) {
            return;
        }
        emulator::read_stage(*store);
        machine->later(machine->long_delay(), [store] { emulator::write_global(*store, emulator::Arrival::NOW); });
    });
}

void bulk_commit() {
    Thread* me = self();
    me->groups.push_back(std::move(me->open));
    me->open.clear();
}

void bulk_wait_for(u32 younger, bool only_read) {
    machine->yield();
    Thread* me = self();
    const std::size_t count = me->groups.size() < younger ? 0 : me->groups.size() - younger;
    for (std::size_t i = 0; i < count; ++i) {
        for (auto& store : me->groups[i]) {
            emulator::read_stage(*store);
            if (!only_read) {
                emulator::write_global(*store, emulator::Arrival::LATER);
            }
        }
    }
    const auto written = [](const auto& store) { return store->written; };
    while (!me->groups.empty() && std::all_of(me->groups.front().begin(), me->groups.front().end(), written)) {
        me->groups.pop_front();
    }
}

void prefetch_if(bool wanted, const void* at, u32 bytes) {
    if (wanted) {
        emulator::checked(at, bytes, 16, "prefetches");
    }
}

void fence_proxy_async_shared() {
    machine->maybe_yield();
    emulator::fence_clocks();
}

void fence_proxy_async() {
    fence_proxy_async_shared();
    emulator::publish_known(self(), false);
    self()->proxy_time = std::max(self()->proxy_time, self()->seen_time);
}

}  // namespace raymoe::ptx
