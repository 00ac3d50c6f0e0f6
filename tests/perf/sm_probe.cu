// Probe: how many bytes an SM moves by bulk copies, and how fast it adds rows. sm_probe.py launches it.
//
// One block to an SM. Each warp works alone, on rows of its own, with `stages` stages of `row_bytes` in shared memory:
//   LOAD   The first thread loads rows, with all stages in flight.
//   STORE  The first thread stores a stage to `places` rows each time, with all stages but one in flight.
//   PLACE  The first thread loads a row and stores it to `places` rows, by the ring of base/ring.cuh.
//   ADD    The first thread loads rows. All threads add `places` bfloat16 rows in float32, as a combine does. The first
//          one stores the sum.
// Rows are taken in an order that scatters them, so neighbours in time are no neighbours in memory.
//
// Results of a block, 4 words: clocks, nanoseconds, number of its SM, rows of all its warps.

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/ring.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

constexpr u32 MODE_LOAD = 0, MODE_STORE = 1, MODE_PLACE = 2, MODE_ADD = 3;
constexpr u32 PROBE_THREADS = 512;
constexpr u32 VECTORS = 8;  // of a thread in a row that is added
constexpr u32 LEAVING = 2;  // stages of a warp for sums

struct ProbeParams {
    const u8* source;  // [source_rows][row_bytes]
    u8* target;        // [target_rows][row_bytes]
    u64* results;      // [blocks][4]
    u64 source_rows;   // a power of two
    u64 target_rows;   // a power of two
    u32 mode;
    u32 row_bytes;
    u32 stages;
    u32 warps;
    u32 places;  // rows stored of each that is loaded; ADD: rows loaded of each that is stored
    u32 count;   // rows that a warp loads; STORE: rows from which it stores
};

// The rows of a warp, scattered by an odd factor.
class Scattered {
  public:
    __device__ Scattered(u64 rows, u32 row_bytes) : rows_(rows), row_bytes_(row_bytes) {}

    __device__ __forceinline__ u64 at(u64 number) const {
        return (number * 0x9E3779B1ull & (rows_ - 1)) * row_bytes_;
    }

  private:
    u64 rows_;
    u32 row_bytes_;
};

// All threads of the block make one.
class Probe {
  public:
    __device__ Probe(const ProbeParams& p, u8* shared)
        : p_(p), memory_(shared + threadIdx.x / 32 * memory(p)), leads_(threadIdx.x % 32 == 0),
          warp_((blockIdx.x * p.warps + threadIdx.x / 32) * static_cast<u64>(p.count)), from_(p.source_rows, p.row_bytes),
          to_(p.target_rows, p.row_bytes) {}

    // sm_probe.py computes the same sum.
    static __device__ __forceinline__ u32 memory(const ProbeParams& p) {
        return ((p.stages + (p.mode == MODE_ADD ? LEAVING : 0)) * p.row_bytes + p.stages * 8 + 127) & ~127u;
    }

    __device__ __forceinline__ void run() {
        if (threadIdx.x / 32 >= p_.warps) {
            return;
        }
        if (p_.mode == MODE_ADD) {
            add();
        } else if (leads_) {
            if (p_.mode == MODE_LOAD) {
                load_all();
            } else if (p_.mode == MODE_PLACE) {
                place();
            } else if (p_.mode == MODE_STORE) {
                store_all();
            }
        }
        if (leads_) {
            ptx::bulk_wait<0>();
        }
    }

  private:
    __device__ __forceinline__ u32 stage(u32 number) const {
        return ptx::shared_address(memory_) + number * p_.row_bytes;
    }

    __device__ __forceinline__ u32 barrier(u32 number) const {
        return stage(p_.stages + (p_.mode == MODE_ADD ? LEAVING : 0)) + number * 8;
    }

    __device__ __forceinline__ void begin() const {
        for (u32 i = 0; i < p_.stages; ++i) {
            ptx::barrier_init(barrier(i), 1);
        }
        ptx::fence_barrier_init();
    }

    __device__ __forceinline__ void load(u32 number) const {
        const u32 at = number % p_.stages;
        ptx::barrier_expect(barrier(at), p_.row_bytes);
        ptx::bulk_load(stage(at), p_.source + from_.at(warp_ + number), p_.row_bytes, barrier(at));
    }

