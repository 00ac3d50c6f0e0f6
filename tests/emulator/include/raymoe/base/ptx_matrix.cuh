// The functions of kernels/include/raymoe/base/ptx_matrix.cuh for the emulator. runtime/ptx_tensor.cpp implements loads
// by tensor maps, runtime/ptx_matrix.cpp the steps of a warpgroup.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

// A tensor map of the emulator: tests/emulator/tensor_map.py packs it.
struct alignas(64) EncodedMap {
    u64 words[16];
};

namespace ptx {

#pragma GCC visibility push(default)

// ---- loads by tensor maps -------------------------------------------------------------------------------------------
inline u64 evict_first_policy() { return 0; }
inline u64 evict_last_policy() { return 0; }

void tensor_load(u32 shared, const EncodedMap& map, const u32* corner, u32 dimensions, u32 barrier);
inline void tensor_load_2d(u32 shared, const EncodedMap& map, u32 x, u32 y, u32 barrier, u64) {
    const u32 corner[] = {x, y};
    tensor_load(shared, map, corner, 2, barrier);
}
inline void tensor_load_3d(u32 shared, const EncodedMap& map, u32 x, u32 y, u32 z, u32 barrier, u64) {
    const u32 corner[] = {x, y, z};
    tensor_load(shared, map, corner, 3, barrier);
}
inline void tensor_load_4d(u32 shared, const EncodedMap& map, u32 x, u32 y, u32 z, u32 w, u32 barrier, u64) {
    const u32 corner[] = {x, y, z, w};
    tensor_load(shared, map, corner, 4, barrier);
}
inline void prefetch_tensor_map(const EncodedMap&) {}

// ---- registers of a warpgroup ---------------------------------------------------------------------------------------
void set_registers(u32 registers, bool taken);
template <u32 REGISTERS>
inline void give_registers_away() {
    set_registers(REGISTERS, false);
}
template <u32 REGISTERS>
inline void take_registers() {
    set_registers(REGISTERS, true);
}

inline u32 transposed_8x8(u32 pair) {
    return static_cast<u32>(emulator::collective(emulator::Collective::TRANSPOSED, 0xFFFFFFFF, pair, 0));
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
#ifndef WGMMA_TYPE
#define WGMMA_TYPE "bf16"
#endif

void wgmma_fence();
void wgmma_commit();
void wgmma_wait_for(u32 younger);
// The form of a product's operands, and of its sums.
struct OperandForm {
    bool half = false;  // elements are float16
    bool transposed_rows = false, transposed_others = false;
    bool e4m3 = false;  // elements are 8-bit floats
    bool add = true;    // products are added to the sums; else they replace them

    bool operator==(const OperandForm& other) const {
        return half == other.half && transposed_rows == other.transposed_rows &&
               transposed_others == other.transposed_others && e4m3 == other.e4m3 && add == other.add;
    }
};

void wgmma_of(float* sums, u32 columns, u64 rows, u64 others, OperandForm form);

template <int younger>
inline void wgmma_wait() {
    wgmma_wait_for(younger);
}
template <u32 N, u32 TRANSPOSED_ROWS = 0, u32 TRANSPOSED_OTHERS = 0>
inline void wgmma(float (&d)[N / 2], u64 rows, u64 others) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8 to 256 columns, in steps of 8");
    wgmma_of(d, N, rows, others, {WGMMA_TYPE[0] == 'f', TRANSPOSED_ROWS != 0, TRANSPOSED_OTHERS != 0});
}
template <u32 N, bool ADD>
inline void wgmma_e4m3(float (&d)[N / 2], u64 rows, u64 others) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8 to 256 columns, in steps of 8");
    wgmma_of(d, N, rows, others, {false, false, false, true, ADD});
}
template <u32 COUNT>
inline void sums_have_come(float (&)[COUNT]) {}

#pragma GCC visibility pop

}  // namespace ptx
}  // namespace raymoe
