// The local reduction of a combine: its warps sum the rows of this rank's experts for each token of each peer. They sum
// in float32, round once to the type in which sums cross, and push the sum into the peer's slot.
//
// Rows are cut into pieces; number n is piece n % pieces of token n / pieces. An item is a number for one peer, and the
// items of a number are consecutive. So all ranks get their first pieces first. Numbers leave in the order of
// `number_at`. A warp takes a further item with each that it finishes, because some are no work and some are much.
// It sums a piece step by step and pushes each step at once, so that the links are busy from early on. With CARRIES the
// numbers of a token's entries go with its first piece.
#pragma once

#include "raymoe/peer/combine/adding.cuh"
#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/combine/items.cuh"

namespace raymoe {

constexpr u32 STEPS_UNDER_WAY = 4;  // of a warp, each in its stage

// The bytes of a warp's stage, which holds one step.
__device__ __forceinline__ u32 stage_memory() { return STEP * Crossed::BYTES + (STAMPS ? STAMP_BYTES : 0); }

// Waits until all groups but the `younger` last ones, which are the steps of a piece, have been performed. The thread
// that commits calls this. The instruction takes a constant only.
__device__ __forceinline__ void wait_for_older(u32 younger) {
    switch (younger) {
        case 1: ptx::bulk_wait<1>(); break;
        case 2: ptx::bulk_wait<2>(); break;
        case 3: ptx::bulk_wait<3>(); break;
        default: ptx::bulk_wait<4>();
    }
}

template <class Type>
class LocalReduction {
  public:
    __device__ LocalReduction(const CombineParams& p, u32 block, u8* shared)
        : p_(p), warp_(block * p.local_warps + threadIdx.x / 32), leads_(threadIdx.x % 32 == 0),
          memory_(ptx::shared_address(shared + threadIdx.x / 32 * STEPS_UNDER_WAY * stage_memory())) {}

    // Only issues loads, before the epoch is known.
    __device__ __forceinline__ void begin() {
        const u32 thread = threadIdx.x % 32;
        cause_ = ptx::load_4(&p_.summary->refusal.cause);
        sent_ = ptx::load_4_if(thread < p_.peers.ranks, &p_.summary->tokens[thread], 0);
        if (!BESIDE_PRODUCT) {  // the order of numbers does not depend on `sent_`
            entry_ = entry_of(warp_);
        }
    }

    // Reduces the warp's items, and returns when every piece has arrived and its word is stored. Ends early if a wait
    // for the product beside it fails, which poisons the run. All threads of the warp call this.
    __device__ __forceinline__ void run(u64 epoch) {
        epoch_ = epoch;
        if (threadIdx.x / 32 >= p_.local_warps || cause_ != CAUSE_NONE) {
            return;
        }
        const u32 peers = p_.peers.ranks - 1;
        sent_ = min(sent_ - min(sent_, p_.first_token), p_.most_tokens);
#pragma unroll 1
        for (u32 step = 0; step < peers; ++step) {
            most_ = max(most_, __shfl_sync(0xFFFFFFFF, sent_, p_.peers.in_turn(step)));
        }
        const u32 count = most_ * p_.pieces * peers;
        const Items items(p_.taken, warp_, p_.reduction_warps());
        u32 item = items.first(0), next = items.first(1);
        if (BESIDE_PRODUCT && item < count) {
            entry_ = entry_of(item);
        }
        while (item < count) {
            const u64 entry = entry_;
            entry_ = entry_of(next);
            const u32 asked = items.ask();
            const u32 source = p_.peers.in_turn(item % peers), number = p_.number_at(item / peers, most_);
            const bool sent = number / p_.pieces < __shfl_sync(0xFFFFFFFF, sent_, source);
            const u32 hits = __ballot_sync(0xFFFFFFFF, sent && static_cast<u32>(entry) != NOWHERE);
            if (hits != 0) {
                if (!stored_.await(p_, number % p_.pieces)) {
                    break;
                }
                push(source, number, entry, hits);
            }
            item = next;
            next = items.number(asked);
        }
        if (leads_) {
            ptx::bulk_wait<0>();
            announce_arrived();
        }
    }

  private:
    // The places of an item's rows; valid for any item. A rank alone has no items.
    __device__ __forceinline__ u64 entry_of(u32 item) const {
        const u32 peers = max(p_.peers.ranks, 2u) - 1, token = p_.number_at(item / peers, most_) / p_.pieces;
        return p_.entry(p_.peers.in_turn(item % peers), token, token < p_.most_tokens);
    }

