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

// By a whole warp, whose threads have four elements each of a block: divided by the block's scale, which is given.
__device__ __forceinline__ float quantise_four(float* values) {
    float largest = fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
#pragma unroll
    for (u32 step = 16; step != 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    }
    const float inverse = largest == 0.0f ? 1.0f : LARGEST_E4M3 / largest;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        values[i] *= inverse;
    }
    return largest == 0.0f ? 1.0f : largest / LARGEST_E4M3;
}

// By a whole warp: the row in shared memory at `row` becomes elements and scales at `into`.
template <class Type>
__device__ __forceinline__ void quantise(u32 row, u32 into, u32 hidden, u32 blocks) {
    const u32 lane = threadIdx.x % 32;
    for (u32 block = 0; block < blocks; ++block) {
        const u32 four = block * 32 + lane;
        float values[4] = {};
        if (four * 4 < hidden) {
            load_four<Type>(row, four, values);
        }
        const float scale = quantise_four(values);
        if (four * 4 < hidden) {
            ptx::shared_store_4(into + four * 4, ptx::to_e4m3x4(values));
        }
        if (lane == 0) {
            ptx::shared_store_4(into + hidden + block * 4, __float_as_uint(scale));
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
          leaving_(row_ + lane_memory(1, p.row_bytes)), announcing_(p, epoch, lane) {
        if (drives && leads_) {
            ptx::barrier_init(barrier_, 1);
            ptx::fence_barrier_init();  // orders the init before the bulk loads that complete on it
        }
        __syncwarp();
    }

    // By a whole warp: sends the lane's tokens number `first` to `first + count - 1`.
    __device__ __forceinline__ void run(u32 first, u32 count, const unsigned short* masks, u32 stride) {
        u32 next = following(0, count, masks, stride);
        load(first, next, count);
        for (u32 i = 0; i < count; ++i) {
            if (const u32 mask = masks[i * stride]) {
                next = following(i + 1, count, masks, stride);
                push(first, i, next, count, mask);
            }
            if (leads_) {
                announcing_.through(first + i + 1);
            }
        }
    }

    __device__ __forceinline__ void finish() {
        if (leads_) {
            ptx::bulk_wait<0>();
        }
    }

  private:
    __device__ __forceinline__ u32 token(u32 number) const { return lane_ + number * p_.lanes(); }

    __device__ __forceinline__ u32 following(u32 i, u32 count, const unsigned short* masks, u32 stride) const {
        while (i < count && masks[i * stride] == 0) {
            ++i;
        }
        return i;
    }

    __device__ __forceinline__ void load(u32 first, u32 i, u32 count) {
        if (leads_ && i < count) {
            ptx::barrier_expect(barrier_, p_.x_bytes());
            ptx::bulk_load(row_, p_.x + static_cast<u64>(token(first + i)) * p_.x_bytes(), p_.x_bytes(), barrier_);
        }
    }

    __device__ __forceinline__ void push(u32 first, u32 i, u32 next, u32 count, u32 mask) {
        const u32 stage_bytes = (p_.slot_bytes + 127) & ~127u;
        const u32 stage = leaving_ + pushed_ % LEAVING * stage_bytes;
        if (leads_) {
            ptx::bulk_wait_read<LEAVING - 1>();  // the row that was in this stage has been read out of it
        }
        while (!ptx::barrier_try_wait(barrier_, pushed_ & 1)) {
        }
        __syncwarp();
        if (p_.x_scales == nullptr) {
            quantise<Type>(row_, stage, p_.hidden, p_.blocks());
        } else {
            take_quantised(p_, token(first + i), row_, stage);
        }
        // Orders this thread's stores to the stage before the bulk store out of it, and its loads of the row before the
        // bulk load that fills its stage again.
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (leads_) {
            stamp(stage, p_.slot_bytes, epoch_);
            pace_.keep(p_.pace(mask));
            for (u32 step = 0; step < p_.peers.ranks; ++step) {
                const u32 peer = p_.peers.in_turn(step);
                if (mask >> peer & 1) {
                    ptx::bulk_store(p_.slot_at(peer, half_, p_.peers.rank, token(first + i)), stage, p_.slot_bytes);
                }
            }
            ptx::bulk_commit();
            trace_first(p_.trace, AT_FIRST_PUSH);
            trace(p_.trace, AT_LAST_PUSH);
            announcing_.pushed();
        }
        load(first, next, count);
        ++pushed_;
    }

    const DispatchParams& p_;
    u64 epoch_;
    u32 lane_;
    u32 half_;
    bool leads_;
    u32 row_;      // where a row comes to
    u32 barrier_;  // on which it completes
    u32 leaving_;  // where rows leave from
    u32 pushed_ = 0;
    Pace pace_;
    Announcing announcing_;
};

}  // namespace raymoe
