// Assembly of Hopper's matrix products: tensor maps, wgmma, and the registers of a warpgroup.
//
// A warpgroup is four warps, the first of which has a number that 4 divides. All its threads issue each wgmma together.
// wgmma is asynchronous. Its operands in shared memory are read, and its sums are written, at any time between the
// issue and the wait_group that covers it, through the async proxy.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// A tensor map, encoded by the driver: the address, the sizes and the strides of a tensor, and the box that one load
// takes of it. It lies in the kernel's parameters, because the hardware reads it from constant or global memory.
struct alignas(64) EncodedMap {
    u64 words[16];
};

namespace ptx {

// ---- loads by tensor maps ------------------------------------------------------------------------------------------

// A policy for lines of the L2 cache that leave it before others, or after them.
__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 evict_last_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Loads the box that begins at column x of row y. Elements outside of the tensor become zeros. The barrier counts all
// bytes of the box. A box with the 128-byte swizzle begins at a multiple of 1024 bytes.
__device__ __forceinline__ void tensor_load_2d(u32 shared, const EncodedMap& map, u32 x, u32 y, u32 barrier,
                                               u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}

// The same of matrix z of a tensor of matrices.
__device__ __forceinline__ void tensor_load_3d(u32 shared, const EncodedMap& map, u32 x, u32 y, u32 z, u32 barrier,
                                               u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}

// The same of a tensor of four dimensions: x, y, z, w.
__device__ __forceinline__ void tensor_load_4d(u32 shared, const EncodedMap& map, u32 x, u32 y, u32 z, u32 w,
                                               u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
        : "memory");
}

// Brings a tensor map to the cache from which loads read it.
__device__ __forceinline__ void prefetch_tensor_map(const EncodedMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- registers of a warpgroup --------------------------------------------------------------------------------------

// All threads of a warpgroup call these. A kernel begins with equal registers for all threads; the warpgroups that give
// registers away must do so before others can get them.
template <u32 REGISTERS>
__device__ __forceinline__ void give_registers_away() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <u32 REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Exchanges 8 x 8 elements of 16 bits between the threads of a warp. Before, thread 4 r + c has elements 2c and 2c + 1
// of row r. After, it has those of column r.
__device__ __forceinline__ u32 transposed_8x8(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

// Orders earlier accesses to the sums' registers before the wgmma that follow. (What TMA has loaded needs no fence.)
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the `younger` youngest groups are complete.
template <int younger>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(younger) : "memory");
}

