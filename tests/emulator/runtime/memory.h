// Global memory: the bytes that all see, its past, and stores that not all threads see yet.
//
// Memory is kept in lines of 16 bytes. The bytes that all see are the memory itself, so plain accesses by pointer and
// the host read and write there. A line keeps its past for loads that nothing orders after the writes.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 LINE = 16;
constexpr u32 NOBODY = ~0u, HOST = ~0u - 1;  // block numbers that no block has

enum class Level : u8 { THREAD, GPU, DONE };

struct Line;

// An ordinary store that not all threads see yet.
struct Store {
    u8* at;
    u8 bytes[LINE];
    u32 size;
    Level level = Level::THREAD;
    u64 gpu_time = 0;  // when it was published to its GPU
    int rank;      // of the thread that stored
    u32 block;     // its number in the run
    std::vector<u64> holders;  // while its level is THREAD: a bit for each list of its block that holds it
    Line* line;
    Store* twin = nullptr;  // the next of the stores that arrive together, in a ring
};

// The time and the writer of a write.
struct Written {
    u64 time;
    u64 gpu_time;  // since then the writer's GPU sees it; not after `time`
    int rank;      // of the writer
    u32 block;
};

struct Past {
    Written by;
    u8 first, size;
    u8 old[LINE];
};

struct Line {
    std::vector<Past> past;
    std::vector<Store*> pending;  // in the order of the stores
};

// A range that kernels may access.
struct Region {
    u64 begin, end;
    int rank;
    bool shared;  // peers have it mapped too
    std::string name;
    std::vector<std::unique_ptr<Line>> lines;

    Line* line_at(u64 address) const;
    Line& touched(u64 address);
};

class Memory {
  public:
    ~Memory();
    Memory();
    // Maps new pages with an unmapped page on either side, so that stray accesses fault.
    u8* map(u64 bytes);
    bool maps(const void* at) const {
        return static_cast<const u8*>(at) - arena_ < static_cast<std::ptrdiff_t>(ARENA) && at >= arena_;
    }
    void add(Region region);
    Region* find(u64 address);
    std::string name_of(u64 address);

    // Writes bytes that all see, and keeps the past.
    void write(Region& region, u8* at, const void* bytes, u32 size, const Written& written);
    // Makes a store visible to all, after earlier stores that it overlaps.
    void publish(Store* store, u64 time);
    Store* new_store() { stores_.emplace_back(); return &stores_.back(); }
    // The bytes of one line as a rank saw them at that time, but with later writes of `block`, which may be NOBODY.
    void as_of(const Region& region, const u8* at, u32 size, u64 time, int rank, u32 block, u8* into) const;
    void forget_past();

  private:
    std::vector<std::unique_ptr<Region>> regions_;  // by address
    static constexpr u64 ARENA = 1ull << 36;  // bytes of address space, in one piece, so that `maps` is fast
    u8* arena_;
    u64 used_ = 0;
    std::deque<Store> stores_;
    Region* last_ = nullptr;
};

}  // namespace emulator
