// Fibers: several threads of control inside one OS thread.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

#if defined(__x86_64__)
struct Context {
    void* stack_pointer = nullptr;
};
#else
struct Context {
    ucontext_t context;
};
#endif

// A fiber with its stack, which has a guard page below it. Stacks are reused.
class Fiber {
  public:
    Fiber() = default;
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber();

    // The first switch to it calls `entry`, which never returns.
    void prepare(void (*entry)());
    Context context;

  private:
    void* stack_ = nullptr;
};

void switch_context(Context& from, Context& to);

}  // namespace emulator
