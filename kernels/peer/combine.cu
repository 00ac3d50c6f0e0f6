// Combine: sends the experts' rows of each token back to the token's rank, summed.
//
// One kernel with two kinds of blocks, all resident at once, or beside a product as soon as it ends:
//   local reduction   sums the rows of this rank's experts for each token of each peer, and pushes the sum to that
//                     peer (local_reduction.cuh)
//   final reduction   adds the ranks' sums of each token of this rank, in rank order, as they arrive
//                     (final_reduction.cuh)
// Both work on pieces of rows. So a few tokens are work for many warps.
//
// With CARRIES a float32 number of each entry (token, k) is returned too, the gradient of its weight. An expert is on
// one rank, so of each number one rank has it, and the others send zero bits.
//
// Memory map of every rank's heap; d is the rank whose experts made the rows, [2] the parity of combine's epoch:
//   rows [2][d][token]   slots, by the number of the owner's token: d's sum, and with CARRIES d's numbers
//   statuses [2][d]      why rank d refuses the data of this step, or which dispatch it combines
//   arrivals [d][number] the epoch for which piece `number` of d has arrived
//   done [d][block]      the epoch for which a local-reduction block of d has nothing more to push
//   heads [d]            the epoch for which d's status is there
// d writes all of them, at every rank, and the owner reads them; d writes its status and head to itself too.
//
// Memory order of the words that cross ranks:
//   heads     writer: for each rank one thread of block 0: status by ordinary stores, release at system scope
//             reader: for each rank one thread of a final-reduction block, or of the last block out: acquire,
//             ordinary loads of the status; __syncthreads
//   arrivals  writer: bulk stores of the piece; cp.async.bulk.wait_group (not .read); fence.acq_rel.sys; relaxed store.
//             Numbers, with the first piece of a token: ordinary stores of the warp; __syncwarp; the same fence
//             reader: for each rank one thread of a final-reduction warp: acquire; __syncwarp; ordinary loads of the
//             slot. No bulk load reads a slot, so no proxy fence is needed
//   done      writer: each warp waits for all its bulk stores; __syncthreads; for each peer one thread: relaxed store,
//             without a fence, because no data is read because of this word
//             reader: the last block out: acquire; then it ends the run
//
// A status travels with every combine, ahead of the rows, so all ranks learn of a refusal in the same combine. Each of
// them gives NaN and reports to its host; the next step works. Ranks are also refused if they combine different
// dispatches, or if only some apply weights or send numbers: without a refusal a status holds the dispatch's number,
// `weighted` and CARRIES, and all statuses must be equal.
//
// With BESIDE_PRODUCT the kernel begins when the blocks of the product have begun that computes the experts' rows. The
// product stores them piece of columns by piece (moe/product/product.cuh). Both reductions take the first pieces of all
// tokens first, and a warp waits for a piece of the rows before it reads it. The product leaves a few SMs; blocks that
// get none begin as those of the product end, and take what is left (items.cuh). Nothing changes between ranks.
//   ready     writer: each multiplying warp: ordinary stores of a tile; __syncwarp; one thread counts the tile by an
//             atomic that acquires and releases; the one that counts the last tile: release of the dispatch's number
//             reader: one thread of a warp: acquire; __syncwarp; ordinary loads of the piece
// The product waits for nothing, so its blocks end and these waits too. If it was enqueued before something else that
// changes the rows, `stored` is null, and the kernel waits for all kernels before it.
//
// With LL_STATUSES the statuses are the words of combine_ll.cu, for a backward pass beside it. They take the place of
// heads. If ranks differ, the kernel ends when all statuses are there.
//
// Why no slot is overwritten before it is read: as in dispatch.cu, with combine's own epochs. The readers of epoch e
// are the final-reduction blocks of e, which are finished when the kernel ends.
//
// A failed wait poisons (sync.cuh). From then on every launch returns at once, stores nothing to peers, and gives NaN.

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/base/ptx.cuh"
#include "raymoe/peer/combine/local_reduction.cuh"
#include "raymoe/peer/combine/final_reduction.cuh"
#include "raymoe/peer/ll/statuses_ll.cuh"
#include "raymoe/base/sync.cuh"
#include "raymoe/base/vectors.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16  // of vectors.cuh: the element type of rows
#endif
#ifndef LL_STATUSES
#define LL_STATUSES 0  // 1: statuses are those of combine_ll.cu, and there are no heads
#endif

