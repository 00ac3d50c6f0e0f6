// Probes of what products of experts meet: loads of operands beside wgmma, and launches that begin early.
// product_probes.py launches the kernels, and says what each case asks.
//
// stream_M_N: one block to an SM, with the warps, stages and barriers of kernels/moe/product.cu. It loads M rows of
// weights and N tokens of 64 columns in each step, and multiplies them, or does one of the two. The weights and the
// tokens fit in the L2 cache, and blocks share them as those of a product do.
//   weights   as boxes of 128 neighbouring rows; as a box of gate and one of up rows; or as boxes of five dimensions,
//             where 8 gate rows and 8 up rows take turns
//   tokens    as boxes of 64, 32, 16 and 8 neighbouring rows; as boxes of one row, a thread for each; or by cp.async of
//             16 bytes, by the four warps that do not multiply
// Results of a block, 4 words: clocks, nanoseconds, number of its SM, 0. `sums` gets its products where it is not null.
//
// link: a kernel of a chain, which may let the next one begin, and may wait for the one before it. Results of a block,
// 6 words: when it began, let the next one begin, had waited and ended, in nanoseconds; clocks of the last part; 0.

#include "raymoe/moe/product/operands.cuh"

namespace raymoe {

constexpr u32 WEIGHTS_HALVES = 2, WEIGHTS_TURNS = 3;  // 0: none, 1: neighbouring rows
constexpr u32 TOKENS_ROWS = 2, TOKENS_GATHER = 3;  // 0: none, 1: boxes
constexpr u32 STEP_COLUMNS = 64, STEP_ROW_BYTES = 128, HALF = 128;  // columns of a step, rows of a box of weights
constexpr u32 MOST_STAGES = 8, SHARED_FOR_STAGES = 226 * 1024;

struct StreamParams {
    EncodedMap rows;       // weights [1][2 * outputs][columns], boxes of 128 rows
    EncodedMap turns;      // the same as [1][outputs / 8][2][8][columns], boxes of [1][8][2][8][64]
    EncodedMap tokens[5];  // tokens [rows][columns], boxes of 64, 32, 16, 8 rows and of one
    const u8* x;           // the tokens
    const u32* order;      // which token each row is, unless boxes of several rows are loaded
    u64* results;          // [blocks][4]
    float* sums;           // [blocks][M][N], or null
    u32 outputs;           // gate rows, as many as up rows
    u32 columns;           // a multiple of 64
    u32 steps;
    u32 load_weights;
    u32 load_tokens;
    u32 multiplies;
    u64 unused[1];  // up to a multiple of 64 bytes
};

__device__ __forceinline__ void copy_16(u32 shared, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 younger>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(younger) : "memory");
}

