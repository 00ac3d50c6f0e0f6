// Epochs, flags between ranks, and the one bounded wait.
//
// An operation counts its own runs in the memory of its own GPU (`Operation`): nothing about a run is known to the
// host, so eager calls and graph replays mix freely. Flags between ranks are 64-bit words that carry such a count, only
// grow, have one writer each, and are compared by >=: a peer may be one run ahead. Nothing is ever reset.
//
// A wait that outlasts its deadline, or sees the host's abort word, ends and poisons: every later operation under the
// same `Watch` returns at once and stores nothing to peers, because it could overwrite what a slow peer has yet to
// read.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// How many times an operation has run, and how many blocks of the run in progress are through. In device memory of this
// rank, 16-byte aligned, zero at first, read and written by this rank's kernels only, one operation at a time.
struct Operation {
    u64 epoch;   // runs that are complete; stored by the last block out, read by every block of the next run
    u32 ticket;  // blocks through; 0 again with the last one, so no run finds it used
    u32 unused;
};
static_assert(sizeof(Operation) == 16, "");

// What a failed wait leaves for the host. In host memory that the GPU has mapped.
//
// Writer: the one thread of this GPU that won the poison word. Reader: the host, at any time. Order: the fields, then
// `code` by a release at system scope; the host reads `code` first and the fields only where it is not 0. Written once
// in the life of the word, so a replay finds the first failure still there.
struct ErrorRecord {
    u64 code;  // 0: none; FAILURE_TIMEOUT; FAILURE_ABORTED; FAILURE_STALE
    u64 op;    // which operation; the host that launched it knows the number's name
    u64 epoch;
    u64 peer;  // whose word was waited for
    u64 expected;
    u64 seen;
    u64 waited_ns;
    u64 unused;
};
static_assert(sizeof(ErrorRecord) == 64, "");

constexpr u64 FAILURE_TIMEOUT = 1;
constexpr u64 FAILURE_ABORTED = 2;
constexpr u64 FAILURE_STALE = 3;  // a slot held the row of another epoch; only builds with stamps look

// What bounds a wait. One for all operations that are poisoned together.
struct Watch {
    // Host memory. Writer: the host, 0 to 1, once. Reader: of all the waiting threads of this GPU one, every
    // ABORT_POLL_NS. Nothing is ordered by it; a relaxed load does.
    const u64* abort;
    ErrorRecord* record;
    // Device memory of this rank, 0 until a wait fails; then the failure's code, for ever. Writer: a compare-and-swap
    // by failing threads, here and not on the record because the link to the host need not support atomics. Reader:
    // every operation at its start, and every wait every ABORT_POLL_NS.
    // The word behind it holds when the abort word was last looked at; who moves it on looks next.
    u64* poison;
    u64 timeout_ns;
};

// The operation on whose behalf somebody waits, for the record.
struct Waiting {
    u32 op;
    u32 peer;
    u64 epoch;
};

// The abort word lies across PCIe, a read of about 1 to 2 us, and few reads at a time: when each of 1,500 waiting
// threads of a combine looked for itself, none got on (4x H200, 2026-11-21: 160 ms where 0.5 were due). So they take
// turns, and a wait that is served soon never looks.
constexpr u64 ABORT_POLL_NS = 100'000;
constexpr u32 POLLS_PER_CLOCK = 32;

__device__ inline bool poisoned(const Watch& watch) {
    return watch.poison != nullptr && ptx::load_relaxed_gpu(watch.poison) != 0;
}

// Poisons, and tells the host who waited for what. Of many that fail, the first tells.
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

// Whether the host has raised the abort word. Looks at it where nobody has for ABORT_POLL_NS.
__device__ inline bool told_to_stop(const Watch& watch, u64 now) {
    u64* last = watch.poison + 1;
    const u64 before = ptx::load_relaxed_gpu(last);
    if (now < before + ABORT_POLL_NS || ptx::atomic_compare_swap(last, before, now) != before) {
        return false;
    }
    return ptx::load_relaxed_sys(watch.abort) != 0;
}

// How long a thread is ready to wait.
class Patience {
  public:
    __device__ explicit Patience(const Watch& watch) : watch_(watch), start_(ptx::nanoseconds()), looked_(start_) {}

    // Called now and then by a thread that waits. 0: it waits on. Otherwise the wait has failed, for this reason, and
    // nothing may be stored to peers. `tell` is next.
    __device__ __forceinline__ u64 failure() {
        now_ = ptx::nanoseconds();
        if (now_ - looked_ >= ABORT_POLL_NS) {
            looked_ = now_;
            if (poisoned(watch_)) {
                return FAILED_ELSEWHERE;
            }
            if (told_to_stop(watch_, now_)) {
                return FAILURE_ABORTED;
            }
        }
        return now_ - start_ >= watch_.timeout_ns ? FAILURE_TIMEOUT : 0;
    }

