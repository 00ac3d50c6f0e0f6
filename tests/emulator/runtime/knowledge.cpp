// Which thread knows of which stores: barriers of warps and blocks, and the stores that a release must publish.
//
// Of a warp's collectives only __syncwarp orders memory: it "guarantees memory ordering among threads participating in
// the barrier" (CUDA C++ Programming Guide). Shuffles, votes, matches and reductions make threads converge and nothing
// more: "These intrinsics do not imply a memory barrier. They do not guarantee any memory ordering" (the same).

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

void Known::forget_done() {
    stores.erase(std::remove_if(stores.begin(), stores.end(), [](Store* each) { return each->level != Level::THREAD; }),
                 stores.end());
}

void Known::take(Known& from) {
    for (Store* store : from.stores) {
        if (store->level == Level::THREAD) {
            from.let_go(store);
            hold(store);
        }
    }
    from.stores.clear();
    if (stores.size() > 64) {
        forget_done();
    }
}

void Known::learn(const Known& from) {
    for (Store* store : from.stores) {
        if (store->level == Level::THREAD) {
            hold(store);
        }
    }
}

void Known::forget() {
    for (Store* store : stores) {
        let_go(store);
    }
    stores.clear();
}

void Known::let_go(Store* store) {
    if (holds(store)) {
        store->holders[number / 64] &= ~(1ull << number % 64);
    }
}

void Known::hold(Store* store) {
    if (holds(store)) {
        return;
    }
    if (store->holders.size() <= number / 64) {
        store->holders.resize(number / 64 + 1);
    }
    store->holders[number / 64] |= 1ull << number % 64;
    stores.push_back(store);
}

namespace {

bool takes_part(const BlockBarrier& barrier, const Warp* warp) {
    return std::find(barrier.members.begin(), barrier.members.end(), warp) != barrier.members.end();
}

// Gives all threads the latest times that any of them has seen.
void share_times(const std::vector<Thread*>& threads) {
    u64 seen = 0, proxy = 0;
    for (const Thread* each : threads) {
        seen = std::max(seen, each->seen_time);
        proxy = std::max(proxy, each->proxy_time);
    }
    for (Thread* each : threads) {
        each->seen_time = seen;
        each->proxy_time = proxy;
    }
}

void release(Block* block, u32 number) {
    BlockBarrier& barrier = block->barriers[number];
    for (Thread* each : barrier.waiting) {
        barrier.known.take(each->known);
        barrier.known.take(each->warp->known);
        if (number != 0 && !takes_part(barrier, each->warp)) {
            barrier.members.push_back(each->warp);
        }
    }
    for (u32 other = 1; number == 0 && other < NAMED_BARRIERS; ++other) {
        barrier.known.take(block->barriers[other].known);
    }
    share_times(barrier.waiting);
    synchronise(barrier.waiting);
    for (Thread* each : barrier.waiting) {
        each->result = barrier.vote;
        each->doing = "runs";
        machine->make_ready(each);
    }
    barrier.waiting.clear();
    barrier.vote = true;
}

bool complete(const Block* block, const BlockBarrier& barrier) {
    return !barrier.waiting.empty() && barrier.waiting.size() == (barrier.threads ? barrier.threads : block->alive);
}

bool wait_at(u32 number, u32 threads, bool vote) {
    Thread* me = self();
    BlockBarrier& barrier = me->block->barriers[number];
    machine->maybe_yield();
    barrier.threads = threads;
    barrier.vote = barrier.vote && vote;
    barrier.waiting.push_back(me);
    me->doing = "waits at the block's barrier number";
    me->where = 0;
    me->what = number;
    me->state = State::BLOCKED;
    machine->unready(me);
    if (complete(me->block, barrier)) {
        release(me->block, number);
    }
    machine->yield();
    return me->result != 0;
}

// Computes the result of a collective for each thread of a warp.
void give_results(Warp& warp, Collective kind) {
    u64 votes = 0, bits = 0, largest = 0;
    const bool taken = kind == Collective::WARPGROUP && take_step(warp);
    for (u32 lane = 0; lane < 32; ++lane) {
        largest = std::max<u64>(largest, warp.values[lane]);
        votes |= warp.values[lane] != 0 ? 1ull << lane : 0;
        bits |= warp.values[lane];
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 argument = warp.arguments[lane];
        u64& result = warp.threads[lane]->result;
        switch (kind) {
            case Collective::SYNC: result = 0; break;
            case Collective::SHUFFLE: result = warp.values[argument % 32]; break;
            case Collective::SHUFFLE_UP: result = warp.values[lane >= argument ? lane - argument : lane]; break;
            case Collective::SHUFFLE_XOR: result = warp.values[(lane ^ argument) % 32]; break;
            case Collective::BALLOT: result = votes; break;
            case Collective::ALL: result = votes == 0xFFFFFFFF; break;
            case Collective::OR: result = bits; break;
            case Collective::MAX: result = largest; break;
            case Collective::WARPGROUP: result = taken; break;
            case Collective::TRANSPOSED: {
                const u32 row = lane % 4 * 2, column = lane / 4;
                const auto element = [&](u32 r) { return warp.values[r * 4 + column / 2] >> column % 2 * 16 & 0xFFFF; };
                result = element(row) | element(row + 1) << 16;
                break;
            }
            case Collective::MATCH:
                result = 0;
                for (u32 other = 0; other < 32; ++other) {
                    result |= warp.values[other] == warp.values[lane] ? 1ull << other : 0;
                }
                break;
        }
    }
}

}  // namespace

