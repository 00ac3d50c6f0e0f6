// A pipeline of rows: global memory -> stage -> registers of a group of warps -> stage -> global memory.
//
// The unit is a tile: some rows, or a piece of one row, of every input. A stage holds one tile. Blocks take tiles in
// turn; the turns of a block go to its groups in turn, and to its stages in turn. A stage belongs to one group, because
// the number of stages is a multiple of the number of groups.
//
//   thread          for each of its turns
//   producer        waits until the stage is empty; DYNAMIC: writes the tile's number beside it; lets `full` expect the
//                   bytes of ALL inputs; begins a bulk load of each input, which completes on `full`
//   each thread     waits for `full`; reads its part of the tile into registers; computes; writes results over the
//   of the group    input; fence of the proxies
//   each warp but   arrives at `empty`
//   the first
//   all warps       barrier of the group
//   the first       begins bulk stores out of the stage; commits them as one group; waits (.read) until the stores of
//   thread          the turn before have read their stage; arrives at `empty` of that stage
//
// Each stage has two barriers, and each phase of a barrier is one turn of its stage:
//   full    one arrival: the producer, with the bytes. Turn t is in the stage when phase t / STAGES is over
//   empty   an arrival of each warp of the group. The stage may be loaded again when phase t / STAGES is over
// A thread sees only the parity of a phase, so it must never wait two phases ahead:
//   full    turn t is loaded only after each warp of the group has arrived at `empty` of turn t - STAGES, so it has
//           waited for that turn before
//   empty   the producer has waited for the phase before, at turn t - STAGES
// tests/explorer/pipe.py searches every order of these steps, also with stages that are no multiple.
//
// Order, at each place where a stage changes hands:
//   load -> reads      the wait for `full` acquires the bytes that completed it
//   writes -> store    fence.proxy.async of each writing thread, barrier of the group, bulk store
//   reads -> load      the same fence, __syncwarp, the warp's arrival at `empty`, the producer's wait: a bulk load is
//                      of the other proxy, so the barriers alone do not order it after ordinary reads
//   store -> load      wait_group.read of the thread that committed the store, before it arrives at `empty`
// A group with one stage waits for its own stores. A group with more leaves the youngest in flight.
// Before a block ends, each first thread waits until its stores have read their stages.
//
// A group whose results do not pass through its stage (`give_back`) needs no barrier: each warp arrives at `empty` when
// it has read the stage.
//
// PIPE_DYNAMIC chooses which tiles a block takes:
//   0   block b takes the tiles b, b + blocks, b + 2 * blocks and so on. Gradients need it: their sums have an order
//   1   block b begins with tile b. Then a counter in global memory gives its producer the next tile that no block has
//       taken, so no SM waits for a slower one
//
// The counter is 0 before a launch. Each increment gives a producer the number of a tile: blocks + the value before. So
// the numbers from `blocks` on are taken once each, and a block's numbers rise. A producer asks for AHEAD numbers at
// its start and for one at each tile, because an answer takes about 0.55 us (H100, 2026-11-25). So a launch has as many
// increments as tiles, and AHEAD more for each block. The last one wraps the counter to 0. Increments order nothing.
// Two launches that may run at the same time need a counter each (raymoe/rows/tile_counters.py).
//
// The number beside a stage, 4 bytes of shared memory:
//   writer   the producer, between its wait for `empty` and its arrival at `full`.
//   readers  the threads of the group, between their wait for `full` and their arrival at `empty`.
// A number that is no tile ends a group. The producer gives one to each group when it has no tile left.
//
// PIPE_LOADING chooses another way to the same tiles, for the same code:
//   IN_TURN   the baseline, an anti-pattern. A group has one stage and one barrier. For each input in turn it
//             initialises the barrier, loads, waits, and invalidates the barrier. Nothing overlaps
//   PLAIN     no stages: ordinary loads into registers, ordinary stores. On the whole GPU the hardware gives small
//             blocks to SMs as they become free
//   ROW       PLAIN with a block for each row and no loop: fewer registers, so more blocks fit on an SM
//
// Dynamic shared memory: STAGES x stage_bytes; `full`, `empty` and the number of each stage, 8 bytes each; sums of the
// groups (sums.cuh). raymoe/rows/pipe_shape.py computes the same sum.
#pragma once

