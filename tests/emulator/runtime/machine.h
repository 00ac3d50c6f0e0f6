// The emulated machine: ranks with streams of launches, blocks, warps and threads, and what is under way between them.
//
// Every CUDA thread is a fiber; one OS thread runs them all. At each switching point (words, bulk copies, barriers, the
// clock) a seeded generator says who goes on. A seed and a program give one run, always the same.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "raymoe/cuda_words.cuh"
#include "shared.h"

namespace emulator {

constexpr u32 NAMED_BARRIERS = 16;
constexpr u64 NEVER = ~0ull;
constexpr u32 STATIC_BYTES = 1024;  // of a block, for static declarations: what raymoe/exchange/build.py leaves

struct Block;
struct Launch;
struct Rank;
struct Thread;

// What a thread, a warp or a block has been handed, and would publish by a release or a fence.
struct Known {
    std::vector<Store*> stores;

    void take(Known& from);  // leaves nothing there
    void learn(const Known& from);  // the stores, which stay there too
    void forget_done();
    void forget();

  private:
    void hold(Store* store);
    void let_go(Store* store);
};

// Out of a block's shared memory into global memory, in two steps, each of them some time later.
struct BulkStore {
    u8* global;
    u32 shared, bytes;
    Thread* owner;
    u32 block;  // its number in the run
    int rank;
    bool read = false, written = false;
    std::vector<u8> data;
};

// A barrier in shared memory that counts bytes, and hands what those who arrive know to those who find a phase over.
struct ByteBarrier {
    u32 arrivals = 0, missing = 0;
    long long bytes = 0;
    u64 phase = 0;
    bool fenced = false;
    Known arriving, over;  // in this phase; in the last one
    Clocks arriving_clocks, over_clocks;
    u64 arriving_seen = 0, over_seen = 0;  // the latest times
    std::vector<Thread*> waiting;
    std::vector<Stamp> found_over;  // who has found the last phase over, and when
};

// Eight neighbouring threads of a warp that move a line of 128 bytes in one instruction.
struct Octet {
    u32 arrived = 0;
    u8* line = nullptr;
    bool stores = false;
};

struct Warp {
    Known known;
    Octet octets[4];
    std::vector<Thread*> threads;
    u32 arrived = 0;
    Collective kind = Collective::SYNC;
    u64 values[32] = {};
    u32 arguments[32] = {};
    u32 ended = 0;  // bit of each thread that has ended
    u32 convergences = 0;  // collectives that it has taken part in
};

struct BlockBarrier {
    std::vector<Thread*> waiting;
    bool vote = true;
    u32 threads = 0;  // asked for; 0: the whole block
    Known known;
    std::vector<Warp*> members;  // warps that have taken part
};

enum class State { READY, BLOCKED, ENDED };

struct Thread {
    Fiber fiber;
    Block* block = nullptr;
    Warp* warp = nullptr;
    u32 index = 0;
    State state = State::READY;
    u32 ready_at = 0;  // place in the rank's list of those who can run
    u64 stalled_until = 0;
    Known known;
    u64 seen_time = 0;   // ordinary loads give nothing older
    u64 proxy_time = 0;  // bulk loads give nothing older
    Clocks clocks;
    u32 count = 1, fenced_count = 0;  // of its accesses to shared memory
    u64 result = 0;
    u64 wide[2] = {};  // of its part of a line
    std::vector<std::shared_ptr<BulkStore>> open;
    std::deque<std::vector<std::shared_ptr<BulkStore>>> groups;
    std::vector<u32> unfenced_barriers;
    const char* doing = "runs";
    u64 where = 0, what = 0;
};

struct Block {
    Launch* launch = nullptr;
    u32 index = 0, number = 0;  // in the grid; of all blocks of the run
    u8* shared = nullptr;
    Shadow* shadow = nullptr;
    u32 shared_bytes = 0, dynamic_bytes = 0;
    void* mapping = nullptr;
    u64 mapped_bytes = 0;
    u32 static_used = 0;
    std::map<u32, ByteBarrier> byte_barriers;
    BlockBarrier barriers[NAMED_BARRIERS];
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Thread>> threads;
    std::map<std::pair<u32, u64>, u32> statics;
    u32 alive = 0, loads_under_way = 0;
    u64 stalled_until = 0;

