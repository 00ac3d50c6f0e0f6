// The emulated machine: ranks with streams of launches, blocks, warps and threads, and operations in flight.
//
// Every CUDA thread is a fiber; one OS thread runs them all. At each switching point (words, bulk copies, barriers, the
// clock) a seeded generator chooses the thread that continues. The same seed and program always give the same run.
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
#include "warpgroup.h"

namespace emulator {

constexpr u32 NAMED_BARRIERS = 16;
constexpr u64 NEVER = ~0ull;
constexpr u32 STATIC_BYTES = 1024;  // of a block, for static declarations: STATIC_SHARED of raymoe/exchange/peer/build.py

struct Block;
struct Launch;
struct Rank;
struct Thread;

// The stores that a thread, a warp or a block knows of, which its release or fence would publish.
struct Known {
    u32 number = 0;  // among the lists of its block
    std::vector<Store*> stores;

    bool holds(const Store* store) const {
        return number / 64 < store->holders.size() && (store->holders[number / 64] >> number % 64 & 1) != 0;
    }
    void hold(Store* store);
    void take(Known& from);  // empties `from`
    void learn(const Known& from);  // `from` keeps its stores
    void forget_done();
    void forget();

  private:
    void let_go(Store* store);
};

// A bulk store from shared to global memory. It reads and writes in two steps, each some time later.
struct BulkStore {
    u8* global;
    u32 shared, bytes;
    Thread* owner;
    u32 block;  // the block's number in the run
    int rank;
    bool read = false, written = false;
    std::vector<u8> data;
};

// An mbarrier in shared memory. It also hands what arriving threads know to threads that find a phase over.
struct ByteBarrier {
    u32 arrivals = 0, missing = 0;
    long long bytes = 0;
    u64 phase = 0;
    bool fenced = false, valid = true;
    Stamp initialised{};
    Known arriving, over;  // in this phase; in the last one
    Clocks arriving_clocks, over_clocks;
    u64 arriving_seen = 0, over_seen = 0;  // the latest `seen_time` of arriving threads
    std::vector<Thread*> waiting;
    std::vector<Stamp> found_over;  // the threads that have found the last phase over, and when
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
    u32 convergences = 0;  // collectives that the warp has completed
    Block* block = nullptr;
    Member member;  // of its warpgroup
};

struct BlockBarrier {
    std::vector<Thread*> waiting;
    bool vote = true;
    u32 threads = 0;  // that the barrier waits for; 0: the whole block
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
    u32 ready_at = 0;  // index in the rank's list of ready threads
    u64 stalled_until = 0;
    Known known;
    u64 seen_time = 0;   // ordinary loads return nothing older
    u64 proxy_time = 0;  // bulk loads return nothing older
    Clocks clocks;
    u32 count = 1, fenced_count = 0;  // of its accesses to shared memory
    mutable u64 landed[16] = {};  // phases of barriers that it knows to be over: a cache of shared.cpp
    u64 result = 0;
    u64 wide[2] = {};  // value of its part of a line
    std::vector<std::shared_ptr<BulkStore>> open;
    std::deque<std::vector<std::shared_ptr<BulkStore>>> groups;
    std::vector<u32> unfenced_barriers;
    const char* doing = "runs";
    u64 where = 0, what = 0;
};

struct Block {
    Launch* launch = nullptr;
    u32 index = 0, number = 0;  // in the grid; among all blocks of the run
    u8* shared = nullptr;
    Shadow* shadow = nullptr;
    u32 shared_bytes = 0;
    void* mapping = nullptr;
    u64 mapped_bytes = 0;
    u32 static_used = 0, lists = 0;  // of stores that its threads know of
    std::map<u32, ByteBarrier> byte_barriers;
    std::vector<Warpgroup> warpgroups;
    u32 free_registers = 0, exchanges = 0;  // registers that warps have given away; how often they gave or took some
    std::vector<Thread*> waiting_for_registers;
    BlockBarrier barriers[NAMED_BARRIERS];
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Thread>> threads;
    std::map<std::pair<u32, u64>, u32> statics;
    u32 alive = 0, loads_under_way = 0;
    bool lets_next = false;  // the next launch, if it is an early one, need not wait for this block
    u64 stalled_until = 0;