#include "raymoe/rows/tiles.cuh"

#ifndef PIPE_STAGES
#define PIPE_STAGES 4
#endif
#ifndef PIPE_GROUPS
#define PIPE_GROUPS 2
#endif
#ifndef PIPE_WARPS
#define PIPE_WARPS 4  // warps of a group
#endif
#ifndef PIPE_LOADING
#define PIPE_LOADING PIPED
#endif
#ifndef PIPE_ONCE
#define PIPE_ONCE 0  // 1: inputs leave the L2 cache before other memory
#endif
#ifndef PIPE_DYNAMIC
#define PIPE_DYNAMIC 0
#endif
#ifndef PIPE_RESIDENT
#define PIPE_RESIDENT 512  // threads that an SM holds at least
#endif

namespace raymoe {

enum class Loading { PIPED, IN_TURN, PLAIN, ROW };

constexpr Loading LOADING = Loading::PIPE_LOADING;
constexpr bool STAGED = LOADING == Loading::PIPED || LOADING == Loading::IN_TURN;
constexpr u32 STAGES = PIPE_STAGES, GROUPS = PIPE_GROUPS, GROUP_WARPS = PIPE_WARPS;
constexpr u32 GROUP_THREADS = GROUP_WARPS * 32, CONSUMERS = GROUPS * GROUP_THREADS;
constexpr u32 PIPE_THREADS = CONSUMERS + (LOADING == Loading::PIPED ? 32 : 0);
// Without stages, an SM must hold blocks with PIPE_RESIDENT threads together. It bounds the registers of a thread.
constexpr bool SHARES_SM = !STAGED && PIPE_THREADS < PIPE_RESIDENT;
constexpr u32 LEAST_BLOCKS = SHARES_SM ? PIPE_RESIDENT / PIPE_THREADS : 1;
constexpr u32 SUMS_BYTES = 2 * GROUP_WARPS * 16;  // for a group; GroupSums of sums.cuh uses them
constexpr bool DYNAMIC = PIPE_DYNAMIC;
constexpr u32 AHEAD = DYNAMIC ? 2 : 0;  // numbers that a producer asks for before its first tile
static_assert(!DYNAMIC || LOADING == Loading::PIPED, "only a producer takes tiles");
static_assert(STAGES % GROUPS == 0, "a stage belongs to one group");
static_assert(LOADING != Loading::IN_TURN || STAGES == GROUPS, "one stage for each group");
static_assert(LOADING != Loading::ROW || GROUPS == 1, "one row for each block");
static_assert(GROUPS < 16 || GROUP_WARPS == 1, "groups of several warps have a barrier each; 0 is that of the block");

__device__ __forceinline__ u32 group_number() { return threadIdx.x / GROUP_THREADS; }
__device__ __forceinline__ bool is_consumer() { return LOADING != Loading::PIPED || threadIdx.x < CONSUMERS; }
__device__ __forceinline__ u32 thread_in_group() {
    return LOADING == Loading::ROW ? threadIdx.x : threadIdx.x % GROUP_THREADS;
}

// A barrier of the threads of one group. It orders what they did before.
__device__ __forceinline__ void group_barrier() {
    if constexpr (GROUP_WARPS == 1) {
        __syncwarp();
    } else {
        ptx::barrier_of_warps(1 + group_number(), GROUP_THREADS);
    }
}

// All threads of a block make one, with the same arguments. `INPUTS` are the tensors that are loaded.
template <u32 INPUTS>
class Pipe {
  public:
    __device__ __forceinline__ Pipe(const PipeWork& work, const PipeRows* inputs, u8* memory)
        : work_(work), inputs_(inputs), memory_(ptx::shared_address(memory)),
          barriers_(memory_ + STAGES * work.stage_bytes) {
        if constexpr (LOADING == Loading::PIPED) {
            if (threadIdx.x == 0) {
                for (u32 stage = 0; stage < STAGES; ++stage) {
                    ptx::barrier_init(full(stage), 1);
                    ptx::barrier_init(empty(stage), GROUP_WARPS);
                }
                ptx::fence_barrier_init();  // orders the inits before the bulk loads that complete on them
            }
            __syncthreads();  // hands the initialised barriers to all threads
        }
    }

