// The rows of x that are there, in a build with CHUNKED_ROWS: rows come over the rail in chunks of tokens while the
// kernel runs (raymoe/exchange/domains/rail_rows.py). In other builds all rows are there, and nothing waits.
//
// Words of this rank, in device memory, zero at first:
//   [0]      the number of this run's crossing. A launch before this kernel writes it
//   [1 + c]  the last crossing whose chunk c is in x
//            writer: advance_chunk.cu, on the stream that the rail uses, after the kernel that has stored the rows: its
//            release covers all that earlier kernels of its stream did. It stores nothing once the rail is aborted
//            reader: a thread that loads rows, or that waits for one: acquire; fence.proxy.async; bulk load of the row
// Chunks come in order, so a thread that has acquired the word of one has acquired all rows before it. Words only grow,
// and a replay counts as an eager crossing does.
#pragma once

#include "raymoe/peer/dispatch/dispatch.cuh"

namespace raymoe {

// The rows of x that one thread knows to be there.
class RowsOfX {
  public:
#if CHUNKED_ROWS
    __device__ explicit RowsOfX(const DispatchParams& p) : p_(p) {}

    // Whether the row is there. If it is, the thread may load it.
    __device__ __forceinline__ bool there(u32 token) {
        if (token >= there_ && ptx::load_acquire_sys(word(token)) >= crossing()) {
            note(token);
        }
        return token < there_;
    }

    // Waits until the row is there, and the thread may load it. Returns false if the wait failed.
    __device__ __forceinline__ bool await(u32 token) {
        if (token < there_) {
            return true;
        }
        const bool ok = wait_for_epoch(word(token), crossing(), waiting(), p_.watch);
        if (ok) {
            note(token);
        }
        return ok;
    }

    // The same for a warp, whose first thread may load the row. All threads of the warp call this.
    __device__ __forceinline__ bool await_by_warp(u32 token) {
        ok_ = __shfl_sync(0xFFFFFFFF, threadIdx.x % 32 != 0 || await(token), 0);
        return ok_;
    }

    // Whether all waits of the warp have succeeded.
    __device__ __forceinline__ bool ok() const { return ok_; }

    // The word of the token's chunk, its wanted value, and the wait for it.
    __device__ __forceinline__ const u64* word(u32 token) const { return p_.chunks + 1 + token / p_.chunk_tokens; }

    __device__ __forceinline__ u64 crossing() const { return ptx::load_8(p_.chunks); }

    __device__ __forceinline__ Waiting waiting() const { return {p_.rail_op, p_.peers.rank, crossing()}; }

  private:
    __device__ __forceinline__ void note(u32 token) {
        ptx::fence_proxy_async();  // orders the word that was acquired before the bulk loads of its chunk
        there_ = (token / p_.chunk_tokens + 1) * p_.chunk_tokens;
    }

    const DispatchParams& p_;
    u32 there_ = 0;  // tokens before this one are there
    bool ok_ = true;
#else
    __device__ explicit RowsOfX(const DispatchParams&) {}

    __device__ __forceinline__ bool there(u32) const { return true; }

    __device__ __forceinline__ bool await(u32) const { return true; }

    __device__ __forceinline__ bool await_by_warp(u32) const { return true; }

    __device__ __forceinline__ bool ok() const { return true; }
#endif
};

}  // namespace raymoe