__device__ __forceinline__ void tensor_load_5d(u32 shared, const EncodedMap& map, u32 x, u32 w, u32 barrier,
                                               u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4, %3}], [%5], %6;" ::"r"(shared),
        "l"(&map), "r"(x), "r"(0u), "r"(w), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ u32 this_sm() {
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

template <u32 M, u32 N>
struct Stream {
    static constexpr u32 WEIGHTS = M * STEP_ROW_BYTES, STAGE = WEIGHTS + N * STEP_ROW_BYTES;
    static constexpr u32 FIT = SHARED_FOR_STAGES / STAGE, COUNT = FIT < MOST_STAGES ? FIT : MOST_STAGES;
    static constexpr u32 BEHIND = COUNT - 2;  // stages that cp.async fills at once
    static_assert(COUNT >= 3, "too few stages");

    const StreamParams& p;
    u32 shared;

    __device__ __forceinline__ u32 weights(u32 step) const { return shared + step % COUNT * STAGE; }
    __device__ __forceinline__ u32 tokens(u32 step) const { return weights(step) + WEIGHTS; }
    __device__ __forceinline__ u32 full(u32 step) const { return shared + COUNT * STAGE + step % COUNT * 8; }
    __device__ __forceinline__ u32 empty(u32 step) const { return full(step) + COUNT * 8; }
    __device__ __forceinline__ u32 order() const { return shared + COUNT * (STAGE + 16); }
    __device__ __forceinline__ u32 tiles_of_weights() const { return 2 * p.outputs / M; }
    __device__ __forceinline__ u32 weight_tile() const { return blockIdx.x % tiles_of_weights(); }
    __device__ __forceinline__ u32 first_token() const { return blockIdx.x / tiles_of_weights() * N; }
    __device__ __forceinline__ u32 column(u32 step) const { return step * STEP_COLUMNS % p.columns; }

    // The first steps load in any case, so that wgmma never multiplies what nobody wrote.
    __device__ __forceinline__ bool loads_weights(u32 step) const { return p.load_weights || step < COUNT; }
    __device__ __forceinline__ bool loads_tokens(u32 step) const { return p.load_tokens || step < COUNT; }

    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            for (u32 stage = 0; stage < COUNT; ++stage) {
                ptx::barrier_init(full(stage), p.load_tokens == TOKENS_GATHER ? 129 : 1);
                ptx::barrier_init(empty(stage), MULTIPLYING_WARPS);
            }
            ptx::fence_barrier_init();
        }
        for (u32 i = threadIdx.x; i < N; i += PRODUCT_THREADS) {
            ptx::shared_store_4(order() + i * 4, ptx::load_4(reinterpret_cast<const u8*>(p.order + first_token() + i)));
        }
        __syncthreads();
    }

    __device__ __forceinline__ void give_back(u32 step) const {
        if (threadIdx.x % 32 == 0) {
            ptx::barrier_arrive(empty(step));
        }
    }

    __device__ __forceinline__ void only_read() const {
        for (u32 step = 0; step < p.steps; ++step) {
            await(full(step), step / COUNT & 1);
            give_back(step);
        }
    }

    // Issues the products of a step, when its stage is full.
    __device__ __forceinline__ void issue(float (&sums)[M / HALF][N / 2], u32 warpgroup, u32 step) const {
        await(full(step), step / COUNT & 1);
        const u64 rows = operand_descriptor(weights(step) + warpgroup * (HALF / 2 * STEP_ROW_BYTES));
        const u64 others = operand_descriptor(tokens(step));
        ptx::wgmma_fence();  // orders the registers of the sums before the wgmma that add to them
#pragma unroll
        for (u32 part = 0; part < STEP_COLUMNS / 16; ++part) {
#pragma unroll
            for (u32 half = 0; half < M / HALF; ++half) {
                ptx::wgmma<N>(sums[half], rows + half * (HALF * STEP_ROW_BYTES / 16) + part * NEXT_COLUMNS,
                              others + part * NEXT_COLUMNS);
            }
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void multiply() const {
        const u32 warpgroup = threadIdx.x / 128;
        float sums[M / HALF][N / 2];
#pragma unroll
        for (u32 i = 0; i < N / 2; ++i) {
#pragma unroll
            for (u32 half = 0; half < M / HALF; ++half) {
                sums[half][i] = 0.0f;
            }
        }
        for (u32 step = 0; step < p.steps; ++step) {
            issue(sums, warpgroup, step);
            ptx::wgmma_wait<0>();
            give_back(step);
        }
        if (p.sums == nullptr) {
            return;
        }
        const u32 thread = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + thread / 4;  // 64 rows to a warpgroup
        float* into = p.sums + static_cast<u64>(blockIdx.x) * M * N;
#pragma unroll
        for (u32 half = 0; half < M / HALF; ++half) {
#pragma unroll
            for (u32 i = 0; i < N / 2; ++i) {
                into[(half * HALF + row + i % 4 / 2 * 8) * N + i / 4 * 8 + thread % 4 * 2 + i % 2] = sums[half][i];
            }
        }
    }

    __device__ __forceinline__ void load_weights(u32 step) const {
        const u64 again = ptx::evict_last_policy();
        const u32 tile = weight_tile();
#pragma unroll
        for (u32 half = 0; half < M / HALF; ++half) {
            const u32 into = weights(step) + half * HALF * STEP_ROW_BYTES;
            if (p.load_weights == WEIGHTS_TURNS) {
                tensor_load_5d(into, p.turns, column(step), (tile * M + half * HALF) / 16, full(step), again);
            } else if (p.load_weights == WEIGHTS_HALVES) {
                ptx::tensor_load_3d(into, p.rows, column(step), half * p.outputs + tile * HALF, 0, full(step), again);
            } else {
                ptx::tensor_load_3d(into, p.rows, column(step), tile * M + half * HALF, 0, full(step), again);
            }
        }
    }

    __device__ __forceinline__ void load_boxes(u32 step) const {
        const u64 again = ptx::evict_last_policy();
        u32 row = first_token(), left = N, into = tokens(step);
#pragma unroll
        for (u32 map = 0; map < 4; ++map) {
            const u32 box = 64u >> map;
            for (; left >= box; left -= box, row += box, into += box * STEP_ROW_BYTES) {
                ptx::tensor_load_2d(into, p.tokens[map], column(step), row, full(step), again);
            }
        }
    }

    __device__ __forceinline__ u32 bytes(u32 step, bool boxes) const {
        return loads_weights(step) * WEIGHTS + (boxes && loads_tokens(step)) * (STAGE - WEIGHTS);
    }

    // One thread loads all boxes. Those of one row have a thread each, all of one warp.
    __device__ __forceinline__ void load() const {
        const u32 thread = threadIdx.x % 32;
        const u64 again = ptx::evict_last_policy();
        const bool alone = p.load_tokens != TOKENS_ROWS;
        if (alone && thread != 0) {
            return;
        }
        for (u32 step = 0; step < p.steps; ++step) {
            if (thread == 0) {
                await(empty(step), (step / COUNT + 1) & 1);
                ptx::barrier_expect(full(step), bytes(step, true));
                if (loads_weights(step)) {
                    load_weights(step);
                }
                if (alone && loads_tokens(step)) {
                    load_boxes(step);
                }
            }
            if (!alone) {
                __syncwarp();  // hands the empty stage to all threads
#pragma unroll 1
                for (u32 row = thread; row < N; row += 32) {
                    ptx::tensor_load_2d(tokens(step) + row * STEP_ROW_BYTES, p.tokens[4], column(step),
                                        ptx::shared_load_4(order() + row * 4), full(step), again);
                }
            }
        }
    }

    // Tells that the copies of a step by this thread have come.
    __device__ __forceinline__ void arrive(u32 step) const {
        ptx::fence_proxy_async_shared();  // orders the copies before the wgmma that reads them
        ptx::barrier_arrive(full(step));
    }

    // All threads of four warps copy 16 bytes each, with the swizzle that a box would have.
    __device__ __forceinline__ void gather() const {
        const u32 thread = threadIdx.x - MULTIPLYING_WARPS * 32;
        for (u32 step = 0; step < p.steps; ++step) {
            await(empty(step), (step / COUNT + 1) & 1);
            if (thread == 0) {
                ptx::barrier_expect(full(step), bytes(step, false));
                if (loads_weights(step)) {
                    load_weights(step);
                }
            }
            const u8* from = p.x + column(step) * 2 + thread % 8 * 16;
            const u32 into = tokens(step) + thread / 8 * STEP_ROW_BYTES + (thread % 8 ^ thread / 8 % 8) * 16;
#pragma unroll 4
            for (u32 row = thread / 8; row < N; row += 16) {
                copy_16(into + (row - thread / 8) * STEP_ROW_BYTES,
                        from + static_cast<u64>(ptx::shared_load_4(order() + row * 4)) * p.columns * 2);
            }
            copies_commit();
            if (step >= BEHIND) {
                copies_wait<BEHIND>();
                arrive(step - BEHIND);
            }
        }
        copies_wait<0>();
        for (u32 step = p.steps < BEHIND ? 0 : p.steps - BEHIND; step < p.steps; ++step) {
            arrive(step);
        }
    }

    __device__ __forceinline__ void run() const {
        begin();
        const long long clocks = clock64();
        const u64 time = ptx::nanoseconds();
        if (threadIdx.x < MULTIPLYING_WARPS * 32) {
            ptx::take_registers<MULTIPLYING_REGISTERS>();
            if (p.multiplies) {
                multiply();
            } else {
                only_read();
            }
            if (threadIdx.x == 0) {
                u64* results = p.results + blockIdx.x * 4;
                results[0] = static_cast<u64>(clock64() - clocks);
                results[1] = ptx::nanoseconds() - time;
                results[2] = this_sm();
                results[3] = 0;
            }
        } else {
            ptx::give_registers_away<OTHER_REGISTERS>();
            if (p.load_tokens == TOKENS_GATHER) {
                gather();
            } else if (threadIdx.x / 32 == LOADING_WARP) {
                load();
            }
        }
    }
};

struct LinkParams {
    u64* results;  // [blocks][6]
    u32 clocks;    // for which a block works
    u32 lets;      // the next kernel begin
    u32 waits;     // for the kernel before
    u32 unused;
};

}  // namespace raymoe

