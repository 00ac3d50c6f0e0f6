// All inline assembly of raymoe. Each instruction appears once, named by its purpose.
//
// Memory is accessed through two proxies: ordinary loads and stores (the generic proxy) and bulk copies (the async
// proxy). Within one proxy the usual rules hold. If one proxy writes and the other reads, a proxy fence must stand
// between the two, besides the barrier or flag that orders the threads. Each call of a fence says what it orders.
#pragma once

// A kernel that needs no Hopper instruction says `#define ANY_GPU` before its first include; it runs from 8.0 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900 && !defined(ANY_GPU)
#error "raymoe's kernels use bulk copies, which need a GPU of compute capability 9.0 (Hopper) or later"
#endif

namespace raymoe {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "the structs rely on these sizes");

namespace ptx {

// The address of a pointer into shared memory, in the 32-bit form that the instructions below take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- words that other GPUs or the host read or write ---------------------------------------------------------------

__device__ __forceinline__ u64 load_acquire_sys(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_relaxed_sys(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_sys(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Orders everything this thread has seen or done, for all GPUs and the host, before its later stores. One fence and
// several relaxed stores announce the same thing to several peers at the cost of one release.
__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// ---- words of this GPU alone ---------------------------------------------------------------------------------------

// The word if `wanted`, else `otherwise`. Like all loads that end in _if, one instruction with a predicate. A branch
// would serialise several loads: the compiler mostly moves each result at the end of its branch, and so waits for it.
__device__ __forceinline__ u64 load_relaxed_gpu_if(bool wanted, const u64* word, u64 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u64 %0, [%1];}"
                 : "+l"(otherwise)
                 : "l"(word), "r"(static_cast<u32>(wanted))
                 : "memory");
    return otherwise;
}

__device__ __forceinline__ u64 load_relaxed_gpu(const u64* word) { return load_relaxed_gpu_if(true, word, 0); }

__device__ __forceinline__ void store_relaxed_gpu(u64* word, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u32 load_relaxed_gpu_32(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed_gpu_32(u32* word, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_gpu(u64* word, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Lowers the word to `value` if that is less. Orders nothing.
__device__ __forceinline__ void atomic_min(u64* word, u64 value) {
    asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Returns the value before. Orders nothing.
__device__ __forceinline__ u64 atomic_add(u64* word, u64 value) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
}

// Adds 1 and returns the value before; a value of `last` wraps to 0. Acquires and releases.
__device__ __forceinline__ u32 atomic_increment_wrapping(u32* word, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(last) : "memory");
    return before;
}

// The same, but orders nothing.
__device__ __forceinline__ u32 atomic_increment_wrapping_relaxed(u32* word, u32 last) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(last) : "memory");
    return before;
}

// Returns the value before. Acquires and releases.
__device__ __forceinline__ u32 atomic_add_acq_rel(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}

// Returns the value before. Orders nothing.
__device__ __forceinline__ u32 atomic_add_32(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}

// Stores `value` if the word is `expected`; returns the value before. Acquires and releases.
__device__ __forceinline__ u64 atomic_compare_swap(u64* word, u64 expected, u64 value) {
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(word), "l"(expected), "l"(value)
                 : "memory");
    return before;
}

// The number of blocks of the grid, which has one dimension. Read at each call, so that it occupies no register
// between.
__device__ __forceinline__ u32 blocks() {
    u32 count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
}

// In a kernel that is launched early: waits until the kernel before it in the stream has ended, and sees its writes.
__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel in the stream, if it is launched early, may begin when each block has called this or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- time ----------------------------------------------------------------------------------------------------------

// Nanoseconds of a clock that all SMs share. It may tick in steps of about a microsecond.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// ---- ordinary copies -----------------------------------------------------------------------------------------------
// Not the read-only path (ld.global.nc): it may return bytes that a peer has overwritten since.

struct Bytes16 {
    u64 low, high;
};

__device__ __forceinline__ Bytes16 load_16_if(bool wanted, const u8* at, Bytes16 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u64 {%0, %1}, [%2];}"
                 : "+l"(otherwise.low), "+l"(otherwise.high)
                 : "l"(at), "r"(static_cast<u32>(wanted))
                 : "memory");
    return otherwise;
}

__device__ __forceinline__ Bytes16 load_16(const u8* at) { return load_16_if(true, at, {0, 0}); }

// Of memory that is not read again soon: its lines leave the L2 cache before others.
__device__ __forceinline__ Bytes16 load_16_once_if(bool wanted, const u8* at, Bytes16 otherwise) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L2::cache_hint.v2.u64 {%0, %1}, [%2], %4;}"
                 : "+l"(otherwise.low), "+l"(otherwise.high)
                 : "l"(at), "r"(static_cast<u32>(wanted)), "l"(policy)
                 : "memory");
    return otherwise;
}

