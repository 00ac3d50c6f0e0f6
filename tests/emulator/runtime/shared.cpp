#include "shared.h"

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

bool Clock::knows(u32 thread, u32 count) const {
    if (count <= warps[thread / 32]) {
        return true;
    }
    for (const Stamp& each : threads) {
        if (each.thread == thread) {
            return count <= each.count;
        }
    }
    return false;
}

void Clock::learn(u32 thread, u32 count) {
    if (count <= warps[thread / 32]) {
        return;
    }
    for (Stamp& each : threads) {
        if (each.thread == thread) {
            each.count = std::max(each.count, count);
            return;
        }
    }
    threads.push_back({thread, count});
}

void Clock::join(const Clock& other) {
    for (u32 warp = 0; warp < MOST_WARPS; ++warp) {
        warps[warp] = std::max(warps[warp], other.warps[warp]);
    }
    for (const Stamp& each : other.threads) {
        learn(each.thread, each.count);
    }
}

void Clock::forget_known() {
    threads.erase(std::remove_if(threads.begin(), threads.end(),
                                 [this](const Stamp& each) { return each.count <= warps[each.thread / 32]; }),
                  threads.end());
}

void synchronise(const std::vector<Thread*>& threads) {
    Clocks all;
    u32 most[MOST_WARPS] = {}, fenced[MOST_WARPS], here[MOST_WARPS] = {};
    std::fill(fenced, fenced + MOST_WARPS, ~0u);
    for (const Thread* each : threads) {
        const u32 warp = each->index / 32;
        most[warp] = std::max(most[warp], each->count);
        fenced[warp] = std::min(fenced[warp], each->fenced_count);
        ++here[warp];
        if (here[warp] == 1 || !each->clocks.known.threads.empty() || !each->clocks.fenced.threads.empty() ||
            std::memcmp(each->clocks.known.warps, threads[0]->clocks.known.warps, sizeof(Clock::warps)) != 0 ||
            std::memcmp(each->clocks.fenced.warps, threads[0]->clocks.fenced.warps, sizeof(Clock::warps)) != 0) {
            all.join(each->clocks);
        }
    }
    for (const Thread* each : threads) {
        const u32 warp = each->index / 32;
        if (here[warp] + __builtin_popcount(each->warp->ended) >= each->warp->threads.size()) {
            all.known.warps[warp] = std::max(all.known.warps[warp], most[warp]);
            all.fenced.warps[warp] = std::max(all.fenced.warps[warp], fenced[warp]);
        } else {
            all.known.learn(each->index, each->count);
        }
    }
    for (const Thread* each : threads) {
        all.fenced.learn(each->index, each->fenced_count);
    }
    all.known.forget_known();
    all.fenced.forget_known();
    for (Thread* each : threads) {
        each->clocks = all;
        each->count = most[each->index / 32] + 1;
    }
}

void release_clocks(Clocks& into) {
    Thread* me = self();
    into.join(me->clocks);
    into.known.learn(me->index, me->count++);
    into.fenced.learn(me->index, me->fenced_count);
}

void acquire_clocks(const Clocks& from) {
    self()->clocks.join(from);
}

void fence_clocks() {
    Thread* me = self();
    me->fenced_count = me->count++;
}

namespace {

[[noreturn]] void race(const Access& access, const char* does, const std::string& other) {
    machine->fail(std::string(does) + " " + std::to_string(access.bytes) + " bytes of shared memory at " +
                  std::to_string(access.at) + ", which " + other);
    __builtin_unreachable();  // `fail` does not return to a thread
}

std::string thread_of(u32 index) {
    return "thread " + std::to_string(index);
}

bool known(const Thread* me, u32 thread, u32 count) {
    return thread == me->index || me->clocks.known.knows(thread, count);
}

bool known_fenced(const Thread* me, u32 thread, u32 count) {
    return (thread == me->index && count <= me->fenced_count) || me->clocks.fenced.knows(thread, count);
}

// Whether the thread knows that a bulk load's bytes have come: it, or a thread before it, found the phase over.
bool knows_landed(const Thread* me, const Shadow& word) {
    const u64 load = (word.writer + 1ull) << 32 | word.count;
    u64& remembered = me->landed[word.writer % 16];
    if (remembered == load) {
        return true;
    }
    const ByteBarrier& barrier = me->block->byte_barriers.at(word.writer * 8);
    const u32 phase = static_cast<u32>(barrier.phase);
    const bool landed = phase != word.count &&
                        (phase != word.count + 1 ||  // long ago: the barrier has been used again since then
                         std::any_of(barrier.found_over.begin(), barrier.found_over.end(),
                                     [me](const Stamp& each) { return known(me, each.thread, each.count); }));
    if (landed) {
        remembered = load;  // a thread does not forget what it knows
    }
    return landed;
}

Shadow* shadow_at(u32 at) {
    return self()->block->shadow + at / 4;
}

// Calls `look(word)` for the shadow of each word of the range.
template <class Look>
void for_each_word(u32 at, u32 bytes, Look look) {
    Shadow* const end = shadow_at(at + bytes + 3);
    for (Shadow* word = shadow_at(at); word != end; ++word) {
        look(*word);
    }
}

template <class Knows>
const char* unknown_read(const Shadow& word, Knows knows, u32& thread) {
    for (const Reads& reads : word.reads) {
        for (u32 left = reads.threads; left != 0; left &= left - 1) {
            thread = reads.warp * 32 + __builtin_ctz(left);
            if (!knows(reads, thread)) {
                return "has loaded";
            }
        }
    }
    return nullptr;
}

void add_read(const Thread* me, Shadow& word, bool flag) {
    const u32 warp = me->index / 32;
    Reads* into = nullptr;
    for (Reads& reads : word.reads) {
        // Reads that happened before this one: a store after this one comes after them too.
        if (reads.threads == 0 || reads.count <= me->clocks.known.warps[reads.warp]) {
            reads = {};
        }
        if (reads.threads == 0 || reads.warp == warp) {
            into = &reads;
            break;
        }
    }
    if (into == nullptr) {  // of more than two warps only the last ones are kept
        into = &word.reads[machine->ticks % 2];
        *into = {};
    }
    into->warp = static_cast<u16>(warp);
    into->flag = into->flag && flag;
    into->threads |= 1u << me->index % 32;
    into->count = std::max(into->count, me->count);
    into->convergence = me->warp->convergences;
}

}  // namespace

