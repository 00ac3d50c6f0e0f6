// Writes the rows that bring a float32 number of each entry (token, k) home: its four bytes as numbers from 0 to 255,
// which every type of rows holds exactly, in columns 4k to 4k + 3, and zeros. A combine adds the rows of a token. Their
// entries have columns of their own, so the sum holds the bytes of all K numbers. gather_weights.cu reads it.
//
// A place has one entry, so each row is written once. Rows of gaps are left as they are: combine.cu, combine_ll.cu and
// sum_entries.cu read only the rows at the places of entries.

#define ANY_GPU

#include "raymoe/base/ptx.cuh"
#include "raymoe/base/vectors.cuh"

#ifndef ROW_TYPE
#define ROW_TYPE Bf16
#endif

namespace raymoe {

constexpr u64 NO_OFFSET = ~0ull;

struct SpreadWeightsParams {
    const u8* kept;     // memory of the dispatch
    const u8* weights;  // float[capacity]: the number of each place
    u8* rows;           // [capacity][row_bytes]
    u64 places;         // offset of the place of each entry: u32[R][T][K], `place_stride` bytes apart. Any number from
                        // `capacity` on: its expert is on another rank, or there is none
    u64 tokens;         // offset of u32[R]: of how many tokens of each source the places are valid; NO_OFFSET: of all
    u32 place_stride;
    u32 slot_tokens;  // T
    u32 topk;
    u32 entries;  // R*T*K
    u32 capacity;
    u32 row_bytes;
    u32 row_threads;  // threads that write a row, 2^n up to 32
    u32 unused;
};

// The 16 bytes of a row that begin at element `first`, with the bytes of `number` in the columns of k.
__device__ __forceinline__ ptx::Bytes16 part_of_row(u32 first, u32 k, u32 number) {
    float values[ROW_TYPE::COUNT];
#pragma unroll
    for (u32 i = 0; i < ROW_TYPE::COUNT; ++i) {
        const u32 byte = number >> (i % 4 * 8) & 0xFF;
        values[i] = first / 4 + i / 4 == k ? static_cast<float>(byte) : 0.0f;
    }
    return ROW_TYPE::pack(values);
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(256)
    spread_weights(const __grid_constant__ raymoe::SpreadWeightsParams p) {
    using namespace raymoe;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x / p.row_threads;
    for (u32 entry = thread / p.row_threads; entry < p.entries; entry += step) {
        const u32 token = entry / p.topk, source = token / p.slot_tokens;
        const u32 place = ptx::load_4(p.kept + p.places + static_cast<u64>(entry) * p.place_stride);
        const u32 valid = ptx::load_4_if(p.tokens != NO_OFFSET, p.kept + p.tokens + source * 4ull, p.slot_tokens);
        // Where a dispatch has failed, both are any numbers. No row outside of `rows` is written then either.
        if (token - source * p.slot_tokens >= valid || place >= p.capacity) {
            continue;
        }
        const u32 number = ptx::load_4(p.weights + place * 4ull);
        u8* row = p.rows + static_cast<u64>(place) * p.row_bytes;
        for (u32 at = thread % p.row_threads * 16; at < p.row_bytes; at += p.row_threads * 16) {
            ptx::store_16(row + at, part_of_row(at / ROW_TYPE::BYTES, entry - token * p.topk, number));
        }
    }
}