// Barriers do not wait for threads that have ended.
void release_barriers_of(Block* block) {
    if (complete(block, block->barriers[0])) {
        release(block, 0);
    }
}

bool block_barrier(bool vote) {
    return wait_at(0, 0, vote);
}

void named_barrier(u32 number, u32 threads) {
    if (number == 0 || number >= NAMED_BARRIERS || threads % 32 != 0) {
        machine->fail("a barrier of " + std::to_string(threads) + " threads with number " + std::to_string(number) +
                      "; numbers are 1 to 15, threads whole warps");
    }
    wait_at(number, threads, true);
}

u64 collective(Collective kind, u32 mask, u64 value, u32 argument) {
    settle_plain();
    Thread* me = self();
    Warp& warp = *me->warp;
    if (machine->random() % 16 == 0) {
        machine->yield();
    }
    if (mask != 0xFFFFFFFF || warp.threads.size() != 32) {
        machine->fail("the emulator supports only collectives of whole warps");
    }
    if (warp.ended != 0) {
        machine->fail("a collective of its warp, in which some threads have ended");
    }
    if (warp.arrived != 0 && warp.kind != kind) {
        machine->fail("its warp is at two different collectives at once");
    }
    const u32 lane = me->index % 32;
    warp.kind = kind;
    warp.values[lane] = value;
    warp.arguments[lane] = argument;
    if (++warp.arrived < 32) {
        me->doing = "waits for its warp";
        me->where = 0;
        machine->block_thread();
        return me->result;
    }
    give_results(warp, kind);
    ++warp.convergences;
    for (Thread* each : warp.threads) {
        if (kind == Collective::SYNC) {
            warp.known.take(each->known);
        }
        each->doing = "runs";
        if (each != me) {
            machine->make_ready(each);
        }
    }
    if (kind == Collective::SYNC) {
        share_times(warp.threads);
        synchronise(warp.threads);
    }
    warp.arrived = 0;
    return me->result;
}

void for_each_known(Thread* thread, const std::function<void(Known&)>& visit) {
    visit(thread->known);
    visit(thread->warp->known);
    for (u32 number = 0; number < NAMED_BARRIERS; ++number) {
        BlockBarrier& barrier = thread->block->barriers[number];
        if (number == 0 || takes_part(barrier, thread->warp)) {
            visit(barrier.known);
        }
    }
}

bool knows(const Thread* thread, const Store* store, u64 time) {
    if (store->level == Level::GPU) {
        return store->rank == thread->block->launch->rank->number &&
               (store->gpu_time <= time || store->block == thread->block->number);
    }
    const Block& block = *thread->block;
    if (store->block != block.number || store->holders.empty()) {
        return false;
    }
    if (thread->known.holds(store) || thread->warp->known.holds(store) || block.barriers[0].known.holds(store)) {
        return true;
    }
    return std::any_of(block.barriers + 1, block.barriers + NAMED_BARRIERS, [&](const BlockBarrier& barrier) {
        return barrier.known.holds(store) && takes_part(barrier, thread->warp);
    });
}

void publish_known(Thread* thread, bool everywhere) {
    settle_plain();
    Rank& rank = *thread->block->launch->rank;
    for_each_known(thread, [&](Known& known) {
        for (Store* store : known.stores) {
            if (store->level != Level::THREAD) {
                continue;
            }
            if (everywhere) {
                machine->memory.publish(store, machine->ticks);
            } else {
                store->level = Level::GPU;
                store->gpu_time = machine->ticks;
                store->holders.clear();
                rank.gpu_stores.push_back(store);
            }
        }
        known.stores.clear();
    });
    if (everywhere) {
        for (Store* store : rank.gpu_stores) {
            machine->memory.publish(store, machine->ticks);
        }
        rank.gpu_stores.clear();
    }
}

void* static_shared(u32 number, u64 bytes) {
    Block& block = *self()->block;
    auto [found, is_new] = block.statics.try_emplace({number, bytes}, 0);
    if (is_new) {
        found->second = (block.static_used + 15) & ~15u;
        block.static_used = found->second + static_cast<u32>(bytes);
        if (block.static_used > STATIC_BYTES) {
            machine->fail("static shared memory of more than " + std::to_string(STATIC_BYTES) + " bytes");
        }
    }
    return block.shared + found->second;
}

u8* dynamic_shared() {
    return self()->block->shared + STATIC_BYTES;
}

// May be outside: threads that drive no ring compute where theirs would be. Accesses are checked.
u64 shared_offset(const void* pointer) {
    return static_cast<u64>(static_cast<const u8*>(pointer) - self()->block->shared);
}

}  // namespace emulator