    __device__ __forceinline__ void push(u32 source, u32 number, u64 entry, u32 hits) {
        const u32 begin = number % p_.pieces * p_.piece_vectors();
        const u32 last = min(begin + p_.piece_vectors(), p_.vectors());
        if (begin >= last) {
            return;
        }
        p_.prefetch(entry, begin, last);
        u8* slot = p_.slot_at(source, epoch_ & 1, p_.peers.rank, number / p_.pieces);
        if (CARRIES && begin == 0) {
            push_numbers(slot, entry);
        }
        u32 steps = 0;
        for (u32 step = begin; step < last; step += STEP, ++steps) {
            const u32 stage = memory_ + groups_++ % STEPS_UNDER_WAY * stage_memory();
            if (leads_) {
                ptx::bulk_wait_read<STEPS_UNDER_WAY - 1>();  // the step that was in this stage has been read
            }
            __syncwarp();
            sum_step(stage, entry, hits, step, last);
            if (leads_) {
                push_step(slot, stage, step, last, number);
            }
        }
        if (leads_) {
            if (unannounced_ == p_.together) {
                wait_for_older(steps);  // but not for this piece, so the wait is short
                announce_arrived();
            }
#pragma unroll
            for (u32 i = 0; i < MOST_TOGETHER; ++i) {
                words_[i] = i == unannounced_ ? p_.arrival_at(source, p_.peers.rank, number) : words_[i];
            }
            ++unannounced_;
        }
    }

    // Stores the numbers of a token's entries after its sum. The __syncwarp of the next step hands these stores to the
    // thread that announces the piece.
    __device__ __forceinline__ void push_numbers(u8* slot, u64 entry) const {
        const u32 k = threadIdx.x % 32;
        const u32 number = p_.number_of(entry);
        if (k < p_.topk) {
            ptx::store_4(slot + p_.wire_row_bytes + k * 4, number);
        }
    }

    // Sums the vectors from `step` on into the stage. All threads of the warp call this.
    __device__ __forceinline__ void sum_step(u32 stage, u64 entry, u32 hits, u32 step, u32 last) const {
        const u32 first = step + threadIdx.x % 32;
        float sums[UNROLL][Type::COUNT] = {};
        add_experts<Type>(p_, entry, hits, first, last, sums);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (first + 32 * i < last) {
                Crossed::pack(sums[i]).shared_store(stage + (first + 32 * i - step) * Crossed::BYTES);
            }
        }
        ptx::fence_proxy_async_shared();  // orders this thread's stores to the stage before the bulk store out of it
        __syncwarp();
    }

    // The last step of a piece also pushes its stamp. No thread reads the bytes after a row's end, up to a multiple of
    // 16.
    __device__ __forceinline__ void push_step(u8* slot, u32 stage, u32 step, u32 last, u32 number) const {
        const u32 end = min(step + STEP, last);
        const u32 bytes = ((end - step) * Crossed::BYTES + 15) & ~15u;
        ptx::bulk_store(slot + static_cast<u64>(step) * Crossed::BYTES, stage, bytes);
        if (STAMPS && end == last) {
            const u32 stamp = stage + STEP * Crossed::BYTES;
            ptx::shared_store_16(stamp, {epoch_, epoch_});
            ptx::fence_proxy_async_shared();  // orders the stamp before the bulk store of it
            ptx::bulk_store(slot + p_.stamp_at(number % p_.pieces), stamp, STAMP_BYTES);
        }
        ptx::bulk_commit();
        trace_first(p_.trace, AT_FIRST_PUSH);
        trace(p_.trace, AT_LAST_PUSH);
    }

    // Stores the words of all pieces not yet announced. The calling thread has awaited them.
    __device__ __forceinline__ void announce_arrived() {
        // Also the numbers, which the warp's threads have stored and handed on.
        ptx::fence_acq_rel_sys();  // orders the pieces, whose bulk stores this thread has awaited, before their words
#pragma unroll
        for (u32 i = 0; i < MOST_TOGETHER; ++i) {
            if (i < unannounced_) {
                ptx::store_relaxed_sys(words_[i], epoch_);
            }
        }
        unannounced_ = 0;
    }

    const CombineParams& p_;
    u32 warp_;
    bool leads_;
    u32 memory_;
    u64 epoch_ = 0;
    u32 cause_ = 0;  // why this rank refuses the step; CAUSE_NONE if it does not
    u32 sent_ = 0;   // the tokens that rank i sent here, in thread i
    u32 most_ = 0;   // the most tokens that a peer sent here
    StoredPieces stored_;
    u64 entry_ = 0;  // entry k of the next item, in thread k
    u32 groups_ = 0;
    u32 unannounced_ = 0;  // pieces that are pushed, and whose words are not stored yet
    u64* words_[MOST_TOGETHER] = {};  // their words
};

// Tells every peer that this block has nothing more to push, also if there was nothing to push. All threads of the
// block call this, when its warps have awaited their pieces. No data is read because of these words; they let the
// peers' kernels end.
__device__ inline void announce_done(const CombineParams& p, u64 epoch, u32 block) {
    __syncthreads();  // hands what the warps have awaited to the threads below
    trace(p.trace, AT_ARRIVED);
    if (threadIdx.x + 1 < p.peers.ranks) {
        ptx::store_relaxed_sys(p.done_at(p.peers.in_turn(threadIdx.x), p.peers.rank, block), epoch);
    }
    trace(p.trace, AT_SAID_DONE);
}

}  // namespace raymoe