    ~Block();
};

using Kernel = void (*)(const void* params);
using HostCall = int (*)();

struct Launch {
    std::string name;
    Kernel kernel = nullptr;
    HostCall call = nullptr;  // instead of a kernel: something that the host does in this place of the stream
    std::vector<u8> params;
    u32 blocks = 0, threads = 0, dynamic_bytes = 0;
    Rank* rank = nullptr;
    std::vector<std::unique_ptr<Block>> grid;
    u32 alive = 0;
};

struct Rank {
    int number = 0;
    std::deque<std::unique_ptr<Launch>> stream;
    std::unique_ptr<Launch> current;
    u64 starts_at = 0;  // the tick before which the next launch does not begin
    std::vector<Thread*> ready;
    std::vector<Store*> gpu_stores;  // that this GPU sees, and other GPUs need not
    u32 weight = 1;
};

struct Event {
    u64 due, order;
    std::function<void()> action;
    bool operator<(const Event& other) const {  // the earliest is on top
        return due != other.due ? due > other.due : order > other.order;
    }
};

struct Machine {
    Memory memory;
    std::vector<std::unique_ptr<Rank>> ranks;
    std::priority_queue<Event> events;
    Context scheduler;
    Thread* running = nullptr;
    u64 ticks = 0, now_ns = 1'000'000, random_state = 1, ordered = 0, reweigh_at = 0;
    u64 most_ticks = 0;
    u32 blocks_begun = 0;
    u8* shared = nullptr;  // of the running thread's block
    u64 shared_bytes = 0;
    bool torn_lines = false;  // a fault: of a line of 128 bytes each half arrives by itself
    bool failed = false;
    std::string error;

    u64 random();
    bool chance(u32 in) { return random() % in == 0; }
    // Delays in ticks: of what somebody waits for, and of what may take as long as nobody does.
    u64 delay();
    u64 long_delay();
    u64 store_delay();  // of an ordinary store: maybe for ever, as long as nobody releases it and its kernel runs
    void later(u64 ticks_from_now, std::function<void()> action);

    bool run(u64 seed);
    void yield();       // by a thread: somebody else may go on
    void maybe_yield();
    void block_thread();  // by a thread, which somebody has to make ready again
    void make_ready(Thread* thread);
    void unready(Thread* thread);
    // Ends the run. By a thread it does not return.
    void fail(const std::string& reason);
    std::string describe(const Thread* thread) const;

  private:
    void begin_launch(Rank& rank);
    void end_launch(Rank& rank);
    void end_thread(Thread* thread);
    Thread* pick();
    bool step();
    void reweigh();
    bool all_done() const;
    std::string who_waits() const;
    void clear();
};

extern Machine* machine;
inline Thread* self() { return machine->running; }

// ---- knowledge.cpp
// What a thread has been handed becomes visible: to its own GPU, or to all.
void publish_known(Thread* thread, bool everywhere);
void for_each_known(Thread* thread, const std::function<void(Known&)>& visit);
// As of a time: what was published to its GPU later it need not see.
bool knows(const Thread* thread, const Store* store, u64 time);
void named_barrier(u32 number, u32 threads);
void release_barriers_of(Block* block);

// ---- plain.cpp
// Ends the plain access of global memory that the running thread made last: memory is again as all see it.
void settle_plain();

// ---- ptx_words.cpp
// A load that orders nothing: as of some time since the thread has last acquired something.
void load_ordinary(Thread* thread, const void* at, u32 size, void* into);
// The region of an access to global memory, which must be allowed.
Region& checked(const void* at, u64 bytes, u32 alignment, const char* does);
// An ordinary store, which others see later.
Store* add_store(Thread* thread, Region& region, void* at, const void* bytes, u32 size, u64 delay);

// ---- ptx_bulk.cpp
enum class Arrival { NOW, LATER };
// LATER: its owner sees it, and a release by its owner covers it; others see it some time.
void write_global(BulkStore& store, Arrival arrival);

}  // namespace emulator