// The same of memory that nothing writes while this kernel runs. It takes no line of the L1 cache.
__device__ __forceinline__ Bytes16 load_16_streamed_if(bool wanted, const u8* at, Bytes16 otherwise) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0;"
                 " @p ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u64 {%0, %1}, [%2], %4;}"
                 : "+l"(otherwise.low), "+l"(otherwise.high)
                 : "l"(at), "r"(static_cast<u32>(wanted)), "l"(policy));
    return otherwise;
}

// Memory that no kernel and no peer writes while this kernel runs. So the compiler may move the load before stores.
__device__ __forceinline__ Bytes16 load_16_constant_if(bool wanted, const u8* at, Bytes16 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.u64 {%0, %1}, [%2];}"
                 : "+l"(otherwise.low), "+l"(otherwise.high)
                 : "l"(at), "r"(static_cast<u32>(wanted)));
    return otherwise;
}

__device__ __forceinline__ void store_16(u8* at, Bytes16 value) {
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(value.low), "l"(value.high) : "memory");
}

// Sixteen bytes, loaded or stored as a whole: a load finds all of a store or none of it. So one half can hold the epoch
// of the other half. Orders nothing else.
__device__ __forceinline__ Bytes16 load_relaxed_sys_16_if(bool wanted, const u8* at, Bytes16 otherwise) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        ".reg .b128 both;\n\t"
        "setp.ne.u32 p, %3, 0;\n\t"
        "mov.b128 both, {%0, %1};\n\t"
        "@p ld.relaxed.sys.global.b128 both, [%2];\n\t"
        "mov.b128 {%0, %1}, both;\n\t"
        "}"
        : "+l"(otherwise.low), "+l"(otherwise.high)
        : "l"(at), "r"(static_cast<u32>(wanted))
        : "memory");
    return otherwise;
}

__device__ __forceinline__ Bytes16 load_relaxed_sys_16(const u8* at) {
    return load_relaxed_sys_16_if(true, at, {0, 0});
}

__device__ __forceinline__ void store_relaxed_sys_16(u8* at, Bytes16 value) {
    asm volatile(
        "{\n\t"
        ".reg .b128 both;\n\t"
        "mov.b128 both, {%1, %2};\n\t"
        "st.relaxed.sys.global.b128 [%0], both;\n\t"
        "}" ::"l"(at),
        "l"(value.low), "l"(value.high)
        : "memory");
}

// A line of 128 bytes, by eight neighbouring threads of a warp in one instruction, 16 bytes each. It arrives whole. PTX
// promises that for 16 bytes only. Between GPUs on NVLink it holds for a line (NCCL's protocol LL128 relies on it too).
__device__ __forceinline__ void store_line_part(u8* line, u32 part, Bytes16 value) {
    store_relaxed_sys_16(line + part * 16, value);
}

// Loads a part of such a line, by the same eight threads.
__device__ __forceinline__ Bytes16 load_line_part_if(bool wanted, const u8* line, u32 part, Bytes16 otherwise) {
    return load_relaxed_sys_16_if(wanted, line + part * 16, otherwise);
}

__device__ __forceinline__ u64 load_8_if(bool wanted, const void* at, u64 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u64 %0, [%1];}"
                 : "+l"(otherwise)
                 : "l"(at), "r"(static_cast<u32>(wanted))
                 : "memory");
    return otherwise;
}

__device__ __forceinline__ u64 load_8(const void* at) { return load_8_if(true, at, 0); }

__device__ __forceinline__ void store_8(void* at, u64 value) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ u32 load_4_if(bool wanted, const void* at, u32 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1];}"
                 : "+r"(otherwise)
                 : "l"(at), "r"(static_cast<u32>(wanted))
                 : "memory");
    return otherwise;
}

__device__ __forceinline__ u32 load_4(const void* at) { return load_4_if(true, at, 0); }

__device__ __forceinline__ void store_4(void* at, u32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u8 load_byte(const u8* at) {
    u32 value;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return static_cast<u8>(value);
}

__device__ __forceinline__ void store_byte(u8* at, u8 value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"(static_cast<u32>(value)) : "memory");
}

// ---- shared memory by its 32-bit address ---------------------------------------------------------------------------

__device__ __forceinline__ void shared_store_16(u32 at, Bytes16 value) {
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(at), "l"(value.low), "l"(value.high) : "memory");
}

__device__ __forceinline__ Bytes16 shared_load_16_if(bool wanted, u32 at, Bytes16 otherwise) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.shared.v2.u64 {%0, %1}, [%2];}"
                 : "+l"(otherwise.low), "+l"(otherwise.high)
                 : "r"(at), "r"(static_cast<u32>(wanted))
                 : "memory");
    return otherwise;
}

__device__ __forceinline__ Bytes16 shared_load_16(u32 at) { return shared_load_16_if(true, at, {0, 0}); }

