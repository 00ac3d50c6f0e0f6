// The senders of a dispatch whose rows cross as 8-bit floats: quantised on the way from x to the link.
//
// Each BLOCK of 128 elements has a float32 scale, its largest element divided by the largest 8-bit float; a block of
// zeros has scale 1. A slot holds the elements of a row, then its scales. A row is quantised once, whatever the number
// of ranks that it goes to. A lane is a warp with one stage for a row as it comes and two for rows as they leave.
#pragma once

#include "raymoe/sending.cuh"
#include "raymoe/vectors.cuh"

namespace raymoe {

constexpr float LARGEST_E4M3 = 448.0f;
constexpr u32 LEAVING = 2;  // stages of a lane for rows that leave

// Elements of a thread whose conversions are under way at a time: each of them waits for what its neighbours find.
constexpr u32 EIGHTS = 4;

// By a whole warp, each half of which has blocks of its own, eight elements a thread: elements and scales.
__device__ __forceinline__ void quantise_eights(float (*values)[8], float* scales) {
#pragma unroll
    for (u32 i = 0; i < EIGHTS; ++i) {
        scales[i] = 0;
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            scales[i] = fmaxf(scales[i], fabsf(values[i][j]));
        }
    }
#pragma unroll
    for (u32 step = 8; step != 0; step /= 2) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
            scales[i] = fmaxf(scales[i], __shfl_xor_sync(0xFFFFFFFF, scales[i], step));
        }
    }
#pragma unroll
    for (u32 i = 0; i < EIGHTS; ++i) {
        const float inverse = scales[i] == 0.0f ? 1.0f : LARGEST_E4M3 / scales[i];
        scales[i] = scales[i] == 0.0f ? 1.0f : scales[i] / LARGEST_E4M3;
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            values[i][j] *= inverse;
        }
    }
}

// By a whole warp: the row in shared memory at `row` becomes elements and scales at `into`. `hidden` is a multiple of
// 4, and of 8 unless elements have four bytes.
template <class Type>
__device__ __forceinline__ void quantise(u32 row, u32 into, u32 hidden, u32 blocks) {
    const u32 lane = threadIdx.x % 32;
    for (u32 begin = 0; begin < hidden; begin += EIGHTS * 32 * 8) {
        float values[EIGHTS][8];
        float scales[EIGHTS];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
            const u32 first = begin + (i * 32 + lane) * 8;
#pragma unroll
            for (u32 part = 0; part < 8; part += Type::COUNT) {
                ptx::Bytes16 loaded{0, 0};
                if (first + part < hidden) {
                    loaded = ptx::shared_load_16(row + (first + part) * Type::BYTES);
                }
                Type::unpack(loaded, values[i] + part);
            }
        }
        quantise_eights(values, scales);
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
            const u32 first = begin + (i * 32 + lane) * 8, block = first / BLOCK;
#pragma unroll
            for (u32 part = 0; part < 8; part += 4) {
                if (first + part < hidden) {
                    ptx::shared_store_4(into + first + part, ptx::to_e4m3x4(values[i] + part));
                }
            }
            if (lane % 16 == 0 && block < blocks) {
                ptx::shared_store_4(into + hidden + block * 4, __float_as_uint(scales[i]));
            }
        }
    }
}

// By a whole warp: a row that is quantised already, in shared memory at `row`, and its scales become elements and
// scales at `into`.
__device__ __forceinline__ void take_quantised(const DispatchParams& p, u32 token, u32 row, u32 into) {
    for (u32 at = threadIdx.x % 32 * 16; at < p.hidden; at += 32 * 16) {
        ptx::shared_store_16(into + at, ptx::shared_load_16(row + at));
    }
    const u8* scales = p.x_scales + static_cast<u64>(token) * p.blocks() * 4;
    for (u32 block = threadIdx.x % 32; block < p.blocks(); block += 32) {
        ptx::shared_store_4(into + p.hidden + block * 4, ptx::load_4(scales + block * 4));
    }
}

// By a whole warp: the opposite, into a row of `Type`.
template <class Type>
__device__ __forceinline__ void dequantise(u32 slot, u32 row, u32 hidden) {
    for (u32 four = threadIdx.x % 32; four * 4 < hidden; four += 32) {
        const float scale = __uint_as_float(ptx::shared_load_4(slot + hidden + four / 32 * 4));
        float values[4];
        ptx::from_e4m3x4(ptx::shared_load_4(slot + four * 4), values);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[i] *= scale;
        }
        store_four<Type>(row, four, values);
    }
}

template <class Type>
class QuantLane {
  public:
    static __device__ __forceinline__ u32 memory(const DispatchParams& p) {
        return lane_memory(1, p.row_bytes) + LEAVING * ((p.slot_bytes + 127) & ~127u);
    }