    ~Block();
};

using Kernel = void (*)(const void* params);
using HostCall = int (*)();

struct Launch {
    std::string name;
    Kernel kernel = nullptr;
    HostCall call = nullptr;  // an action of the host instead of a kernel
    std::vector<u8> bytes;
    const u8* params = nullptr;  // in `bytes`, aligned to 64
    u32 blocks = 0, threads = 0, dynamic_bytes = 0;
    Rank* rank = nullptr;
    std::vector<std::unique_ptr<Block>> grid;
    u32 alive = 0;
    bool early = false;  // may begin when each block of the launch before it has ended or lets it begin
    u32 holding = 0;     // blocks for which an early launch after this one still waits
};

struct Rank {
    int number = 0;
    std::deque<std::unique_ptr<Launch>> stream;
    std::unique_ptr<Launch> current;
    std::unique_ptr<Launch> after;  // an early launch that has begun beside `current`
    std::vector<Thread*> waiting_for_end;  // threads of `after`, until `current` ends, and of its blocks without SMs
    u64 starts_at = 0;  // the tick before which the next launch does not begin
    std::vector<Thread*> ready;
    std::vector<Store*> gpu_stores;  // stores that this GPU sees and other GPUs may not see yet
    u32 weight = 1;
};

struct Event {
    u64 due, order;
    std::function<void()> action;
    bool operator<(const Event& other) const {  // puts the earliest on top
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
    bool torn_lines = false;  // a fault: each half of a 128-byte line arrives by itself
    bool failed = false;
    std::string error;

    u64 random();
    bool chance(u32 in) { return random() % in == 0; }
    // Delays in ticks: short for data that a thread waits for, long for data that no thread waits for.
    u64 delay();
    u64 long_delay();
    u64 store_delay();  // of an ordinary store: maybe until its kernel ends, if nothing releases it
    void later(u64 ticks_from_now, std::function<void()> action);

    bool run(u64 seed);
    void yield();       // lets another thread continue; a thread calls this
    void maybe_yield();
    void block_thread();  // stops the running thread until another one calls `make_ready` for it
    void make_ready(Thread* thread);
    void unready(Thread* thread);
    // Ends the run. If a thread calls it, it does not return.
    void fail(const std::string& reason);
    std::string describe(const Thread* thread) const;

  private:
    void begin_launch(Rank& rank);
    void begin_blocks(Launch& launch);
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
// Publishes the stores that a thread knows of: to its own GPU, or to all.
void publish_known(Thread* thread, bool everywhere);
void for_each_known(Thread* thread, const std::function<void(Known&)>& visit);
// Whether a thread must see a store, as of a time: it need not see stores published to its GPU later.
bool knows(const Thread* thread, const Store* store, u64 time);
void named_barrier(u32 number, u32 threads);
void release_barriers_of(Block* block);

// ---- plain.cpp
// Completes the running thread's last plain access to global memory: memory again holds what all see.
void settle_plain();

// ---- ptx_words.cpp
// A load that orders nothing: it returns the value of some time since the thread last acquired something.
void load_ordinary(Thread* thread, const void* at, u32 size, void* into);
// Returns the region of an access to global memory; fails the run if the access is not allowed.
Region& checked(const void* at, u64 bytes, u32 alignment, const char* does);
// Adds an ordinary store, which other threads see later.
Store* add_store(Thread* thread, Region& region, void* at, const void* bytes, u32 size, u64 delay);

// ---- ptx_bulk.cpp
ByteBarrier& byte_barrier(u32 at);  // of the running thread's block; fails the run if there is none
// Checks a bulk load by the running thread, and counts it as under way.
void begin_load(u32 shared, u32 bytes, u32 barrier);
void complete_load(Block& block, u32 barrier, u32 bytes);

// What the async proxy of a GPU may see of global memory: the bytes of some time since its thread's last proxy fence.
class ProxyView {
  public:
    ProxyView(int rank, u64 since);
    void read_line(const Region& region, const u8* at, u8* into) const;

  private:
    int rank_;
    u64 now_, time_;
};

enum class Arrival { NOW, LATER };
// LATER: its owner sees it, and a release by its owner covers it; other threads see it at some time.
void write_global(BulkStore& store, Arrival arrival);

}  // namespace emulator
