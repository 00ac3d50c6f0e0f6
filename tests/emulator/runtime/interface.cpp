// The functions that Python calls. One machine at a time; all calls must come from one OS thread.

#include <cstring>

#include "machine.h"

using emulator::machine;
using emulator::u64;
using emulator::u8;

extern "C" {

void machine_open(int ranks) {
    delete machine;
    machine = new emulator::Machine;
    for (int number = 0; number < ranks; ++number) {
        machine->ranks.push_back(std::make_unique<emulator::Rank>());
        machine->ranks.back()->number = number;
    }
}

void machine_close() {
    delete machine;
    machine = nullptr;
}

void* machine_map(unsigned long long bytes) {
    return machine->memory.map(bytes);
}

void machine_add_region(unsigned long long begin, unsigned long long bytes, int rank, int shared, const char* name) {
    machine->memory.add({begin, begin + bytes, rank, shared != 0, name, {}});
}

// `shape`: blocks, threads, bytes of dynamic shared memory, and whether the launch is early.
void machine_launch(int rank, const char* name, emulator::Kernel kernel, const void* params, unsigned params_bytes,
                    const unsigned* shape) {
    auto launch = std::make_unique<emulator::Launch>();
    launch->name = name;
    launch->kernel = kernel;
    constexpr std::size_t ALIGNMENT = 64;
    launch->bytes.resize(params_bytes + ALIGNMENT);
    u8* const begin = launch->bytes.data();
    u8* const params_at = begin + (ALIGNMENT - reinterpret_cast<u64>(begin) % ALIGNMENT);
    std::memcpy(params_at, params, params_bytes);
    launch->params = params_at;
    launch->blocks = shape[0];
    launch->threads = shape[1];
    launch->dynamic_bytes = shape[2];
    launch->early = shape[3] != 0;
    launch->rank = machine->ranks[rank].get();
    launch->rank->stream.push_back(std::move(launch));
}

void machine_call(int rank, emulator::HostCall call) {
    auto launch = std::make_unique<emulator::Launch>();
    launch->call = call;
    launch->rank = machine->ranks[rank].get();
    launch->rank->stream.push_back(std::move(launch));
}

// A write by the host, in order with its stream. It keeps the past, like a kernel's store.
void machine_write(unsigned long long at, const void* bytes, unsigned size) {
    emulator::Region& region = *machine->memory.find(at);
    const emulator::u64 now = machine->ticks;
    machine->memory.write(region, reinterpret_cast<unsigned char*>(at), bytes, size,
                          {now, now, region.rank, emulator::HOST});
}

// A fault of the link: each half of a 128-byte line arrives by itself.
void machine_tear_lines() {
    machine->torn_lines = true;
}

// Returns 1 if all streams have ended.
int machine_run(unsigned long long seed, unsigned long long most_ticks) {
    machine->most_ticks = most_ticks;
    return machine->run(seed) ? 1 : 0;
}

const char* machine_error() {
    return machine->error.c_str();
}

unsigned long long machine_ticks() {
    return machine->ticks;
}
}
