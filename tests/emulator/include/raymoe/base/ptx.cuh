// The functions of kernels/include/raymoe/base/ptx.cuh for the emulator: same names and signatures, earlier on the
// include path. runtime/ptx_*.cpp implements them.
#pragma once

#include "raymoe/cuda_words.cuh"

namespace raymoe {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "the structs rely on these sizes");

namespace ptx {

#pragma GCC visibility push(default)

inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- words --------------------------------------------------------------------------------------------------------
u64 load_acquire_sys(const u64* word);
u64 load_relaxed_sys(const u64* word);
void store_release_sys(u64* word, u64 value);
void store_relaxed_sys(u64* word, u64 value);
void fence_acq_rel_sys();

u64 load_relaxed_gpu(const u64* word);
void store_relaxed_gpu(u64* word, u64 value);
u32 load_relaxed_gpu_32(const u32* word);
void store_relaxed_gpu_32(u32* word, u32 value);
void store_release_gpu(u64* word, u64 value);
void atomic_min(u64* word, u64 value);
u64 atomic_add(u64* word, u64 value);
u32 atomic_increment_wrapping(u32* word, u32 last);
u32 atomic_increment_wrapping_relaxed(u32* word, u32 last);
u32 atomic_add_acq_rel(u32* word, u32 value);
u32 atomic_add_32(u32* word, u32 value);
u64 atomic_compare_swap(u64* word, u64 expected, u64 value);

inline u32 blocks() { return gridDim.x; }

u64 nanoseconds();

// ---- ordinary copies ----------------------------------------------------------------------------------------------
struct Bytes16 {
    u64 low, high;
};

Bytes16 load_16(const u8* at);
void store_16(u8* at, Bytes16 value);
Bytes16 load_relaxed_sys_16(const u8* at);
void store_relaxed_sys_16(u8* at, Bytes16 value);
Bytes16 load_line_part(const u8* line, u32 part);
void store_line_part(u8* line, u32 part, Bytes16 value);
u64 load_8(const void* at);
void store_8(void* at, u64 value);
u32 load_4(const void* at);
void store_4(void* at, u32 value);
inline Bytes16 load_16_if(bool wanted, const u8* at, Bytes16 otherwise) { return wanted ? load_16(at) : otherwise; }
inline Bytes16 load_16_once_if(bool wanted, const u8* at, Bytes16 otherwise) { return load_16_if(wanted, at, otherwise); }
inline Bytes16 load_16_streamed_if(bool wanted, const u8* at, Bytes16 otherwise) {
    return load_16_if(wanted, at, otherwise);
}
inline Bytes16 load_relaxed_sys_16_if(bool wanted, const u8* at, Bytes16 otherwise) {
    return wanted ? load_relaxed_sys_16(at) : otherwise;
}
inline Bytes16 load_line_part_if(bool wanted, const u8* line, u32 part, Bytes16 otherwise) {
    return wanted ? load_line_part(line, part) : otherwise;
}
inline u64 load_relaxed_gpu_if(bool wanted, const u64* word, u64 otherwise) {
    return wanted ? load_relaxed_gpu(word) : otherwise;
}
inline u64 load_8_if(bool wanted, const void* at, u64 otherwise) { return wanted ? load_8(at) : otherwise; }
inline u32 load_4_if(bool wanted, const void* at, u32 otherwise) { return wanted ? load_4(at) : otherwise; }
inline Bytes16 load_16_constant_if(bool wanted, const u8* at, Bytes16 otherwise) {
    return load_16_if(wanted, at, otherwise);
}
u8 load_byte(const u8* at);
void store_byte(u8* at, u8 value);

// ---- shared memory by its 32-bit address: an offset into the block's ------------------------------------------------
void shared_store_16(u32 at, Bytes16 value);
Bytes16 shared_load_16(u32 at);
inline Bytes16 shared_load_16_if(bool wanted, u32 at, Bytes16 otherwise) {
    return wanted ? shared_load_16(at) : otherwise;
}
void shared_store_8(u32 at, u64 value);
inline void shared_store_8_if(bool wanted, u32 at, u64 value) {
    if (wanted) {
        shared_store_8(at, value);
    }
}
u64 shared_load_8(u32 at);
void shared_store_4(u32 at, u32 value);
u32 shared_load_4(u32 at);
void barrier_of_warps(u32 number, u32 threads);
inline Bytes16 unknown(Bytes16 value) { return value; }

void wait_for_kernel_before();
void let_next_kernel_begin();

// ---- numbers ------------------------------------------------------------------------------------------------------
u32 to_bf16x2(float low, float high);
inline float half_of(u32 pair, u32 half) { return __uint_as_float(half == 0 ? pair << 16 : pair & 0xFFFF0000); }
inline void mma_bf16(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    for (u32 q = 0; q < 4; ++q) {
        u32 row[4], column[2][2];
        for (u32 i = 0; i < 4; ++i) {
            row[i] = __shfl_sync(0xFFFFFFFF, a[i], 4 * g + q);
        }
        for (u32 i = 0; i < 4; ++i) {
            column[i / 2][i % 2] = __shfl_sync(0xFFFFFFFF, b[i % 2], 4 * (2 * t + i / 2) + q);
        }
        for (u32 i = 0; i < 8; ++i) {
            const u32 c = i % 2, below = i / 2 % 2, half = i / 4;
            sums[2 * below + c] += half_of(row[below], half) * half_of(column[c][0], half) +
                                   half_of(row[2 + below], half) * half_of(column[c][1], half);
        }
    }
}
u32 to_f16x2(float low, float high);
float from_f16(u32 half);
u32 further_bf16x2(u32 a, u32 b);
u32 further_f16x2(u32 a, u32 b);
u32 to_e4m3x4(const float* from);
void from_e4m3x4(u32 four, float* into);

// ---- barriers that count bytes, and bulk copies ---------------------------------------------------------------------
void barrier_init(u32 barrier, u32 arrivals);
void barrier_invalidate(u32 barrier);
void fence_barrier_init();
void barrier_expect(u32 barrier, u32 bytes);
void barrier_arrive(u32 barrier);
bool barrier_try_wait(u32 barrier, u32 parity);
bool barrier_is_over(u32 barrier, u32 parity);

void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier);
void bulk_store(void* global, u32 shared, u32 bytes);
void bulk_commit();
void bulk_wait_for(u32 younger, bool only_read);
void prefetch_if(bool wanted, const void* at, u32 bytes);
void fence_proxy_async();
void fence_proxy_async_shared();

template <int younger>
inline void bulk_wait_read() {
    bulk_wait_for(younger, true);
}
template <int younger>
inline void bulk_wait() {
    bulk_wait_for(younger, false);
}

#pragma GCC visibility pop

}  // namespace ptx
}  // namespace raymoe
