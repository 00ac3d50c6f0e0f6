// Asynchronous copies of 16 bytes of raymoe/base/ptx.cuh.
//
// A copy reads global memory when it begins, as an ordinary load of its thread does. It stores to shared memory at once,
// or as late as the wait for its group.

#include "machine.h"
#include "raymoe/base/ptx.cuh"

namespace emulator {

namespace {

void land(const Copy& copy) {
    raymoe::ptx::shared_store_16(copy.shared, {copy.bytes[0], copy.bytes[1]});
}

}  // namespace

}  // namespace emulator

namespace raymoe::ptx {

using emulator::machine;
using emulator::self;

void copy_16_if(bool wanted, u32 shared, const u8* global) {
    machine->maybe_yield();
    if (!wanted) {
        return;
    }
    emulator::checked(global, 16, 16, "copies");
    if (shared % 16 != 0 || shared + 16ull > self()->block->shared_bytes) {
        machine->fail("a copy to " + std::to_string(shared) + " of shared memory: not aligned to 16, or outside");
    }
    emulator::Copy copy{shared, {}};
    emulator::load_ordinary(self(), global, 16, copy.bytes);
    if (machine->chance(2)) {
        emulator::land(copy);
    } else {
        self()->open_copies.push_back(copy);
    }
}

void copies_commit() {
    self()->copy_groups.push_back(std::move(self()->open_copies));
    self()->open_copies.clear();
}

void copies_wait_for(u32 younger) {
    machine->maybe_yield();
    auto& groups = self()->copy_groups;
    while (groups.size() > younger) {
        for (const emulator::Copy& copy : groups.front()) {
            emulator::land(copy);
        }
        groups.pop_front();
    }
}

}  // namespace raymoe::ptx
