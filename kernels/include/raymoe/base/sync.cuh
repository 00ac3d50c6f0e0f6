// Epochs, flags between ranks, and the one bounded wait.
//
// An operation counts its runs in the memory of its own GPU (`Operation`). The host knows no run's number, so eager
// calls and graph replays mix in any order. Flags between ranks are 64-bit words that hold such a count. Each has one
// writer, only grows and is never reset. Readers compare by >=, because a peer may be one run ahead.
//
// A wait that passes its deadline, or sees the host's abort word, ends and poisons. Every later operation under the
// same `Watch` returns at once and stores nothing to peers: it could overwrite a slot that a slow peer has yet to read.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// The count of an operation's runs, and of the blocks of the current run that are finished. In device memory of this
// rank, 16-byte aligned, zero at first. Only this rank's kernels read and write it, one operation at a time.
struct Operation {
    u64 epoch;   // complete runs; the last block out stores it, every block of the next run reads it
    u32 ticket;  // finished blocks; the last one sets it to 0 again, for the next run
    u32 unused;
};
static_assert(sizeof(Operation) == 16, "");

// The report of a failed wait to the host. In host memory that the GPU has mapped.
//
// Writer: the one thread of this GPU whose compare-and-swap set the poison word. Reader: the host, at any time. Order:
// the fields, then `code` by a release at system scope; the host reads `code` first, and the fields only if it is not
// 0. It is written once, because the poison word is never cleared. So a replay leaves the first failure in place.
struct ErrorRecord {
    u64 code;  // 0: none; FAILURE_TIMEOUT; FAILURE_ABORTED; FAILURE_STALE
    u64 op;    // the operation's number; the host that launched it knows the name
    u64 epoch;
    u64 peer;  // the rank whose word did not come
    u64 expected;
    u64 seen;
    u64 waited_ns;
    u64 unused;
};
static_assert(sizeof(ErrorRecord) == 64, "");

constexpr u64 FAILURE_TIMEOUT = 1;
constexpr u64 FAILURE_ABORTED = 2;
constexpr u64 FAILURE_STALE = 3;  // a slot held the row of another epoch; only builds with stamps check

// The bounds of a wait. All operations that are poisoned together share one.
struct Watch {
    // Host memory. Writer: the host, 0 to 1, once. Reader: one of all waiting threads of this GPU, every ABORT_POLL_NS.
    // It orders nothing, so a relaxed load is enough.
    const u64* abort;
    ErrorRecord* record;
    // Device memory of this rank: 0 until a wait fails, then the failure's code for ever. Writer: failing threads, by
    // compare-and-swap, here and not in the record because the link to the host need not support atomics. Reader: every
    // operation at its start, and every wait every ABORT_POLL_NS.
    // The next word holds the time of the last look at the abort word. The thread that advances it looks next.
    u64* poison;
    u64 timeout_ns;
};

// The operation that waits and the rank that it waits for: for the record.
struct Waiting {
    u32 op;
    u32 peer;
    u64 epoch;
};

// The abort word lies across PCIe. A read takes about 1 to 2 us, and few reads are served at a time. When each of 1,500
// waiting threads of a combine read it, none made progress (4x H200, 2026-11-21: 160 ms instead of 0.5). So threads
// take turns, and a wait that ends soon never reads it.
constexpr u64 ABORT_POLL_NS = 100'000;
constexpr u32 POLLS_PER_CLOCK = 32;

__device__ inline bool poisoned(const Watch& watch) {
    return watch.poison != nullptr && ptx::load_relaxed_gpu(watch.poison) != 0;
}

// Poisons, and reports the failure to the host. If several threads fail, the first one reports.
__device__ inline void fail(const Watch& watch, u64 code, const Waiting& who, u64 expected, u64 seen, u64 waited_ns) {
    if (ptx::atomic_compare_swap(watch.poison, 0, code) != 0) {
        return;
    }
    ErrorRecord* record = watch.record;
    ptx::store_relaxed_sys(&record->op, who.op);
    ptx::store_relaxed_sys(&record->epoch, who.epoch);
    ptx::store_relaxed_sys(&record->peer, who.peer);
    ptx::store_relaxed_sys(&record->expected, expected);
    ptx::store_relaxed_sys(&record->seen, seen);
    ptx::store_relaxed_sys(&record->waited_ns, waited_ns);
    ptx::store_release_sys(&record->code, code);  // orders the fields above before the code that announces them
}

// Whether the host has raised the abort word. Reads it only if no thread has for ABORT_POLL_NS; else returns false.
__device__ inline bool abort_requested(const Watch& watch, u64 now) {
    u64* last = watch.poison + 1;
    const u64 before = ptx::load_relaxed_gpu(last);
    if (now < before + ABORT_POLL_NS || ptx::atomic_compare_swap(last, before, now) != before) {
        return false;
    }
    return ptx::load_relaxed_sys(watch.abort) != 0;
}

// The time limit of one thread's wait.
class Deadline {
  public:
    __device__ explicit Deadline(const Watch& watch) : watch_(watch), start_(ptx::nanoseconds()), looked_(start_) {}

    // A waiting thread calls this now and then. 0: go on waiting. Else the wait has failed, for the returned reason,
    // and nothing may be stored to peers; `report` is next.
    __device__ __forceinline__ u64 failure() {
        now_ = ptx::nanoseconds();
        if (now_ - looked_ >= ABORT_POLL_NS) {
            looked_ = now_;
            if (poisoned(watch_)) {
                return FAILED_ELSEWHERE;
            }
            if (abort_requested(watch_, now_)) {
                return FAILURE_ABORTED;
            }
        }
        return now_ - start_ >= watch_.timeout_ns ? FAILURE_TIMEOUT : 0;
    }