// Lists of the operands of sums: 4 registers for each 8 columns.
#define RAYMOE_SUMS_1 "%0, %1, %2, %3"
#define RAYMOE_SUMS_2 RAYMOE_SUMS_1 ", %4, %5, %6, %7"
#define RAYMOE_SUMS_3 RAYMOE_SUMS_2 ", %8, %9, %10, %11"
#define RAYMOE_SUMS_4 RAYMOE_SUMS_3 ", %12, %13, %14, %15"
#define RAYMOE_SUMS_5 RAYMOE_SUMS_4 ", %16, %17, %18, %19"
#define RAYMOE_SUMS_6 RAYMOE_SUMS_5 ", %20, %21, %22, %23"
#define RAYMOE_SUMS_7 RAYMOE_SUMS_6 ", %24, %25, %26, %27"
#define RAYMOE_SUMS_8 RAYMOE_SUMS_7 ", %28, %29, %30, %31"
#define RAYMOE_SUMS_9 RAYMOE_SUMS_8 ", %32, %33, %34, %35"
#define RAYMOE_SUMS_10 RAYMOE_SUMS_9 ", %36, %37, %38, %39"
#define RAYMOE_SUMS_11 RAYMOE_SUMS_10 ", %40, %41, %42, %43"
#define RAYMOE_SUMS_12 RAYMOE_SUMS_11 ", %44, %45, %46, %47"
#define RAYMOE_SUMS_13 RAYMOE_SUMS_12 ", %48, %49, %50, %51"
#define RAYMOE_SUMS_14 RAYMOE_SUMS_13 ", %52, %53, %54, %55"
#define RAYMOE_SUMS_15 RAYMOE_SUMS_14 ", %56, %57, %58, %59"
#define RAYMOE_SUMS_16 RAYMOE_SUMS_15 ", %60, %61, %62, %63"
#define RAYMOE_SUMS_17 RAYMOE_SUMS_16 ", %64, %65, %66, %67"
#define RAYMOE_SUMS_18 RAYMOE_SUMS_17 ", %68, %69, %70, %71"
#define RAYMOE_SUMS_19 RAYMOE_SUMS_18 ", %72, %73, %74, %75"
#define RAYMOE_SUMS_20 RAYMOE_SUMS_19 ", %76, %77, %78, %79"
#define RAYMOE_SUMS_21 RAYMOE_SUMS_20 ", %80, %81, %82, %83"
#define RAYMOE_SUMS_22 RAYMOE_SUMS_21 ", %84, %85, %86, %87"
#define RAYMOE_SUMS_23 RAYMOE_SUMS_22 ", %88, %89, %90, %91"
#define RAYMOE_SUMS_24 RAYMOE_SUMS_23 ", %92, %93, %94, %95"
#define RAYMOE_SUMS_25 RAYMOE_SUMS_24 ", %96, %97, %98, %99"
#define RAYMOE_SUMS_26 RAYMOE_SUMS_25 ", %100, %101, %102, %103"
#define RAYMOE_SUMS_27 RAYMOE_SUMS_26 ", %104, %105, %106, %107"
#define RAYMOE_SUMS_28 RAYMOE_SUMS_27 ", %108, %109, %110, %111"
#define RAYMOE_SUMS_29 RAYMOE_SUMS_28 ", %112, %113, %114, %115"
#define RAYMOE_SUMS_30 RAYMOE_SUMS_29 ", %116, %117, %118, %119"
#define RAYMOE_SUMS_31 RAYMOE_SUMS_30 ", %120, %121, %122, %123"
#define RAYMOE_SUMS_32 RAYMOE_SUMS_31 ", %124, %125, %126, %127"
#define RAYMOE_OPERANDS_1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define RAYMOE_OPERANDS_2 RAYMOE_OPERANDS_1, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define RAYMOE_OPERANDS_3 RAYMOE_OPERANDS_2, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define RAYMOE_OPERANDS_4 RAYMOE_OPERANDS_3, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define RAYMOE_OPERANDS_5 RAYMOE_OPERANDS_4, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define RAYMOE_OPERANDS_6 RAYMOE_OPERANDS_5, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define RAYMOE_OPERANDS_7 RAYMOE_OPERANDS_6, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define RAYMOE_OPERANDS_8 RAYMOE_OPERANDS_7, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define RAYMOE_OPERANDS_9 RAYMOE_OPERANDS_8, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define RAYMOE_OPERANDS_10 RAYMOE_OPERANDS_9, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define RAYMOE_OPERANDS_11 RAYMOE_OPERANDS_10, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define RAYMOE_OPERANDS_12 RAYMOE_OPERANDS_11, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define RAYMOE_OPERANDS_13 RAYMOE_OPERANDS_12, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define RAYMOE_OPERANDS_14 RAYMOE_OPERANDS_13, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define RAYMOE_OPERANDS_15 RAYMOE_OPERANDS_14, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define RAYMOE_OPERANDS_16 RAYMOE_OPERANDS_15, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define RAYMOE_OPERANDS_17 RAYMOE_OPERANDS_16, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define RAYMOE_OPERANDS_18 RAYMOE_OPERANDS_17, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define RAYMOE_OPERANDS_19 RAYMOE_OPERANDS_18, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define RAYMOE_OPERANDS_20 RAYMOE_OPERANDS_19, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define RAYMOE_OPERANDS_21 RAYMOE_OPERANDS_20, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define RAYMOE_OPERANDS_22 RAYMOE_OPERANDS_21, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define RAYMOE_OPERANDS_23 RAYMOE_OPERANDS_22, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define RAYMOE_OPERANDS_24 RAYMOE_OPERANDS_23, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define RAYMOE_OPERANDS_25 RAYMOE_OPERANDS_24, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define RAYMOE_OPERANDS_26 RAYMOE_OPERANDS_25, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define RAYMOE_OPERANDS_27 RAYMOE_OPERANDS_26, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define RAYMOE_OPERANDS_28 RAYMOE_OPERANDS_27, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define RAYMOE_OPERANDS_29 RAYMOE_OPERANDS_28, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define RAYMOE_OPERANDS_30 RAYMOE_OPERANDS_29, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define RAYMOE_OPERANDS_31 RAYMOE_OPERANDS_30, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define RAYMOE_OPERANDS_32 RAYMOE_OPERANDS_31, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// Multiplies 64 rows by N rows of 16 columns each: d = rows * other rows^T, added to d. With g = lane / 4,
// c = lane % 4, thread has in d[4 j ...] columns 8 j + 2 c and 8 j + 2 c + 1 of row 16 * warp + g, then of row
// 16 * warp + g + 8.
//
// Columns of a row are neighbours in shared memory. Of a transposed operand, rows of a column are.
template <u32 N, u32 TRANSPOSED_ROWS = 0, u32 TRANSPOSED_OTHERS = 0>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 rows, u64 others);

