// Global memory: what everybody sees, what it held before, and stores that not everybody sees yet.
//
// Memory is kept in lines of 16 bytes. What "everybody sees" is the bytes themselves, so plain accesses by pointer and
// the host read and write there. A line remembers its past for loads that nothing has ordered after the writes.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 LINE = 16;
constexpr u32 NOBODY = ~0u, HOST = ~0u - 1;  // who is no block

enum class Level : u8 { THREAD, GPU, DONE };

struct Known;
struct Line;

// An ordinary store on its way.
struct Store {
    u8* at;
    u8 bytes[LINE];
    u32 size;
    Level level = Level::THREAD;
    int rank;      // of the thread that stored
    u32 block;     // its number in the run
    std::vector<Known*> holders;  // the lists that it is in, as long as its level is THREAD
    Line* line;
    Store* twin = nullptr;  // the next of those that arrive together, in a ring
};

struct Past {
    u64 time;  // of the write
    u8 first, size;
    u32 block;  // who wrote
    u8 old[LINE];
};

struct Line {
    std::vector<Past> past;
    std::vector<Store*> pending;  // in the order of the stores
};

// A range that kernels may touch.
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
    // Fresh pages with an unmapped one on either side, so that a stray plain access faults.
    u8* map(u64 bytes);
    void add(Region region);
    Region* find(u64 address);
    std::string name_of(u64 address);

    // Writes where everybody sees it, and keeps the past.
    void write(Region& region, u8* at, const void* bytes, u32 size, u64 time, u32 block);
    // A store becomes visible to all; those before it that it overlaps do first.
    void publish(Store* store, u64 time);
    Store* new_store() { stores_.emplace_back(); return &stores_.back(); }
    // What bytes of one line were at that time, but for what `block` has written since, which may be NOBODY.
    void as_of(const Region& region, const u8* at, u32 size, u64 time, u32 block, u8* into) const;
    void forget_past();

  private:
    std::vector<std::unique_ptr<Region>> regions_;  // by address
    std::vector<std::pair<void*, u64>> mappings_;
    std::deque<Store> stores_;
    Region* last_ = nullptr;
};

}  // namespace emulator
