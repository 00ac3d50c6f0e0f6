// Multiplies the transposed rows of each expert by its other rows: the gradients of the weights of a product.
//
//   d_weight[e][n][k] = sum over the rows r of expert e of dy[r][n] * x[r][k], summed in float32 and rounded once
//
//   ADDS_RESULTS  adds the sums to float32 that are there already, in memory; experts without rows add nothing
//   HALF_FLOATS   elements are float16, not bfloat16
//
// Both operands are transposed: the rows of an expert, over which the sums go, are the columns of wgmma. Loads clip
// them at the expert's count: rows after it are zeros in shared memory, whatever memory holds there. So an expert may
// begin at any row, and gaps may be NaN. Experts without rows get zeros.
//
// A tile is 128 outputs times at most 256 columns. Its last 16 rows may be zeros in part; others are not multiplied.
// Blocks take tiles from a counter (rows/pipe.cuh describes it), expert by expert. Neighbouring tiles have the same
// columns of x. All rows of an expert come from the L2 cache after the first tiles.
//
//   warps        what they do
//   0 to 7       two warpgroups multiply: warpgroup w has outputs 64 w to 64 w + 63 of the tile. Then they convert the
//                sums and store them. Nothing waits for the stores, and the next tile's first stages load meanwhile
//   8            its first thread takes tiles and loads their rows, stage after stage
//   9 to 11      idle; they only give their registers away
//
// Stages: STAGES of 64 rows each, for 128 outputs of dy and 256 columns of x, in boxes of 64 rows by 64 elements.
//   full    one arrival: the loading thread, with the bytes of the stage
//   empty   an arrival of each multiplying warp, after the wgmma that read the stage, when the next ones are under way
// Tiles: the loading thread writes each tile to one of two records; the multiplying warps read it.
//   told    one arrival: the loading thread, after it wrote the record
//   read    an arrival of each multiplying warp, after it read the record
//
// Order, where memory changes hands: as in product.cu.
//
// Results are the same bits in every run: one block sums a result, 16 rows at a time, in order. With ADDS_RESULTS one
// addition follows, of which there is one for each float.
//
// Dynamic shared memory: STAGES stages, 1024-byte aligned; the barriers; two records of tiles.
// raymoe/moe/outer_products.py computes the same sum.

#include "raymoe/moe/product/outer_results.cuh"

