// Begins and ends launches, and checks what a block must have finished when its threads end.

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

namespace {

void thread_main() {
    Thread* me = self();
    me->block->launch->kernel(me->block->launch->params);
    settle_plain();
    me->state = State::ENDED;
    machine->yield();
}

void lay_out(Block& block, u32 dynamic_bytes) {
    constexpr u64 PAGE = 4096, GUARD = 1 << 20;
    block.shared_bytes = STATIC_BYTES + dynamic_bytes;
    const u32 rounded = (block.shared_bytes + 127) & ~127u;
    const u64 each = (rounded + PAGE - 1) / PAGE * PAGE;
    const u64 shadow_bytes = (rounded / 4 * sizeof(Shadow) + PAGE - 1) / PAGE * PAGE;
    block.mapped_bytes = each + GUARD + shadow_bytes;
    block.mapping = mmap(nullptr, block.mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    u8* at = static_cast<u8*>(block.mapping);
    mprotect(at + each, GUARD, PROT_NONE);  // a plain access after the end of the block's memory faults
    block.shared = at + each - rounded;
    block.shadow = reinterpret_cast<Shadow*>(at + each + GUARD);  // zeros: no thread has stored or loaded
    std::memset(block.shared, 0xFB, block.shared_bytes);  // stands for arbitrary old contents
}

}  // namespace

Block::~Block() {
    if (mapping != nullptr) {
        munmap(mapping, mapped_bytes);
    }
}

// Begins the next launch of a rank: after the last one, or an early one beside it.
void Machine::begin_launch(Rank& rank) {
    std::unique_ptr<Launch>& place = rank.current ? rank.after : rank.current;
    place = std::move(rank.stream.front());
    rank.stream.pop_front();
    Launch& launch = *place;
    if (launch.call != nullptr) {
        if (launch.call() != 0) {
            fail("an action of the host in the stream of rank " + std::to_string(rank.number) + " failed");
        }
        return end_launch(rank);
    }
    begin_blocks(launch);
}

void Machine::begin_blocks(Launch& launch) {
    launch.alive = launch.holding = launch.blocks;
    const bool beside = launch.rank->after.get() == &launch;
    const u32 with_sms = beside && chance(2) ? random() % (launch.blocks + 1) : launch.blocks;
    for (u32 index = 0; index < launch.blocks; ++index) {
        launch.grid.push_back(std::make_unique<Block>());
        Block& block = *launch.grid.back();
        block.launch = &launch;
        block.index = index;
        block.number = blocks_begun++;
        block.alive = launch.threads;
        block.stalled_until = chance(2) ? ticks + delay() : 0;
        lay_out(block, launch.dynamic_bytes);
        for (BlockBarrier& barrier : block.barriers) {
            barrier.known.number = block.lists++;
        }
        for (u32 i = 0; i < launch.threads; ++i) {
            if (i % 32 == 0) {
                block.warps.push_back(std::make_unique<Warp>());
                block.warps.back()->block = &block;
                block.warps.back()->known.number = block.lists++;
            }
            block.threads.push_back(std::make_unique<Thread>());
            Thread& thread = *block.threads.back();
            thread.block = &block;
            thread.warp = block.warps.back().get();
            thread.index = i;
            thread.known.number = block.lists++;
            thread.seen_time = thread.proxy_time = ticks;
            thread.warp->threads.push_back(&thread);
            thread.fiber.prepare(thread_main);
            if (index < with_sms) {
                make_ready(&thread);
            } else {
                thread.doing = "has no SM before the kernel before it ends";
                launch.rank->waiting_for_end.push_back(&thread);
            }
        }
    }
}

void Machine::end_thread(Thread* thread) {
    unready(thread);
    Block* block = thread->block;
    thread->warp->ended |= 1u << thread->index % 32;
    --block->alive;
    if (thread->warp->arrived != 0) {
        running = thread;
        failed = true;
        error = describe(thread) + ": it ends while threads of its warp wait for it";
        return;
    }
    if (block->alive != 0) {
        release_barriers_of(block);
        return;
    }
    for (auto& each : block->threads) {
        for (auto& group : each->groups) {
            for (auto& store : group) {
                if (!store->read) {
                    failed = true;
                    error = describe(each.get()) + ": its block ends while bulk stores still read its shared memory";
                }
            }
        }
        if (!each->open.empty()) {
            failed = true;
            error = describe(each.get()) + ": it ends with bulk stores that belong to no group";
        }
    }
    if (const char* why = unfinished_steps(*block)) {
        failed = true;
        error = describe(thread) + ": its block ends " + why;
    }
    if (block->loads_under_way != 0) {
        failed = true;
        error = describe(thread) + ": its block ends while bulk loads into its shared memory are in flight";
    }
    --block->launch->alive;
    block->launch->holding -= block->lets_next ? 0 : 1;
}

// When a kernel has ended, its own GPU sees its stores. Peers see them later, unless a later kernel of the stream
// releases them at system scope. The host sees only a kernel's stores to its own rank's memory.
void Machine::end_launch(Rank& rank) {
    for (auto& block : rank.current->grid) {
        for (auto& thread : block->threads) {
            for (auto& group : thread->groups) {
                for (auto& store : group) {
                    write_global(*store, Arrival::LATER);
                }
            }
            publish_known(thread.get(), false);
        }
    }
    const auto settled = [&](Store* store) {
        if (memory.find(reinterpret_cast<u64>(store->at))->rank == rank.number) {
            memory.publish(store, ticks);
        }
        return store->level == Level::DONE;
    };
    auto& left = rank.gpu_stores;
    left.erase(std::remove_if(left.begin(), left.end(), settled), left.end());
    rank.current = std::move(rank.after);
    for (Thread* thread : rank.waiting_for_end) {
        thread->seen_time = thread->proxy_time = ticks;
        thread->doing = "runs";
        make_ready(thread);
    }
    rank.waiting_for_end.clear();
    rank.starts_at = ticks + (chance(2) ? delay() : 0);
}

}  // namespace emulator

namespace raymoe::ptx {

void wait_for_kernel_before() {
    using namespace emulator;
    Thread* me = self();
    Rank& rank = *me->block->launch->rank;
    machine->maybe_yield();
    if (rank.after.get() != me->block->launch) {
        return;
    }
    me->doing = "waits for the kernel before it";
    me->where = me->what = 0;
    rank.waiting_for_end.push_back(me);
    machine->block_thread();
}

void let_next_kernel_begin() {
    using namespace emulator;
    Block* block = self()->block;
    machine->maybe_yield();
    block->launch->holding -= block->lets_next ? 0 : 1;
    block->lets_next = true;
}

}  // namespace raymoe::ptx