    __device__ __forceinline__ void await(u32 number) const {
        while (!ptx::barrier_try_wait(barrier(number % p_.stages), number / p_.stages & 1)) {
        }
    }

    __device__ __forceinline__ void load_all() const {
        begin();
        for (u32 i = 0; i < p_.stages && i < p_.count; ++i) {
            load(i);
        }
        for (u32 i = 0; i < p_.count; ++i) {
            await(i);
            if (i + p_.stages < p_.count) {
                load(i + p_.stages);
            }
        }
    }

    __device__ __forceinline__ void store_all() const {
        for (u32 i = 0; i < p_.count; ++i) {
            store(i, stage(i % p_.stages));
            ptx::bulk_commit();
            wait_stages_read(p_.stages - 1);
        }
    }

    __device__ __forceinline__ void store(u64 number, u32 from) const {
        for (u32 k = 0; k < p_.places; ++k) {
            ptx::bulk_store(p_.target + to_.at((warp_ + number) * p_.places + k), from, p_.row_bytes);
        }
    }

    __device__ __forceinline__ void place() const {
        Ring ring(memory_, p_.stages, p_.row_bytes);
        ring.run(
            p_.count, [&](u64 k) { return Chunk{p_.source + from_.at(warp_ + k), p_.row_bytes}; },
            [&](u64 k, u32 at, u32) { store(k, at); });
    }

    // All threads of the warp call this.
    __device__ __forceinline__ void add() const {
        if (leads_) {
            begin();
        }
        __syncwarp();  // hands the initialised barriers to all threads
        const u32 vectors = p_.row_bytes / 16, thread = threadIdx.x % 32;
        for (u32 i = 0; leads_ && i < p_.stages && i < p_.count; ++i) {
            load(i);
        }
        u32 row = 0;
        for (u32 sum = 0; row + p_.places <= p_.count; ++sum) {
            float sums[VECTORS][Bf16::COUNT] = {};
            for (u32 k = 0; k < p_.places; ++k, ++row) {
                await(row);
                const u32 at = stage(row % p_.stages);
#pragma unroll
                for (u32 i = 0; i < VECTORS; ++i) {
                    if (thread + 32 * i < vectors) {
                        float values[Bf16::COUNT];
                        Bf16::unpack(ptx::shared_load_16(at + (thread + 32 * i) * 16), values);
#pragma unroll
                        for (u32 j = 0; j < Bf16::COUNT; ++j) {
                            sums[i][j] += 0.5f * values[j];
                        }
                    }
                }
                ptx::fence_proxy_async_shared();  // orders this thread's reads of the stage before the next bulk load
                __syncwarp();
                if (leads_ && row + p_.stages < p_.count) {
                    load(row + p_.stages);
                }
            }
            const u32 leaving = stage(p_.stages + sum % LEAVING);
            if (leads_) {
                ptx::bulk_wait_read<LEAVING - 1>();
            }
            __syncwarp();  // the sum before the last one has left this stage
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                if (thread + 32 * i < vectors) {
                    ptx::shared_store_16(leaving + (thread + 32 * i) * 16, Bf16::pack(sums[i]));
                }
            }
            ptx::fence_proxy_async_shared();  // orders this thread's stores before the bulk store out of the stage
            __syncwarp();
            if (leads_) {
                ptx::bulk_store(p_.target + to_.at(warp_ + sum), leaving, p_.row_bytes);
                ptx::bulk_commit();
            }
        }
        for (; row < p_.count; ++row) {
            await(row);  // a block may not end before its loads
        }
    }

    const ProbeParams& p_;
    u8* memory_;
    bool leads_;
    u64 warp_;  // number of the warp's first row
    Scattered from_;
    Scattered to_;
};

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PROBE_THREADS, 1)
    sm_probe(const __grid_constant__ raymoe::ProbeParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    const long long clocks = clock64();
    const u64 time = ptx::nanoseconds();
    Probe(p, shared).run();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        u64* results = p.results + blockIdx.x * 4;
        results[0] = static_cast<u64>(clock64() - clocks);
        results[1] = ptx::nanoseconds() - time;
        results[2] = sm;
        results[3] = static_cast<u64>(p.warps) * p.count;
    }
}