    // Calls `compute(tile)` for each tile of each group. All threads of the block call this. `compute` gets a tile that
    // is loaded, and ends with `store` or `give_back`, which all threads of the group call.
    template <class Compute>
    __device__ __forceinline__ void run(Compute compute) {
        if constexpr (LOADING == Loading::ROW) {
            compute(Tile{blockIdx.x, 1, 0, work_.width, 0, 0});
            return;
        }
        if (!is_consumer()) {
            if (threadIdx.x == CONSUMERS) {
                produce();
            }
            return;
        }
#pragma unroll 1
        for (u32 turn = group_number(); DYNAMIC || number_of(turn) < work_.tiles; turn += GROUPS) {
            Tile tile = placed(turn, number_of(turn));
            if constexpr (LOADING == Loading::PIPED) {
                await(full(turn % STAGES), turn / STAGES & 1);
            } else if constexpr (LOADING == Loading::IN_TURN) {
                load_in_turn(tile);
            }
            if constexpr (DYNAMIC) {
                const u32 number = ptx::shared_load_4(number_at(turn % STAGES));
                if (number >= work_.tiles) {
                    break;
                }
                tile = placed(turn, number);
            }
            compute(tile);
        }
        if (STAGED && leads()) {
            ptx::bulk_wait_read<0>();  // the stages must last until the stores have read them
        }
    }

    // Ends a turn whose results stand in its stage: `store()` begins the bulk stores.
    template <class Store>
    __device__ __forceinline__ void store(const Tile& tile, Store store) {
        if constexpr (!STAGED) {
            return;  // `put` has stored the results
        }
        ptx::fence_proxy_async_shared();  // orders this thread's reads and writes of the stage before bulk copies
        if (GROUP_WARPS != 1 && thread_in_group() >= 32) {
            arrive_as_warp(tile.turn);
        }
        group_barrier();
        if (!leads()) {
            return;
        }
        store();
        ptx::bulk_commit();
        if constexpr (STAGES == GROUPS) {
            ptx::bulk_wait_read<0>();
            arrive_empty(tile.turn);
        } else {
            ptx::bulk_wait_read<1>();
            if (tile.turn >= GROUPS) {
                arrive_empty(tile.turn - GROUPS);
            }
        }
    }

    // Ends a turn whose stage this thread has read and nothing will be stored from.
    __device__ __forceinline__ void give_back(const Tile& tile) {
        if constexpr (STAGED) {
            ptx::fence_proxy_async_shared();  // orders this thread's reads of the stage before the next bulk load
            arrive_as_warp(tile.turn);
        }
        if constexpr (LOADING == Loading::IN_TURN) {
            group_barrier();  // the group's first thread loads the next tile
        }
    }

    // The shared address of the group's sums.
    __device__ __forceinline__ u32 sums() const { return barriers_ + STAGES * 24 + group_number() * SUMS_BYTES; }

  private:
    __device__ __forceinline__ u32 full(u32 stage) const { return barriers_ + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barriers_ + (STAGES + stage) * 8; }
    __device__ __forceinline__ u32 number_at(u32 stage) const { return barriers_ + (2 * STAGES + stage) * 8; }
    __device__ __forceinline__ bool leads() const { return thread_in_group() == 0; }

    // The tile of a turn, if it is not dynamic.
    __device__ __forceinline__ u32 number_of(u32 turn) const { return blockIdx.x + turn * gridDim.x; }

    __device__ __forceinline__ Tile placed(u32 turn, u32 number) const {
        Tile tile = tile_of(work_, number);
        tile.stage = memory_ + turn % STAGES * work_.stage_bytes;
        tile.turn = turn;
        return tile;
    }