#ifndef WGMMA_TYPE
#define WGMMA_TYPE "bf16"
#endif

#define RAYMOE_WGMMA_OF(N, EIGHTS, A, B, TRANSPOSED_A, TRANSPOSED_B)                                                 \
    template <>                                                                                                      \
    __device__ __forceinline__ void wgmma<N, TRANSPOSED_A, TRANSPOSED_B>(float (&d)[N / 2], u64 rows, u64 others) {  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE "." WGMMA_TYPE                     \
                     " {" RAYMOE_SUMS_##EIGHTS "}, %" #A ", %" #B ", 1, 1, 1, " #TRANSPOSED_A ", " #TRANSPOSED_B ";" \
                     : RAYMOE_OPERANDS_##EIGHTS                                                                      \
                     : "l"(rows), "l"(others));                                                                      \
    }
#define RAYMOE_WGMMA(N, EIGHTS, A, B)           \
    RAYMOE_WGMMA_OF(N, EIGHTS, A, B, 0, 0)      \
    RAYMOE_WGMMA_OF(N, EIGHTS, A, B, 1, 0)      \
    RAYMOE_WGMMA_OF(N, EIGHTS, A, B, 1, 1)
RAYMOE_WGMMA(8, 1, 4, 5)
RAYMOE_WGMMA(16, 2, 8, 9)
RAYMOE_WGMMA(24, 3, 12, 13)
RAYMOE_WGMMA(32, 4, 16, 17)
RAYMOE_WGMMA(40, 5, 20, 21)
RAYMOE_WGMMA(48, 6, 24, 25)
RAYMOE_WGMMA(56, 7, 28, 29)
RAYMOE_WGMMA(64, 8, 32, 33)
RAYMOE_WGMMA(72, 9, 36, 37)
RAYMOE_WGMMA(80, 10, 40, 41)
RAYMOE_WGMMA(88, 11, 44, 45)
RAYMOE_WGMMA(96, 12, 48, 49)
RAYMOE_WGMMA(104, 13, 52, 53)
RAYMOE_WGMMA(112, 14, 56, 57)
RAYMOE_WGMMA(120, 15, 60, 61)
RAYMOE_WGMMA(128, 16, 64, 65)
RAYMOE_WGMMA(136, 17, 68, 69)
RAYMOE_WGMMA(144, 18, 72, 73)
RAYMOE_WGMMA(152, 19, 76, 77)
RAYMOE_WGMMA(160, 20, 80, 81)
RAYMOE_WGMMA(168, 21, 84, 85)
RAYMOE_WGMMA(176, 22, 88, 89)
RAYMOE_WGMMA(184, 23, 92, 93)
RAYMOE_WGMMA(192, 24, 96, 97)
RAYMOE_WGMMA(200, 25, 100, 101)
RAYMOE_WGMMA(208, 26, 104, 105)
RAYMOE_WGMMA(216, 27, 108, 109)
RAYMOE_WGMMA(224, 28, 112, 113)
RAYMOE_WGMMA(232, 29, 116, 117)
RAYMOE_WGMMA(240, 30, 120, 121)
RAYMOE_WGMMA(248, 31, 124, 125)
RAYMOE_WGMMA(256, 32, 128, 129)