namespace raymoe {

__device__ __forceinline__ ptx::Bytes16 status(const CombineParams& p) {
    return status_of(p, ptx::load_16(reinterpret_cast<const u8*>(&p.summary->refusal)));
}

#if LL_STATUSES

__device__ inline void send_status(const CombineParams& p, u64 epoch) { send_status_ll(p, epoch, status(p)); }

__device__ inline u64 status_words(const CombineParams& p, u64 epoch, u32 rank, u32 word) {
    return ptx::load_relaxed_sys_16(status_word(p, p.peers.rank, epoch & 1, rank, word)).low;
}

// Waits for the status of a rank. One thread calls this. Returns false if the wait failed.
__device__ inline bool await_status(const CombineParams& p, u64 epoch, u32 rank) {
    u64 value = 0;
    return await_status_word(p, epoch, rank, 0, value) && await_status_word(p, epoch, rank, 1, value);
}

#else

// Sends this rank's status to every rank, its own too. All threads of one block call this.
__device__ inline void send_status(const CombineParams& p, u64 epoch) {
    if (threadIdx.x < p.peers.ranks) {
        const ptx::Bytes16 mine = status(p);
        u8* at = p.status_at(threadIdx.x, epoch & 1, p.peers.rank);
        ptx::store_8(at, mine.low);
        ptx::store_8(at + 8, mine.high);
        ptx::store_release_sys(p.peers.flag(threadIdx.x, p.heads), epoch);  // orders the status before the epoch
    }
}

__device__ inline u64 status_words(const CombineParams& p, u64 epoch, u32 rank, u32 word) {
    return ptx::load_8(p.status_at(p.peers.rank, epoch & 1, rank) + word * 8);
}

#endif

// The verdict that follows from the statuses of all ranks.
struct Verdict {
    bool ok;       // no wait failed
    bool refused;  // at least one rank refuses, or the statuses differ
};

// Waits for the statuses of all ranks, and with `done` until no local-reduction block of any peer has anything more to
// push; then also nothing may be poisoned. All threads of the block call this. Each thread reads its own words, so all
// words take one trip to memory.
__device__ inline Verdict await_statuses(const CombineParams& p, u64 epoch, bool done) {
    const u32 ranks = p.peers.ranks, me = p.peers.rank, words = ranks + (done ? (ranks - 1) * p.local_blocks : 0);
    bool ok = !done || threadIdx.x != THREADS - 1 || !poisoned(p.watch), refused = false;
    const ptx::Bytes16 mine = threadIdx.x < ranks ? status(p) : ptx::Bytes16{0, 0};
    u32 i = threadIdx.x;
#if LL_STATUSES
    if (i < ranks && ok) {
        ok = await_status(p, epoch, i);
        refused = ok && is_refused(mine, {status_words(p, epoch, i, 0), status_words(p, epoch, i, 1)});
    }
    // A rank that runs combine_ll.cu stores no done words. Nothing has to be waited for in a step that it refuses: what
    // other ranks push has landed when their kernels end, so before their words of the next epoch.
    ok = __syncthreads_and(ok);
    refused = !__syncthreads_and(!refused);
    if (!ok || refused) {
        return {ok, refused};
    }
    i = i < ranks ? i + THREADS : i;
#endif
    for (; i < words && ok; i += THREADS) {
        const u32 of_peers = i - ranks, rank = i < ranks ? i : p.peers.in_turn(of_peers / p.local_blocks);
        const u64* word = i < ranks ? p.peers.flag_of(rank, p.heads) : p.done_at(me, rank, of_peers % p.local_blocks);
        ok = wait_for_epoch(word, epoch, Waiting{p.op, rank, epoch}, p.watch);
        if (ok && i < ranks) {
            refused = is_refused(mine, {status_words(p, epoch, rank, 0), status_words(p, epoch, rank, 1)});
        }
    }
    ok = __syncthreads_and(ok);
    return {ok, !__syncthreads_and(!refused)};
}

// Fills rows `first`, `first` + `stride`, ... of y with NaN, and the numbers of their entries. All threads of the warp
// call this.
template <class Type>
__device__ inline void fill_all_with_nan(const CombineParams& p, u32 first, u32 stride) {
    fill_with_nan<Type>(p, first, stride);
    for (u32 token = first; CARRIES && token < p.tokens; token += stride) {
        for (u32 k = threadIdx.x % 32; k < p.topk; k += 32) {
            ptx::store_4(p.returned_numbers + (static_cast<u64>(token) * p.topk + k) * 4, static_cast<u32>(F32::NANS));
        }
    }
}

// Computes rows of y as block number `block` of the final reduction. All threads of the block call this. If a wait
// fails, the last block out fills y with NaN.
template <class Type>
__device__ inline void sum_rows(const CombineParams& p, u64 epoch, u32 block) {
    const Verdict verdict = await_statuses(p, epoch, false);
    if (!verdict.ok) {
        return;
    }
    trace(p.trace, AT_COUNTS);
    const u32 warp = threadIdx.x / 32 * p.final_blocks + block, warps = WARPS * p.final_blocks;
    if (verdict.refused) {
        fill_all_with_nan<Type>(p, warp, warps);
        return;
    }
    FinalReduction<Type>(p, epoch, warp, warps).run();
}

// All threads of the last block out call this. The block has acquired what all other blocks did.
template <class Type>
__device__ inline void finish_combine(const CombineParams& p, const CombineRun& run) {
    const u64 epoch = run.epoch;
    const Verdict verdict = run.may ? await_statuses(p, epoch, true) : Verdict{false, false};
    if (!verdict.ok) {
        fill_all_with_nan<Type>(p, threadIdx.x / 32, WARPS);
        return;
    }
    if (threadIdx.x != 0) {
        return;
    }
    if (verdict.refused) {
        report_refusal(p.record, p.peers.ranks, epoch,
                       [&](u32 rank, u32 word) { return status_words(p, epoch, rank, word); });
    }
    trace(p.trace, AT_ALL_AWAITED);
    p.taken[0] = p.taken[1] = 0;  // read by later kernels of this stream only
    finish_run(p.operation, epoch);
}

template <class Type>
__device__ inline void combine_rows(const CombineParams& p, u8* shared) {
    if (BESIDE_PRODUCT && p.stored == nullptr) {
        ptx::wait_for_kernel_before();
    }
    const CombineBeginning beginning(p);
    const u32 local_blocks = p.parts & PART_REDUCE ? p.local_blocks : 0;
    CombineRun run;
    const Role of_block = role(local_blocks, p.parts & PART_SUM ? p.final_blocks : 0);
    if (of_block.reduces) {
        LocalReduction<Type> reduction(p, of_block.block, shared);
        reduction.begin();
        run = beginning.run();
        if (run.may && of_block.block == 0) {
            send_status(p, run.epoch);
        }
        if (run.may) {
            reduction.run(run.epoch);
            announce_done(p, run.epoch, of_block.block);
        }
    } else {
        run = beginning.run();
        if (run.may) {
            sum_rows<Type>(p, run.epoch, of_block.block);
        }
    }
    if (BESIDE_PRODUCT) {
        ptx::wait_for_kernel_before();  // the end of this kernel must mean that the product has ended too
    }
    if (!(p.parts & PART_SUM)) {
        return;
    }
    trace(p.trace, AT_END);
    if (block_is_last_out(p.operation)) {
        finish_combine<Type>(p, run);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::THREADS, 1)
    combine(const __grid_constant__ raymoe::CombineParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    combine_rows<ROW_TYPE>(p, shared);
}