    __device__ __forceinline__ void arrive_empty(u32 turn) const {
        if constexpr (LOADING == Loading::PIPED) {
            ptx::barrier_arrive(empty(turn % STAGES));
        }
    }

    __device__ __forceinline__ void arrive_as_warp(u32 turn) const {
        __syncwarp();  // all threads of the warp have read the stage
        if (threadIdx.x % 32 == 0) {
            arrive_empty(turn);
        }
    }

    static __device__ __forceinline__ void await(u32 barrier, u32 parity) {
        while (!ptx::barrier_try_wait(barrier, parity)) {
        }
    }

    __device__ __forceinline__ void produce() {
        // coming[k] is the number of the tile of turn k, k + AHEAD + 1 and so on. The loop is unrolled: a move of a
        // number to another register would wait for it.
        u32 coming[AHEAD + 1] = {blockIdx.x};
#pragma unroll
        for (u32 k = 1; k <= AHEAD; ++k) {
            coming[k] = number_after(coming[k - 1]);
        }
#pragma unroll 1
        for (u32 turn = 0;;) {
#pragma unroll
            for (u32 k = 0; k <= AHEAD; ++k, ++turn) {
                const u32 number = coming[k];
                if (number >= work_.tiles) {
                    end_groups(turn, number);
                    return;
                }
                coming[k] = number_after(number);
                await_empty(turn);
                publish_number(turn, number);
                load(turn, placed(turn, number));
            }
        }
    }

    // Asks for the number of another tile of the block.
    __device__ __forceinline__ u32 number_after(u32 number) const {
        if constexpr (DYNAMIC) {
            const u32 increments = work_.tiles + AHEAD * gridDim.x;
            return gridDim.x + ptx::atomic_increment_wrapping_relaxed(work_.taken, increments - 1);
        }
        return number + gridDim.x;
    }

    __device__ __forceinline__ void end_groups(u32 turn, u32 number) const {
        if constexpr (DYNAMIC) {
            for (u32 group = 0; group < GROUPS; ++group, ++turn) {
                await_empty(turn);
                publish_number(turn, number);
                ptx::barrier_expect(full(turn % STAGES), 0);
            }
        }
    }

    __device__ __forceinline__ void await_empty(u32 turn) const {
        if (turn >= STAGES) {
            await(empty(turn % STAGES), (turn / STAGES - 1) & 1);
        }
    }

    __device__ __forceinline__ void publish_number(u32 turn, u32 number) const {
        if constexpr (DYNAMIC) {
            ptx::shared_store_4(number_at(turn % STAGES), number);
        }
    }

    __device__ __forceinline__ void load(u32 turn, const Tile& tile) {
        u32 bytes = 0;
#pragma unroll
        for (u32 i = 0; i < INPUTS; ++i) {
            bytes += bytes_of(inputs_[i], tile);
        }
        ptx::barrier_expect(full(turn % STAGES), bytes);
#pragma unroll
        for (u32 i = 0; i < INPUTS; ++i) {
            load_tile(inputs_[i], tile, full(turn % STAGES));
        }
    }

    __device__ __forceinline__ void load_in_turn(const Tile& tile) {
        const u32 barrier = full(tile.turn % STAGES);
#pragma unroll 1
        for (u32 i = 0; i < INPUTS; ++i) {
            if (leads()) {
                ptx::barrier_init(barrier, 1);
                ptx::fence_barrier_init();  // orders the init before the bulk load that completes on it
                ptx::barrier_expect(barrier, bytes_of(inputs_[i], tile));
                load_tile(inputs_[i], tile, barrier);
            }
            group_barrier();  // hands the initialised barrier to the group
            await(barrier, 0);
            group_barrier();  // no thread of the group still waits for the barrier
            if (leads()) {
                ptx::barrier_invalidate(barrier);
            }
        }
    }

    PipeWork work_;
    const PipeRows* inputs_;
    u32 memory_;
    u32 barriers_;
};

}  // namespace raymoe
