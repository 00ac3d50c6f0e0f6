// Quantises rows: 8-bit floats, and a float32 scale for each 128 elements of a row, as a dispatch does on the way.
//
// A group quantises a piece of a row (rows/pieces.cuh). The results leave by ordinary stores.

#include "raymoe/rows/pieces.cuh"

namespace raymoe {

struct QuantiseParams {
    PipeRows inputs[1];
    PipeFp8 fp8;
    PipeWork work;
};

__device__ __forceinline__ void quantise_rows(const QuantiseParams& p, const Tile& tile) {
    const u32 thread = thread_in_group();
#pragma unroll 1
    for (u32 r = 0; r < tile.rows; ++r) {
        Elements<ROW_TYPE> taken[PIPE_VECTORS];
#pragma unroll
        for (u32 i = 0; i < PIPE_VECTORS; ++i) {
            const u32 eight = i * GROUP_THREADS + thread;
            taken[i] = take<ROW_TYPE>(p.inputs[0], tile, r, eight, eight < tile.eights);
        }
        quantise_row<PIPE_VECTORS>(p.fp8, tile.row + r, tile.first + thread, GROUP_THREADS, tile.first + tile.eights,
                                    [&](u32 i, float (&into)[8]) { taken[i].unpack(into); });
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PIPE_THREADS, raymoe::LEAST_BLOCKS)
    quantise(const __grid_constant__ raymoe::QuantiseParams p) {
    using namespace raymoe;
    extern __shared__ __align__(128) u8 shared[];
    Pipe<1> pipe(p.work, p.inputs, shared);
    pipe.run([&](const Tile& tile) {
        quantise_rows(p, tile);
        pipe.give_back(tile);
    });
}
