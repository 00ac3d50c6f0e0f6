#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {

Line* Region::line_at(u64 address) const {
    return lines[address / LINE - begin / LINE].get();
}

Line& Region::touched(u64 address) {
    auto& line = lines[address / LINE - begin / LINE];
    if (!line) {
        line = std::make_unique<Line>();
    }
    return *line;
}

Memory::Memory() {
    void* at = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        std::abort();
    }
    arena_ = static_cast<u8*>(at);
}

Memory::~Memory() {
    munmap(arena_, ARENA);
}

u8* Memory::map(u64 bytes) {
    constexpr u64 PAGE = 4096, LINE_PAIR = 128;
    const u64 kept = (bytes + LINE_PAIR - 1) / LINE_PAIR * LINE_PAIR;
    const u64 whole = (kept + PAGE - 1) / PAGE * PAGE;
    u8* begin = arena_ + used_ + PAGE;
    used_ += whole + PAGE;
    if (used_ + PAGE > ARENA || mprotect(begin, whole, PROT_READ | PROT_WRITE) != 0) {
        std::abort();
    }
    return begin + whole - kept;  // at the end of its pages, because most stray accesses are after the end
}

void Memory::add(Region region) {
    region.lines.resize((region.end + LINE - 1) / LINE - region.begin / LINE);
    auto kept = std::make_unique<Region>(std::move(region));
    // Memory of others that overlaps was freed, and is now a part of this region.
    const u64 begin = kept->begin, end = kept->end;
    const auto overlaps = [&](const auto& other) { return other->begin < end && begin < other->end; };
    regions_.erase(std::remove_if(regions_.begin(), regions_.end(), overlaps), regions_.end());
    last_ = nullptr;
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), kept->begin,
                                        [](u64 begin, const auto& other) { return begin < other->begin; });
    regions_.insert(after, std::move(kept));
}

Region* Memory::find(u64 address) {
    if (last_ != nullptr && address >= last_->begin && address < last_->end) {
        return last_;
    }
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                        [](u64 at, const auto& other) { return at < other->begin; });
    if (after == regions_.begin() || address >= (*(after - 1))->end) {
        return nullptr;
    }
    return last_ = (after - 1)->get();
}

std::string Memory::name_of(u64 address) {
    char text[256];
    if (const Region* region = find(address)) {
        std::snprintf(text, sizeof text, "%s of rank %d + %llu", region->name.c_str(), region->rank,
                      address - region->begin);
        return text;
    }
    const Region* before = nullptr;
    for (const auto& each : regions_) {
        before = each->begin <= address ? each.get() : before;
    }
    if (before == nullptr) {
        std::snprintf(text, sizeof text, "%#llx", address);
    } else {
        std::snprintf(text, sizeof text, "%#llx, %llu bytes after the end of %s of rank %d", address,
                      address - before->end, before->name.c_str(), before->rank);
    }
    return text;
}

void Memory::write(Region& region, u8* at, const void* bytes, u32 size, const Written& written) {
    const u8* from = static_cast<const u8*>(bytes);
    while (size != 0) {
        const u64 address = reinterpret_cast<u64>(at);
        const u32 first = address % LINE;
        const u32 here = std::min(size, LINE - first);
        Past past{written, static_cast<u8>(first), static_cast<u8>(here), {}};
        std::memcpy(past.old, at, here);
        std::memcpy(at, from, here);
        region.touched(address).past.push_back(past);
        at += here;
        from += here;
        size -= here;
    }
}

void Memory::publish(Store* store, u64 time) {
    if (store->level == Level::DONE) {
        return;
    }
    auto& pending = store->line->pending;
    for (std::size_t i = 0; pending[i] != store;) {
        Store* before = pending[i];
        if (before->at < store->at + store->size && store->at < before->at + before->size) {
            publish(before, time);  // removes it from the list
        } else {
            ++i;
        }
    }
    pending.erase(std::find(pending.begin(), pending.end(), store));
    const u64 gpu_time = store->level == Level::GPU ? store->gpu_time : time;
    store->level = Level::DONE;
    write(*find(reinterpret_cast<u64>(store->at)), store->at, store->bytes, store->size,
          {time, gpu_time, store->rank, store->block});
    if (store->twin != nullptr) {
        publish(store->twin, time);
    }
}

void Memory::as_of(const Region& region, const u8* at, u32 size, u64 time, int rank, u32 block, u8* into) const {
    std::memcpy(into, at, size);
    const Line* line = region.line_at(reinterpret_cast<u64>(at));
    if (line == nullptr) {
        return;
    }
    const u32 first = reinterpret_cast<u64>(at) % LINE;
    u32 left = ((1u << size) - 1) << first;  // bytes whose last writer as of `time` has not been found yet
    for (auto past = line->past.rbegin(); left != 0 && past != line->past.rend() && past->by.time > time; ++past) {
        const u32 mine = ((1u << past->size) - 1) << past->first & left;
        if (past->by.block == block || (past->by.rank == rank && past->by.gpu_time <= time)) {
            left &= ~mine;
            continue;
        }
        for (u32 bytes = mine; bytes != 0; bytes &= bytes - 1) {
            const u32 byte = __builtin_ctz(bytes);
            into[byte - first] = past->old[byte - past->first];
        }
    }
}

void Memory::forget_past() {
    for (auto& region : regions_) {
        for (auto& line : region->lines) {
            line.reset();
        }
    }
    stores_.clear();
}

}  // namespace emulator
