#include "machine.h"

#include <algorithm>
#include <csignal>
#include <cstdio>

EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Machine* machine = nullptr;

namespace {

constexpr u64 NS_A_TICK = 16;  // the most; on average a little more than half

// A plain access to unmapped memory ends the run; the error names the thread.
void on_fault(int number, siginfo_t* info, void*) {
    if (machine == nullptr || machine->running == nullptr) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    const auto address = reinterpret_cast<u64>(info->si_addr);
    machine->fail("a plain access to " + machine->memory.name_of(address) + ", which is not mapped");
}

// The handler runs on its own stack, because the fault may be the end of a fiber's stack.
class FaultHandler {
  public:
    FaultHandler() : stack_(64 << 10) {
        stack_t alternative{};
        alternative.ss_sp = stack_.data();
        alternative.ss_size = stack_.size();
        sigaltstack(&alternative, &stack_before_);
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &segv_before_);
        sigaction(SIGBUS, &action, &bus_before_);
    }
    ~FaultHandler() {
        sigaction(SIGSEGV, &segv_before_, nullptr);
        sigaction(SIGBUS, &bus_before_, nullptr);
        sigaltstack(&stack_before_, nullptr);
    }

  private:
    std::vector<char> stack_;
    stack_t stack_before_{};
    struct sigaction segv_before_{}, bus_before_{};
};

}  // namespace

// ---- chance ---------------------------------------------------------------------------------------------------------