namespace raymoe {

// Gives a stage back to the loading thread.
__device__ __forceinline__ void give_back(const OuterMemory& memory, u32 turn) {
    if (threadIdx.x % 32 == 0) {
        ptx::barrier_arrive(memory.empty(turn % STAGES));
    }
}

// Issues the wgmma of 16 PARTS rows of a stage, as a group, and waits for all but the `younger` youngest groups. The
// multiplying warps call this.
template <u32 N, u32 PARTS, int younger>
__device__ __forceinline__ void multiply_rows(const OuterMemory& memory, u32 turn, float (&sums)[N / 2]) {
    const u32 stage = turn % STAGES;
    await(memory.full(stage), turn / STAGES & 1);
    const u64 outputs = operand_descriptor(memory.dy(stage) + threadIdx.x / 128 * BOX_BYTES);
    const u64 columns = operand_descriptor(memory.x(stage), BOX_BYTES);
    ptx::wgmma_fence();  // orders the registers of the sums before the wgmma that add to them
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        ptx::wgmma<N, 1, 1>(sums, outputs + part * NEXT_COLUMNS_TRANSPOSED, columns + part * NEXT_COLUMNS_TRANSPOSED);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<younger>();
}

// Multiplies a tile of N columns and stores its results. The multiplying warps call this.
template <u32 N>
__device__ __forceinline__ void multiply_tile(const OuterParams& p, const OuterMemory& memory, const OuterTile& tile,
                                              u32& turn) {
    float sums[N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) {
        sums[i] = 0.0f;
    }
    const u32 last = turn + stages_of(tile.rows) - 1;
    for (bool first = true; turn != last; ++turn, first = false) {
        multiply_rows<N, 4, 1>(memory, turn, sums);
        if (!first) {
            give_back(memory, turn - 1);
        }
    }
    switch ((tile.rows + 15) / 16 % 4) {
        case 1: multiply_rows<N, 1, 0>(memory, turn, sums); break;
        case 2: multiply_rows<N, 2, 0>(memory, turn, sums); break;
        case 3: multiply_rows<N, 3, 0>(memory, turn, sums); break;
        default: multiply_rows<N, 4, 0>(memory, turn, sums);
    }
    if (tile.rows > ROWS) {
        give_back(memory, turn - 1);
    }
    give_back(memory, turn++);
    store_results<N>(p, tile, sums);
}

template <u32 N>
__device__ __forceinline__ void multiply_at_most(const OuterParams& p, const OuterMemory& memory, const OuterTile& tile,
                                                 u32 columns, u32& turn) {
    if (columns == N) {
        multiply_tile<N>(p, memory, tile, turn);
    } else if constexpr (N > PIECE) {
        multiply_at_most<N - PIECE>(p, memory, tile, columns, turn);
    }
}

__device__ __forceinline__ void multiply_tiles(const OuterParams& p, const OuterMemory& memory) {
    u32 stage_turn = 0;
    for (u32 turn = 0;; ++turn) {
        const u32 record = turn % 2;
        await(memory.told(record), turn / 2 & 1);
        const ptx::Bytes16 words = ptx::shared_load_16(memory.tile(record));
        const OuterTile tile{static_cast<u32>(words.low), static_cast<u32>(words.low >> 32),
                             static_cast<u32>(words.high), static_cast<u32>(words.high >> 32)};
        __syncwarp();  // all threads of the warp have read the record
        if (threadIdx.x % 32 == 0) {
            ptx::barrier_arrive(memory.read(record));
        }
        if (tile.expert == p.experts) {
            return;
        }
        if (tile.rows == 0) {
            if constexpr (!ADDS) {
                const float zeros[TILE_COLUMNS / 2] = {};
                store_results<TILE_COLUMNS>(p, tile, zeros);
            }
            continue;
        }
        multiply_at_most<TILE_COLUMNS>(p, memory, tile, columns_of(p, tile), stage_turn);
    }
}

// Takes tiles until there are none, and loads them.
__device__ __forceinline__ void load_tiles(const OuterParams& p, const OuterMemory& memory) {
    const u32 output_tiles = (p.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const u32 of_expert = output_tiles * ((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    const u32 tiles = of_expert * p.experts, blocks = ptx::blocks();
    // Each block increments the counter once at its start and once for each tile that it takes.
    const u32 last_increment = tiles + blocks - 1;
    u32* counter = p.taken;
    const u64 policy = ptx::evict_last_policy();
    u32 stage_turn = 0, number = blockIdx.x;
    u32 next = blocks + ptx::atomic_increment_wrapping_relaxed(counter, last_increment);
    for (u32 turn = 0;; ++turn) {
        const u32 record = turn % 2;
        OuterTile tile{p.experts, 0, 0, 0};
        if (number < tiles) {
            const u32 expert = number / of_expert, within = number % of_expert;
            tile = {expert, within % output_tiles * TILE_OUTPUTS, within / output_tiles * TILE_COLUMNS,
                    ptx::load_4(p.expert_counts + expert * 4ull)};
        }
        await(memory.read(record), (turn / 2 + 1) & 1);
        ptx::shared_store_16(memory.tile(record), {tile.expert | static_cast<u64>(tile.output) << 32,
                                                   tile.column | static_cast<u64>(tile.rows) << 32});
        ptx::barrier_arrive(memory.told(record));
        if (number >= tiles) {
            return;
        }
        number = next;
        next = blocks + ptx::atomic_increment_wrapping_relaxed(counter, last_increment);
        load_tile(p, memory, tile, policy, stage_turn);
    }
}

}  // namespace raymoe

extern "C" __global__ void __launch_bounds__(raymoe::PRODUCT_THREADS, 1)
    outer_product(const __grid_constant__ raymoe::OuterParams p) {
    using namespace raymoe;
    extern __shared__ __align__(1024) u8 shared[];
    const OuterMemory memory{ptx::shared_address(shared)};
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            ptx::barrier_init(memory.full(stage), 1);
            ptx::barrier_init(memory.empty(stage), MULTIPLYING_WARPS);
        }
        for (u32 record = 0; record < 2; ++record) {
            ptx::barrier_init(memory.told(record), 1);
            ptx::barrier_init(memory.read(record), MULTIPLYING_WARPS);
        }
        ptx::fence_barrier_init();  // orders the inits before the loads that complete on them
    }
    __syncthreads();  // hands the barriers to all threads
    if (threadIdx.x < MULTIPLYING_WARPS * 32) {
        ptx::take_registers<MULTIPLYING_REGISTERS>();
        multiply_tiles(p, memory);
    } else {
        ptx::give_registers_away<OTHER_REGISTERS>();
        if (threadIdx.x == LOADING_WARP * 32) {
            load_tiles(p, memory);
        }
    }
}