    // Of a failure of this wait, which was for `expected` and saw `seen`.
    __device__ __forceinline__ void tell(u64 failure, u64 expected, u64 seen, const Waiting& who) const {
        if (failure != FAILED_ELSEWHERE) {
            fail(watch_, failure, who, expected, seen, now_ - start_);
        }
    }

    // Both. False: the wait has failed.
    __device__ bool goes_on(u64 expected, u64 seen, const Waiting& who) {
        const u64 failed = failure();
        if (failed != 0) {
            tell(failed, expected, seen, who);
        }
        return failed == 0;
    }

  private:
    static constexpr u64 FAILED_ELSEWHERE = ~0ull;  // under the same watch, where it has been told

    const Watch& watch_;
    u64 start_;
    u64 looked_;
    u64 now_ = 0;
};

// By one thread: waits until `look(seen)` is true; it puts what it sees into `seen`, for the record. False: the wait
// failed.
template <class Look>
__device__ inline bool wait_until(Look look, u64 expected, const Waiting& who, const Watch& watch) {
    u64 seen = 0;
    if (look(seen)) {
        return true;
    }
    Patience patience(watch);
    do {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS_PER_CLOCK; ++poll) {
            if (look(seen)) {
                return true;
            }
        }
    } while (patience.goes_on(expected, seen, who));
    return false;
}

// Waits until the word is at least `expected`. True: this thread has acquired what the word's writer released. A bulk
// copy of that needs `fence_proxy_async` besides, and other threads of the block a barrier.
__device__ inline bool wait_for_epoch(const u64* word, u64 expected, const Waiting& who, const Watch& watch) {
    auto look = [&](u64& seen) {
        seen = ptx::load_acquire_sys(word);
        return seen >= expected;
    };
    return wait_until(look, expected, who, watch);
}

// The number of the run that begins. Every block reads it at entry: the last block out, which stores the next, cannot
// be out before all have come.
__device__ inline u64 epoch_of_this_run(const Operation* operation) {
    return ptx::load_relaxed_gpu(&operation->epoch) + 1;
}

// What there is before a run: the epoch of the last one, and whether it may be. Only loaded, so that what is done next
// does not wait for it.
struct Before {
    u64 epoch = 0;
    u64 poison = 0;

    __device__ __forceinline__ void load(bool wanted, const Operation* operation, const Watch& watch) {
        epoch = ptx::load_relaxed_gpu_if(wanted, &operation->epoch, 0);
        poison = ptx::load_relaxed_gpu_if(wanted && watch.poison != nullptr, watch.poison, 0);
    }
};

// Called by one thread of every block, after a barrier of the block, when the block's work is done. True for the last
// one of the grid: it has then acquired what all the blocks did, and a release by it covers that. A block that is alone
// needs no ticket for that.
__device__ inline bool last_block_out(Operation* operation) {
    const u32 last = gridDim.x * gridDim.y * gridDim.z - 1;
    return last == 0 || ptx::atomic_increment_wrapping(&operation->ticket, last) == last;
}

// The same by a whole block, and for all of its threads: what they did is ordered before the ticket of the first.
__device__ inline bool block_is_last_out(Operation* operation) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = last_block_out(operation);
    }
    __syncthreads();
    return last;
}

// How a block ends, and the run with the last one.
struct Ending {
    bool last;
    bool trouble;  // any block has said so; known to the last one
};

// The same, where blocks say whether something went wrong: the last one need not look for that in memory, which it has
// to do after its ticket. It must give the ticket back. What a block did is ordered before what the last one does then
// only if something went wrong and this block `hands_over`, or has said so itself: a ticket that releases waits for all
// that the block has stored.
__device__ inline Ending block_is_out(Operation* operation, bool trouble, bool hands_over) {
    constexpr u32 TROUBLE = 1 << 16;  // more than there are blocks
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
        ptx::fence_acq_rel_sys();  // acquires what those released that hand over, where this ticket does not
    }
    return ending;
}

// For one thread of the last block out, before `finish_run` or without it.
__device__ inline void give_ticket_back(Operation* operation) {
    operation->ticket = 0;  // read by later kernels of this stream only
}

// For the last block out: the run is complete, and the next has the next number.
__device__ inline void finish_run(Operation* operation, u64 epoch) {
    ptx::store_relaxed_gpu(&operation->epoch, epoch);  // read by later kernels of this stream only
}

}  // namespace raymoe
