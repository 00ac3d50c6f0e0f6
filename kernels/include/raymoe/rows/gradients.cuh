// The shared parts of the norms' backward kernels: their parameters, and the gradients of vectors over all rows.
//
// Each group sums its rows' parts of a vector's gradient in registers, in the order of its turns, and stores the sum in
// a row of its own. sum_partials.cu adds these rows in their order. So a gradient is the same in every run on the same
// number of blocks. Atomics would add in another order in each run.
#pragma once

#include "raymoe/rows/rows.cuh"

namespace raymoe {

struct NormBackwardParams {
    PipeRows inputs[3];  // dy; x; with ADD the gradient of x + residual, which is added to dx
    PipeRows dx;         // has the offset of x
    PipeWork work;
    const u8* weight;    // [HIDDEN]
    u8* partials;        // float32 [vectors][blocks * GROUPS][HIDDEN]
    float eps;
    u32 unused;
};

// A row that is used several times. Registers hold it if they suffice; else each use loads it from its stage or memory.
template <class Type>
class RowAgain {
  public:
    __device__ __forceinline__ RowAgain(const PipeRows& from, const Tile& tile, u32 r)
        : from_(from), tile_(tile), r_(r) {
        if constexpr (HELD) {
            part_ = Part<Type>::of_row(from, tile, r);
        }
    }

    __device__ __forceinline__ void unpack(u32 i, float (&into)[8]) const {
        if constexpr (HELD) {
            part_.eights[i].unknown().unpack(into);
        } else {
            take<Type>(from_, tile_, r_, eight_of(i), is_there(i)).unpack(into);
        }
    }

  private:
    static constexpr bool HELD = VECTORS * Elements<Type>::PARTS <= (PIPE_THREADS <= 256 ? 4 : 3);

    const PipeRows& from_;
    const Tile& tile_;
    u32 r_;
    Part<Type> part_;
};

// The part of a vector's gradient that a thread sums.
struct VectorGradient {
    float sums[VECTORS][8];

    __device__ __forceinline__ VectorGradient() {
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                sums[i][j] = 0.0f;
            }
        }
    }

    // Stores the sums as this group's row of vector number `vector`.
    __device__ __forceinline__ void store(u8* partials, u32 vector) const {
        const u64 groups = static_cast<u64>(gridDim.x) * GROUPS;
        const u64 row = vector * groups + blockIdx.x * GROUPS + group_number();
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            if (is_there(i)) {
                u8* const at = partials + (row * HIDDEN + eight_of(i) * 8) * 4;
                ptx::store_16(at, F32::pack(sums[i]));
                ptx::store_16(at + 16, F32::pack(sums[i] + 4));
            }
        }
    }
};

}  // namespace raymoe