    // Reports that this wait, for `expected`, failed after it saw `seen`.
    __device__ __forceinline__ void report(u64 failure, u64 expected, u64 seen, const Waiting& who) const {
        if (failure != FAILED_ELSEWHERE) {
            fail(watch_, failure, who, expected, seen, now_ - start_);
        }
    }

    // Checks and reports. Returns false if the wait has failed.
    __device__ bool may_continue(u64 expected, u64 seen, const Waiting& who) {
        const u64 failed = failure();
        if (failed != 0) {
            report(failed, expected, seen, who);
        }
        return failed == 0;
    }

  private:
    static constexpr u64 FAILED_ELSEWHERE = ~0ull;  // under the same watch, and reported there

    const Watch& watch_;
    u64 start_;
    u64 looked_;
    u64 now_ = 0;
};

// Waits until `look(seen)` is true; `look` stores what it sees into `seen`, for the record. One thread calls this.
// Returns false if the wait failed.
template <class Look>
__device__ inline bool wait_until(Look look, u64 expected, const Waiting& who, const Watch& watch) {
    u64 seen = 0;
    if (look(seen)) {
        return true;
    }
    Deadline deadline(watch);
    do {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS_PER_CLOCK; ++poll) {
            if (look(seen)) {
                return true;
            }
        }
    } while (deadline.may_continue(expected, seen, who));
    return false;
}

// Waits until the word is at least `expected`, and returns true: this thread has acquired what the word's writer
// released. Before a bulk copy of that data the thread also needs `fence_proxy_async`; other threads of the block need
// a barrier. Returns false if the wait failed.
__device__ inline bool wait_for_epoch(const u64* word, u64 expected, const Waiting& who, const Watch& watch) {
    auto look = [&](u64& seen) {
        seen = ptx::load_acquire_sys(word);
        return seen >= expected;
    };
    return wait_until(look, expected, who, watch);
}

// The number of the current run. Every block reads it at its start. The last block out stores the next number, and it
// cannot be the last before all blocks have begun.
__device__ inline u64 epoch_of_this_run(const Operation* operation) {
    return ptx::load_relaxed_gpu(&operation->epoch) + 1;
}

// The state before a run: the epoch of the last run, and the poison word. `load` only issues the loads, so the thread's
// next instructions do not wait for them.
struct Before {
    u64 epoch = 0;
    u64 poison = 0;

    __device__ __forceinline__ void load(bool wanted, const Operation* operation, const Watch& watch) {
        epoch = ptx::load_relaxed_gpu_if(wanted, &operation->epoch, 0);
        poison = ptx::load_relaxed_gpu_if(wanted && watch.poison != nullptr, watch.poison, 0);
    }
};

// Returns true for the last block of the grid to finish. One thread of every block calls this, after a barrier of the
// block, when the block's work is done. The last one has then acquired what all blocks did, and its release covers
// that. A single block needs no ticket.
__device__ inline bool last_block_out(Operation* operation) {
    const u32 last = gridDim.x * gridDim.y * gridDim.z - 1;
    return last == 0 || ptx::atomic_increment_wrapping(&operation->ticket, last) == last;
}

// The same. All threads of the block call this; what they did is ordered before the ticket.
__device__ inline bool block_is_last_out(Operation* operation) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = last_block_out(operation);
    }
    __syncthreads();
    return last;
}

// The result of `block_is_out`.
struct Ending {
    bool last;     // this block is the last one of the run
    bool trouble;  // some block reported trouble; valid in the last block
};

// As `block_is_last_out`, but the ticket also carries whether a block had trouble: the last block need not read that
// from memory after its ticket. The last block must give the ticket back. A block's accesses are ordered before the
// last block's next ones only if there was trouble, and this block reported it or `hands_over`. Otherwise the ticket is
// relaxed, because a ticket that releases waits for all stores of the block.
__device__ inline Ending block_is_out(Operation* operation, bool trouble, bool hands_over) {
    constexpr u32 TROUBLE = 1 << 16;  // more than the blocks of a grid
    __shared__ u32 before;
    const bool any = !__syncthreads_and(!trouble);
    if (threadIdx.x == 0) {
        const u32 mine = any ? TROUBLE + 1 : 1;
        before = any || hands_over ? ptx::atomic_add_acq_rel(&operation->ticket, mine)
                                   : ptx::atomic_add_32(&operation->ticket, mine);
    }
    __syncthreads();
    const Ending ending{before % TROUBLE == ptx::blocks() - 1, any || before >= TROUBLE};
    if (ending.last && ending.trouble) {
        ptx::fence_acq_rel_sys();  // acquires what blocks released that hand over, if this block's ticket does not
    }
    return ending;
}

// Sets the ticket to 0. One thread of the last block out calls this, with or without `finish_run` after it.
__device__ inline void give_ticket_back(Operation* operation) {
    operation->ticket = 0;  // read by later kernels of this stream only
}

// Ends the run: the next run has the next number. One thread of the last block out calls this.
__device__ inline void finish_run(Operation* operation, u64 epoch) {
    ptx::store_relaxed_gpu(&operation->epoch, epoch);  // read by later kernels of this stream only
}

}  // namespace raymoe
