#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace emulator {

namespace {

constexpr std::size_t STACK_BYTES = 64 << 10, GUARD_BYTES = 4096;

std::vector<void*>& free_stacks() {
    static std::vector<void*> stacks;
    return stacks;
}

void* new_stack() {
    if (!free_stacks().empty()) {
        void* stack = free_stacks().back();
        free_stacks().pop_back();
        return stack;
    }
    constexpr int KIND = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, KIND, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, GUARD_BYTES, PROT_NONE) != 0) {
        std::abort();
    }
    return stack;
}

}  // namespace

Fiber::~Fiber() {
    if (stack_ != nullptr) {
        free_stacks().push_back(stack_);
    }
}

#if defined(__x86_64__)

// Saves the registers that a callee must save in the System V ABI; the stack holds the rest.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

void switch_context(Context& from, Context& to) {
    emulator_switch(&from.stack_pointer, to.stack_pointer);
}

void Fiber::prepare(void (*entry)()) {
    stack_ = new_stack();
    // Tops of stacks lie in different sets of the cache: else a switch between many threads misses in each.
    static std::size_t stacks = 0;
    const std::size_t unused = stacks++ % 32 * 192;
    auto* top = reinterpret_cast<std::uintptr_t*>(static_cast<char*>(stack_) + STACK_BYTES - unused);
    *--top = 0;  // the return address of `entry`, which never returns; aligns the stack as after a call
    *--top = reinterpret_cast<std::uintptr_t>(entry);
    for (int kept = 0; kept < 6; ++kept) {
        *--top = 0;
    }
    context.stack_pointer = top;
}

#else

void switch_context(Context& from, Context& to) {
    swapcontext(&from.context, &to.context);
}

void Fiber::prepare(void (*entry)()) {
    stack_ = new_stack();
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = static_cast<char*>(stack_) + GUARD_BYTES;
    context.context.uc_stack.ss_size = STACK_BYTES - GUARD_BYTES;
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}

#endif

}  // namespace emulator