// A barrier of some warps of the block, `threads` threads in all. `number` is its own; 0 is that of __syncthreads. Like
// __syncthreads, it orders what these threads did before.
__device__ __forceinline__ void barrier_of_warps(u32 number, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void shared_store_4(u32 at, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u32 shared_load_4(u32 at) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ u64 shared_load_8(u32 at) {
    u64 value;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(at) : "memory");
    return value;
}

// With a predicate, not a branch: the compiler would move the computation of the address into the branch, each time.
__device__ __forceinline__ void shared_store_8_if(bool wanted, u32 at, u64 value) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.u64 [%0], %1;}" ::"r"(at), "l"(value),
                 "r"(static_cast<u32>(wanted))
                 : "memory");
}

__device__ __forceinline__ void shared_store_8(u32 at, u64 value) { shared_store_8_if(true, at, value); }

// The same bytes, as a value that the compiler does not know. It then converts them at each use, where it would else
// keep the converted numbers in registers, which are twice as many.
__device__ __forceinline__ Bytes16 unknown(Bytes16 value) {
    asm volatile("" : "+l"(value.low), "+l"(value.high));
    return value;
}

// ---- numbers -----------------------------------------------------------------------------------------------------

// Two floats rounded to nearest even, the first in the lower half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Adds a product of matrices, 16 x 16 and 16 x 8, to `sums`. With g = lane / 4, t = lane % 4 a lane has, of the first,
// columns 2t, 2t+1, 2t+8, 2t+9 of rows g (a0, a2) and g + 8 (a1, a3); of the second, these rows of column g (b0, b1).
__device__ __forceinline__ void mma_bf16(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 to_f16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float from_f16(u32 half) {
    float value;
    asm("{\n\t.reg .b16 half;\n\tcvt.u16.u32 half, %1;\n\tcvt.f32.f16 %0, half;\n\t}" : "=f"(value) : "r"(half));
    return value;
}

// Of each two elements the one that is further from zero, with either sign; NaN counts as nearest.
__device__ __forceinline__ u32 further_bf16x2(u32 a, u32 b) {
    u32 pair;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ u32 further_f16x2(u32 a, u32 b) {
    u32 pair;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// Four floats as 8-bit floats (4 bits of exponent, 3 of mantissa), saturating; the first is the lowest byte.
__device__ __forceinline__ u32 to_e4m3x4(const float* from) {
    u32 four;
    asm("{\n\t"
        ".reg .b16 low, high;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
        "mov.b32 %0, {low, high};\n\t"
        "}"
        : "=r"(four)
        : "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
    return four;
}

__device__ __forceinline__ void from_e4m3x4(u32 four, float* into) {
    u32 low, high;
    asm("{\n\t"
        ".reg .b16 a, b;\n\t"
        "mov.b32 {a, b}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n\t"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(four));
    into[0] = from_f16(low & 0xFFFF);
    into[1] = from_f16(low >> 16);
    into[2] = from_f16(high & 0xFFFF);
    into[3] = from_f16(high >> 16);
}

// ---- barriers in shared memory that count bytes ------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Ends a barrier's use: its memory may then be initialised again.
__device__ __forceinline__ void barrier_invalidate(u32 barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised barriers visible to the async proxy. It must stand between the inits and the first bulk load.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once. Releases, within the block, what this thread did before; a thread that finds the phase over acquires
// it. Makes the phase also wait for `bytes` of bulk loads, at most 2^20 - 1 a phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The same without bytes.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of this parity is over. If not, the instruction may suspend the thread for a while.
__device__ __forceinline__ bool barrier_try_wait(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over != 0;
}

// The same, without suspending the thread.
__device__ __forceinline__ bool barrier_is_over(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over != 0;
}

// ---- bulk copies: addresses and sizes are multiples of 16 ----------------------------------------------------------

// Global to shared memory. Completes on the barrier, and only there.
__device__ __forceinline__ void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Shared to global memory. Completes with the group that it is committed to, and only there. Groups are per thread.
__device__ __forceinline__ void bulk_store(void* global, u32 shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the `younger` youngest groups have READ their shared memory, which may then be loaded again.
// Their writes may not have arrived anywhere.
template <int younger>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(younger) : "memory");
}

// Waits until all but the `younger` youngest groups are complete: this thread sees their writes, so its release covers
// them.
template <int younger>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(younger) : "memory");
}

// Prefetches global memory to the L2 cache if `wanted`. A hint that nothing waits for. A multiple of 16 bytes.
__device__ __forceinline__ void prefetch_if(bool wanted, const void* at, u32 bytes) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.bulk.prefetch.L2.global [%0], %1;}" ::"l"(at),
                 "r"(bytes), "r"(static_cast<u32>(wanted)));
}

// Orders ordinary accesses to any memory and this thread's bulk copies: those before the fence and those after it.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The same for shared memory alone.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
}  // namespace raymoe