#define RAYMOE_STREAM(M, N)                                                                 \
    extern "C" __global__ void __launch_bounds__(raymoe::PRODUCT_THREADS, 1)                \
        stream_##M##_##N(const __grid_constant__ raymoe::StreamParams p) {                  \
        extern __shared__ __align__(1024) raymoe::u8 shared[];                              \
        raymoe::Stream<M, N>{p, raymoe::ptx::shared_address(shared)}.run();                 \
    }
RAYMOE_STREAM(128, 64)
RAYMOE_STREAM(128, 128)
RAYMOE_STREAM(128, 136)
RAYMOE_STREAM(128, 176)
RAYMOE_STREAM(128, 256)
RAYMOE_STREAM(256, 64)
RAYMOE_STREAM(256, 96)
RAYMOE_STREAM(256, 128)
RAYMOE_STREAM(256, 136)
RAYMOE_STREAM(256, 176)

extern "C" __global__ void __launch_bounds__(raymoe::PRODUCT_THREADS, 1)
    link(const __grid_constant__ raymoe::LinkParams p) {
    using namespace raymoe;
    const u64 began = ptx::nanoseconds();
    if (p.lets) {
        ptx::let_next_kernel_begin();
    }
    const u64 let = ptx::nanoseconds();
    if (p.waits) {
        ptx::wait_for_kernel_before();
    }
    const u64 waited = ptx::nanoseconds();
    const long long from = clock64();
    while (clock64() - from < p.clocks) {
    }
    const long long clocks = clock64() - from;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64* results = p.results + blockIdx.x * 6;
        results[0] = began;
        results[1] = let;
        results[2] = waited;
        results[3] = ptx::nanoseconds();
        results[4] = static_cast<u64>(clocks);
        results[5] = 0;
    }
}
