// Mistakes that compute-sanitizer must find in a rank process, one for each of its tools; see sanitized_ranks.py.
//
// Each is harmless without the tool. No other allocation uses the memory after the words. A barrier counts threads that
// arrive at any of its instructions. No test reads the result of the race.

namespace raymoe {

struct InjectedBug {
  unsigned int* words;
  unsigned int count;
};

}  // namespace raymoe

constexpr unsigned int kThreads = 256;

// memcheck: one thread more than there are words.
extern "C" __global__ void past_the_end(const __grid_constant__ raymoe::InjectedBug bug) {
  if (threadIdx.x <= bug.count) bug.words[threadIdx.x] = threadIdx.x;
}

// synccheck: the two parts of each warp wait at different barriers of the program.
extern "C" __global__ void divergent(const __grid_constant__ raymoe::InjectedBug bug) {
  __shared__ unsigned int seen[kThreads];
  seen[threadIdx.x] = threadIdx.x;
  if (threadIdx.x % 32 < bug.count % 32 / 2) {
    seen[threadIdx.x] += bug.count;
    asm volatile("bar.sync 0;" ::: "memory");
    seen[threadIdx.x] *= 3;
  } else {
    asm volatile("bar.sync 0;" ::: "memory");
    seen[threadIdx.x] *= 5;
  }
  if (threadIdx.x < bug.count) bug.words[threadIdx.x] = seen[bug.count - 1 - threadIdx.x];
}

// racecheck: reads a value that another warp has stored, with no barrier between.
extern "C" __global__ void unordered(const __grid_constant__ raymoe::InjectedBug bug) {
  __shared__ unsigned int seen[kThreads];
  seen[threadIdx.x] = threadIdx.x;
  const unsigned int other = seen[(threadIdx.x + 32) % kThreads];
  if (threadIdx.x < bug.count) bug.words[threadIdx.x] = other;
}