void note_shared_load(const Access& access) {
    const Thread* me = self();
    for_each_word(access.at, access.bytes, [&](Shadow& word) {
        switch (word.kind) {
            case Writer::NOBODY: break;
            case Writer::THREAD:
            case Writer::ATOMIC:
                // A flag that a warp polls while one of its threads may store it.
                if (access.flag && word.flag && word.writer / 32 == me->index / 32) {
                    break;
                }
                if (!known(me, word.writer, word.count) && !(access.atomic && word.kind == Writer::ATOMIC)) {
                    race(access, "loads", thread_of(word.writer) + " has stored, and nothing orders the two");
                }
                break;
            case Writer::BULK:
                if (!knows_landed(me, word)) {
                    race(access, "loads", "a bulk load fills, and the thread has not found that load complete");
                }
        }
        add_read(me, word, access.flag);
    });
}

void note_shared_store(const Access& access) {
    const Thread* me = self();
    check_products(access, "stores");
    const bool same = access.value != nullptr &&
                      std::memcmp(me->block->shared + access.at, access.value, access.bytes) == 0;
    for_each_word(access.at, access.bytes, [&](Shadow& word) {
        const bool by_thread = word.kind == Writer::THREAD || word.kind == Writer::ATOMIC;
        if (by_thread && !known(me, word.writer, word.count) && !same &&
            !(access.atomic && word.kind == Writer::ATOMIC)) {
            race(access, "stores", thread_of(word.writer) + " has stored, and nothing orders the two");
        }
        if (word.kind == Writer::BULK && !knows_landed(me, word)) {
            race(access, "stores", "a bulk load fills, and the thread has not found that load complete");
        }
        // A load is complete before its thread takes part in a collective, so a later store of its warp may follow.
        // follow.
        const auto may_follow = [&](const Reads& reads, u32 thread) {
            return known(me, thread, reads.count) ||
                   (reads.warp == me->index / 32 && (reads.convergence != me->warp->convergences ||
                                                     (access.flag && word.flag && reads.flag)));
        };
        u32 reader = 0;
        if (!access.atomic && !same && unknown_read(word, may_follow, reader)) {
            race(access, "stores", thread_of(reader) + " has loaded, and nothing orders the two");
        }
        word = {me->count, static_cast<u16>(me->index), access.atomic ? Writer::ATOMIC : Writer::THREAD, access.flag,
                {}};
    });
}

void note_bulk_load(u32 at, u32 bytes, u32 barrier) {
    const Thread* me = self();
    const u32 phase = static_cast<u32>(me->block->byte_barriers.at(barrier).phase);
    const Access access{at, bytes};
    check_products(access, "bulk loads into");
    for_each_word(at, bytes, [&](Shadow& word) {
        const bool by_thread = word.kind == Writer::THREAD || word.kind == Writer::ATOMIC;
        if (by_thread && !known_fenced(me, word.writer, word.count)) {
            race(access, "bulk loads into",
                 thread_of(word.writer) + " has stored, and no proxy fence stands between the two");
        }
        if (word.kind == Writer::BULK && !knows_landed(me, word)) {
            race(access, "bulk loads into", "another bulk load fills");
        }
        u32 reader = 0;
        if (unknown_read(word, [&](const Reads& reads, u32 thread) { return known_fenced(me, thread, reads.count); },
                         reader)) {
            race(access, "bulk loads into",
                 thread_of(reader) + " has loaded, and no proxy fence stands between the two");
        }
        word = {phase, static_cast<u16>(barrier / 8), Writer::BULK, false, {}};
    });
}

bool knows(const Thread* me, Stamp stamp) {
    return known(me, stamp.thread, stamp.count);
}

void note_proxy_read(const Thread* me, const Access& access, const char* does) {
    Shadow checked{};
    for_each_word(access.at, access.bytes, [&](Shadow& word) {
        if (word.kind == checked.kind && word.writer == checked.writer && word.count == checked.count) {
            return;
        }
        checked = word;
        const bool by_thread = word.kind == Writer::THREAD || word.kind == Writer::ATOMIC;
        if (by_thread && !known_fenced(me, word.writer, word.count)) {
            race(access, does, thread_of(word.writer) + " has stored, and no proxy fence stands between the two");
        }
        if (word.kind == Writer::BULK && !knows_landed(me, word)) {
            race(access, does, "a bulk load fills, and " + thread_of(me->index) + " has not found that load complete");
        }
    });
}

void note_product_read(const Thread* me, const Access& access) {
    for_each_word(access.at, access.bytes, [&](const Shadow& word) {
        if (word.kind == Writer::NOBODY) {
            race(access, "multiplies", "nothing has written");
        }
    });
    note_proxy_read(me, access, "multiplies");
}

}  // namespace emulator
