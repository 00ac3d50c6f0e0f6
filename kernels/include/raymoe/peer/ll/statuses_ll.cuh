// Statuses of a combine as words that hold their epoch. combine_ll.cu has the memory map and the order.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/ll/lines.cuh"

namespace raymoe {

template <class Params>
__device__ __forceinline__ u8* status_word(const Params& p, u32 peer, u32 parity, u32 rank, u32 word) {
    return p.peers.slot(peer, p.statuses[parity], rank * 2ull + word, 16);
}

// Sends this rank's status to every rank, its own too. All threads of one block call this.
template <class Params>
__device__ inline void send_status_ll(const Params& p, u64 epoch, const ptx::Bytes16& mine) {
    if (threadIdx.x < p.peers.ranks) {
        ptx::store_relaxed_sys_16(status_word(p, threadIdx.x, epoch & 1, p.peers.rank, 0), {mine.low, epoch});
        ptx::store_relaxed_sys_16(status_word(p, threadIdx.x, epoch & 1, p.peers.rank, 1), {mine.high, epoch});
    }
}

// Waits for a word of a rank's status. One thread calls this. Returns false if the wait failed.
template <class Params>
__device__ __forceinline__ bool await_status_word(const Params& p, u64 epoch, u32 rank, u32 word, u64& value) {
    return wait_for_word(status_word(p, p.peers.rank, epoch & 1, rank, word), epoch, Waiting{p.op, rank, epoch},
                         p.watch, value);
}

}  // namespace raymoe