    __device__ QuantLane(const DispatchParams& p, u64 epoch, u32 lane, u8* memory, bool drives)
        : p_(p), epoch_(epoch), lane_(lane), half_(epoch & 1), leads_(threadIdx.x % 32 == 0),
          row_(ptx::shared_address(memory)), barrier_(row_ + p.row_bytes),
          leaving_(row_ + lane_memory(1, p.row_bytes)) {
        if (drives && leads_) {
            ptx::barrier_init(barrier_, 1);
            ptx::fence_barrier_init();  // orders the init before the bulk loads that complete on it
        }
        __syncwarp();
    }

    // By a whole warp: of the first `tokens` tokens, what no other lane takes.
    __device__ __forceinline__ void run(u32 tokens) {
        if (lane_ >= tokens) {
            return;
        }
        load(lane_);  // nearly every token goes somewhere
        Tokens mine(p_, tokens, lane_);
        u32 token, mask;
        bool more = mine.any(token, mask);
        if (mask == 0) {
            await_row();
            more = mine.next(~0u, token, mask);
            if (more) {
                load(token);
            }
        }
        while (more) {
            const u32 this_token = token, its_mask = mask;
            more = mine.next(~0u, token, mask);
            push(this_token, its_mask, more, token);
        }
    }

    // Until every row has arrived, and its words say so.
    __device__ __forceinline__ void finish() {
        if (leads_) {
            ptx::bulk_wait<0>();
            say_arrived();
        }
    }

  private:
    __device__ __forceinline__ void load(u32 token) {
        if (leads_) {
            ptx::barrier_expect(barrier_, p_.x_bytes());
            ptx::bulk_load(row_, p_.x + static_cast<u64>(token) * p_.x_bytes(), p_.x_bytes(), barrier_);
        }
    }

    __device__ __forceinline__ void await_row() {
        while (!ptx::barrier_try_wait(barrier_, rows_ & 1)) {
        }
        ++rows_;
        __syncwarp();
    }

    __device__ __forceinline__ void push(u32 token, u32 mask, bool more, u32 next_token) {
        const u32 stage_bytes = (p_.slot_bytes + 127) & ~127u;
        const u32 stage = leaving_ + pushed_ % LEAVING * stage_bytes;
        if (leads_) {
            ptx::bulk_wait_read<LEAVING - 1>();  // the row that was in this stage has been read out of it
        }
        await_row();
        if (p_.x_scales == nullptr) {
            quantise<Type>(row_, stage, p_.hidden, p_.blocks());
        } else {
            take_quantised(p_, token, row_, stage);
        }
        // Orders this thread's stores to the stage before the bulk store out of it, and its loads of the row before the
        // bulk load that fills its stage again.
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (more) {
            load(next_token);
        }
        if (leads_) {
            stamp(stage, p_.slot_bytes, epoch_);
            for (u32 step = 0; step < p_.peers.ranks; ++step) {
                const u32 peer = p_.peers.in_turn(step);
                if (mask >> peer & 1) {
                    ptx::bulk_store(p_.slot_at(peer, half_, p_.peers.rank, token), stage, p_.slot_bytes);
                }
            }
            ptx::bulk_commit();
            trace_first(p_.trace, AT_FIRST_PUSH);
            trace(p_.trace, AT_LAST_PUSH);
            if (unsaid_ == p_.together) {
                ptx::bulk_wait<1>();  // not for this row, so that the wait is a short one
                say_arrived();
            }
#pragma unroll
            for (u32 i = 0; i < MOST_TOGETHER; ++i) {
                tokens_[i] = i == unsaid_ ? token : tokens_[i];
                masks_[i] = i == unsaid_ ? mask : masks_[i];
            }
            ++unsaid_;
        }
        ++pushed_;
    }

    // By the thread that has awaited the rows of which nothing has been said.
    __device__ __forceinline__ void say_arrived() {
        ptx::fence_acq_rel_sys();  // orders the rows, whose bulk stores this thread has awaited, before their words
#pragma unroll
        for (u32 i = 0; i < MOST_TOGETHER; ++i) {
            for (u32 step = 0; i < unsaid_ && step < p_.peers.ranks; ++step) {
                const u32 peer = p_.peers.in_turn(step);
                if (masks_[i] >> peer & 1) {
                    ptx::store_relaxed_sys(p_.arrival_at(peer, p_.peers.rank, tokens_[i]), epoch_);
                }
            }
        }
        unsaid_ = 0;
    }

    const DispatchParams& p_;
    u64 epoch_;
    u32 lane_;
    u32 half_;
    bool leads_;
    u32 row_;      // where a row comes to
    u32 barrier_;  // on which it completes
    u32 leaving_;  // where rows leave from
    u32 rows_ = 0;     // that have come
    u32 pushed_ = 0;
    u32 unsaid_ = 0;  // rows that have been pushed, and of which nothing has been said yet
    u32 tokens_[MOST_TOGETHER] = {};
    u32 masks_[MOST_TOGETHER] = {};
};

}  // namespace raymoe