u64 Machine::random() {  // splitmix64
    u64 z = random_state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

u64 Machine::delay() {
    const u64 kind = random() % 16;
    return random() % (kind < 9 ? 30 : kind < 14 ? 500 : 6000);
}

u64 Machine::long_delay() {
    const u64 kind = random() % 16;
    return random() % (kind < 5 ? 30 : kind < 10 ? 1000 : kind < 13 ? 10'000 : 200'000);
}

u64 Machine::store_delay() {
    return chance(3) ? NEVER : long_delay();
}

void Machine::later(u64 ticks_from_now, std::function<void()> action) {
    events.push(Event{ticks + ticks_from_now, ordered++, std::move(action)});
}

// ---- threads that can run -------------------------------------------------------------------------------------------

void Machine::make_ready(Thread* thread) {
    auto& ready = thread->block->launch->rank->ready;
    thread->state = State::READY;
    thread->ready_at = static_cast<u32>(ready.size());
    ready.push_back(thread);
}

void Machine::unready(Thread* thread) {
    auto& ready = thread->block->launch->rank->ready;
    ready[thread->ready_at] = ready.back();
    ready[thread->ready_at]->ready_at = thread->ready_at;
    ready.pop_back();
}

void Machine::maybe_yield() {
    if (random() % 8 == 0) {
        yield();
    }
    settle_plain();
}

void Machine::yield() {
    settle_plain();
    Thread* me = running;
    switch_context(me->fiber.context, scheduler);
}

void Machine::block_thread() {
    running->state = State::BLOCKED;
    unready(running);
    yield();
}

void Machine::fail(const std::string& reason) {
    if (!failed) {
        failed = true;
        error = running == nullptr ? reason : describe(running) + ": " + reason;
    }
    if (running != nullptr) {
        yield();
    }
}

std::string Machine::describe(const Thread* thread) const {
    const Block& block = *thread->block;
    char text[160];
    std::snprintf(text, sizeof text, "%s on rank %d, block %u, thread %u", block.launch->name.c_str(),
                  block.launch->rank->number, block.index, thread->index);
    return text;
}

// ---- the scheduler --------------------------------------------------------------------------------------------------

void Machine::reweigh() {
    reweigh_at = ticks + 200 + random() % 6000;
    for (auto& rank : ranks) {
        rank->weight = 1u << 2 * (random() % 4);
    }
}

Thread* Machine::pick() {
    u64 all = 0;
    for (auto& rank : ranks) {
        all += rank->ready.empty() ? 0 : rank->weight;
    }
    Thread* thread = nullptr;
    for (int tries = 0; tries < 8; ++tries) {
        u64 drawn = random() % all;
        for (auto& rank : ranks) {
            if (rank->ready.empty()) {
                continue;
            }
            if (drawn < rank->weight) {
                thread = rank->ready[random() % rank->ready.size()];
                break;
            }
            drawn -= rank->weight;
        }
        if (thread->stalled_until > ticks || thread->block->stalled_until > ticks) {
            continue;
        }
        if (!chance(200)) {
            return thread;
        }
        // This thread or its whole block is slow for a while; sometimes so long that others complete a run.
        u64& until = chance(4) ? thread->block->stalled_until : thread->stalled_until;
        until = ticks + random() % (chance(12) ? 60'000 : 4000);
    }
    return thread;
}

bool Machine::all_done() const {
    return std::all_of(ranks.begin(), ranks.end(), [](auto& rank) { return !rank->current && rank->stream.empty(); });
}

// Returns false when the run is over.
bool Machine::step() {
    while (!events.empty() && events.top().due <= ticks) {
        auto action = std::move(const_cast<Event&>(events.top()).action);
        events.pop();
        action();
    }
    u64 next = ~0ull;
    bool any = false;
    for (auto& rank : ranks) {
        if (rank->current && rank->current->call == nullptr && rank->current->alive == 0) {
            end_launch(*rank);
        }
        const bool beside = rank->current && !rank->after && rank->current->holding == 0;
        if (!rank->stream.empty() && (!rank->current || (beside && rank->stream.front()->early))) {
            if (rank->starts_at <= ticks) {
                begin_launch(*rank);
            }
            next = std::min(next, std::max(rank->starts_at, ticks + 1));
        }
        any = any || !rank->ready.empty();
    }
    if (failed) {
        return false;
    }
    ++ticks;
    now_ns += 1 + random() % NS_A_TICK;
    if (!any) {
        if (!events.empty()) {
            next = std::min(next, events.top().due);
        }
        if (next == ~0ull) {
            if (!all_done()) {
                failed = true;
                error = "no thread can continue: " + who_waits();
            }
            return false;
        }
        ticks = std::max(ticks, next);
        return true;
    }
    if (ticks >= reweigh_at) {
        reweigh();
    }
    if (ticks > most_ticks) {
        failed = true;
        error = "no end after " + std::to_string(ticks) + " steps: " + who_waits();
        return false;
    }
    running = pick();
    threadIdx = {running->index, 0, 0};
    blockIdx = {running->block->index, 0, 0};
    blockDim = {running->block->launch->threads, 1, 1};
    gridDim = {running->block->launch->blocks, 1, 1};
    shared = running->block->shared;
    shared_bytes = running->block->shared_bytes;
    switch_context(scheduler, running->fiber.context);
    if (!failed && running->state == State::ENDED) {
        end_thread(running);
    }
    running = nullptr;
    return !failed;
}

std::string Machine::who_waits() const {
    std::string text;
    std::map<std::string, std::pair<std::string, u32>> alike;  // by description: the first thread, the number
    for (auto& rank : ranks) {
        for (const Launch* launch : {rank->current.get(), rank->after.get()}) {
            if (launch == nullptr) {
                continue;
            }
            for (auto& block : launch->grid) {
                for (auto& thread : block->threads) {
                    if (thread->state == State::ENDED) {
                        continue;
                    }
                    char what[400];
                    const std::string where = thread->where ? machine->memory.name_of(thread->where) : "";
                    std::snprintf(what, sizeof what, "%s on rank %d, block %u: %s %s (%llu)", launch->name.c_str(),
                                  rank->number, block->index, thread->doing, where.c_str(), thread->what);
                    auto& found = alike[what];
                    found.first = found.second == 0 ? std::to_string(thread->index) : found.first;
                    ++found.second;
                }
            }
        }
    }
    for (auto& [what, who] : alike) {
        text += "\n  " + what + ", thread " + who.first +
                (who.second > 1 ? " and " + std::to_string(who.second - 1) + " more" : "");
    }
    return text;
}

bool Machine::run(u64 seed) {
    random_state = seed * 0xD1342543DE82EF95 + 1;
    failed = false;
    error.clear();
    reweigh_at = 0;
    const u64 begin = ticks, most = most_ticks;
    most_ticks = begin + most;
    for (auto& rank : ranks) {
        rank->starts_at = ticks + delay();
    }
    {
        FaultHandler handler;
        while (step()) {
        }
    }
    most_ticks = most;
    running = nullptr;
    clear();
    return !failed;
}

void Machine::clear() {
    // Operations in flight that no thread has waited for complete now.
    while (!failed && !events.empty()) {
        auto action = std::move(const_cast<Event&>(events.top()).action);
        events.pop();
        action();
    }
    events = {};
    for (auto& rank : ranks) {
        for (Store* store : rank->gpu_stores) {
            memory.publish(store, ticks);
        }
        rank->ready.clear();
        rank->gpu_stores.clear();
        rank->stream.clear();
        rank->waiting_for_end.clear();
        rank->after.reset();
        rank->current.reset();
    }
    memory.forget_past();
}

}  // namespace emulator
