// The shared memory of the warps of a block that sends quantised rows: stages for rows that leave, taken in turn, and a
// queue of the rows in them. quantised_sending.cuh has the warps.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"

namespace raymoe {

// Barriers in shared memory, each of one arrival, used by turns one after the other. The turns of a barrier alternate
// its parity. No thread waits for a turn more than one turn of its barrier ahead.
struct TurnBarriers {
    u32 first;
    u32 count;

    __device__ __forceinline__ void begin() const {
        for (u32 i = 0; i < count; ++i) {
            ptx::barrier_init(at(i), 1);
        }
    }

    // Arrives for the turn. Releases what this thread did, and what the warp that it has synchronised with did.
    __device__ __forceinline__ void pass(u32 turn) const { ptx::barrier_arrive(at(turn)); }

    __device__ __forceinline__ bool passed(u32 turn) const { return ptx::barrier_is_over(at(turn), turn / count & 1); }

    __device__ __forceinline__ void await(u32 turn) const {
        while (!ptx::barrier_try_wait(at(turn), turn / count & 1)) {
        }
    }

    // Waits for the previous turn of the same barrier, if there was one.
    __device__ __forceinline__ void await_before(u32 turn) const {
        if (turn >= count) {
            await(turn - count);
        }
    }

  private:
    __device__ __forceinline__ u32 at(u32 turn) const { return first + turn % count * 8; }
};

// The stage of a turn is number `turn % stages`. There are no more quantising warps than stages.
struct LeavingStages {
    static constexpr u32 QUEUE = 32;  // turns, from the filling of a stage to the row's words
    static constexpr u32 MOST_STAGES = 12;
    static constexpr u64 NO_MORE = ~0ull;

    u32 stages;
    u32 stage_bytes;
    u32 first;                // the first stage
    u32 queue;                // {token, ranks} of a turn, or NO_MORE: a warp is finished
    TurnBarriers filled;      // a warp has filled the turn's stage
    TurnBarriers emptied;     // the pusher has emptied the turn's stage
    TurnBarriers landed;      // the pusher knows that the turn's row has arrived
    TurnBarriers announced;   // the announcer has finished with the turn's entry of the queue
    u32* turns;               // turns that warps have taken

    __device__ __forceinline__ LeavingStages(const DispatchParams& p, u8* memory)
        : stages(p.sender_stages), stage_bytes((p.slot_bytes + 127) & ~127u), first(ptx::shared_address(memory)),
          queue(first + stages * stage_bytes), filled{queue + QUEUE * 8, stages},
          emptied{filled.first + MOST_STAGES * 8, stages}, landed{emptied.first + MOST_STAGES * 8, QUEUE},
          announced{landed.first + QUEUE * 8, QUEUE},
          turns(reinterpret_cast<u32*>(memory + (announced.first + QUEUE * 8 - first))) {}

    __device__ __forceinline__ void begin() const {
        filled.begin();
        emptied.begin();
        landed.begin();
        announced.begin();
        *turns = 0;
    }

    __device__ __forceinline__ u32 stage(u32 turn) const { return first + turn % stages * stage_bytes; }

    __device__ __forceinline__ u64 queued(u32 turn) const { return ptx::shared_load_8(queue + turn % QUEUE * 8); }

    // Queues the row and hands its stage over. The first thread of the warp that filled the stage calls this.
    __device__ __forceinline__ void hand_over(u32 turn, u64 row) const {
        announced.await_before(turn);
        ptx::shared_store_8(queue + turn % QUEUE * 8, row);
        filled.pass(turn);
    }
};

}  // namespace raymoe