// Tells the compiler that the sums change here: after a wait, before their first use.
template <u32 COUNT>
__device__ __forceinline__ void sums_have_come(float (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

// The same for rows of 32 columns of 8-bit floats (e4m3). Without ADD the products replace d. The hardware adds them
// with fewer bits than a float has, so a kernel adds the results of a few of them in float32.
template <u32 N, bool ADD>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], u64 rows, u64 others) {
    static_assert(N == 0, "no such wgmma");
}

#define RAYMOE_WGMMA_E4M3(N, EIGHTS, A, B, ADD)                                                       \
    template <>                                                                                       \
    __device__ __forceinline__ void wgmma_e4m3<N, ADD>(float (&d)[N / 2], u64 rows, u64 others) {     \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" RAYMOE_SUMS_##EIGHTS \
                     "}, %" #A ", %" #B ", " #ADD ", 1, 1;"                                            \
                     : RAYMOE_OPERANDS_##EIGHTS                                                       \
                     : "l"(rows), "l"(others));                                                       \
    }
#define RAYMOE_WGMMA_E4M3_BOTH(N, EIGHTS, A, B) \
    RAYMOE_WGMMA_E4M3(N, EIGHTS, A, B, 0)       \
    RAYMOE_WGMMA_E4M3(N, EIGHTS, A, B, 1)
RAYMOE_WGMMA_E4M3_BOTH(8, 1, 4, 5)
RAYMOE_WGMMA_E4M3_BOTH(16, 2, 8, 9)
RAYMOE_WGMMA_E4M3_BOTH(24, 3, 12, 13)
RAYMOE_WGMMA_E4M3_BOTH(32, 4, 16, 17)
RAYMOE_WGMMA_E4M3_BOTH(40, 5, 20, 21)
RAYMOE_WGMMA_E4M3_BOTH(48, 6, 24, 25)
RAYMOE_WGMMA_E4M3_BOTH(56, 7, 28, 29)
RAYMOE_WGMMA_E4M3_BOTH(64, 8, 32, 33)
RAYMOE_WGMMA_E4M3_BOTH(72, 9, 36, 37)
RAYMOE_WGMMA_E4M3_BOTH(80, 10, 40, 41)
RAYMOE_WGMMA_E4M3_BOTH(88, 11, 44, 45)
RAYMOE_WGMMA_E4M3_BOTH(96, 12, 48, 49)
RAYMOE_WGMMA_E4M3_BOTH(104, 13, 52, 53)
RAYMOE_WGMMA_E4M3_BOTH(112, 14, 56, 57)
RAYMOE_WGMMA_E4M3_BOTH(120, 15, 60, 61)
RAYMOE_WGMMA_E4M3_BOTH(128, 16, 64, 65)
RAYMOE_WGMMA_E4M3_BOTH(136, 17, 68, 69)
RAYMOE_WGMMA_E4M3_BOTH(144, 18, 72, 73)
RAYMOE_WGMMA_E4M3_BOTH(152, 19, 76, 77)
RAYMOE_WGMMA_E4M3_BOTH(160, 20, 80, 81)
RAYMOE_WGMMA_E4M3_BOTH(168, 21, 84, 85)
RAYMOE_WGMMA_E4M3_BOTH(176, 22, 88, 89)

}  // namespace ptx
}  // namespace raymoe
