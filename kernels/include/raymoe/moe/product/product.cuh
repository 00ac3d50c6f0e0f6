// The switches, parameters, tiles and shared memory of product.cu, which describes them.
#pragma once

#include "raymoe/base/column_pieces.cuh"
#include "raymoe/base/trace.cuh"
#include "raymoe/moe/product/operands.cuh"

#ifndef MOST_TOKENS
#define MOST_TOKENS 176
#endif
#ifndef PRODUCT_STAGES
#define PRODUCT_STAGES 4
#endif
#ifdef GATED_ROWS
#define GATED true
#else
#define GATED false
#endif
#ifdef INTERLEAVED
#define TURNS true
#else
#define TURNS false
#endif
#ifdef TRANSPOSED_WEIGHTS
#define TRANSPOSED true
#else
#define TRANSPOSED false
#endif
#ifdef STORES_GATE_UP
#define STORES_PRODUCTS true
#else
#define STORES_PRODUCTS false
#endif
#ifdef BIASED_ROWS
#define BIASED true
#else
#define BIASED false
#endif
#ifdef WEIGHTED_ROWS
#define WEIGHTED true
#else
#define WEIGHTED false
#endif
#ifdef ZERO_GAPS
#define ZEROES_GAPS true
#else
#define ZEROES_GAPS false
#endif

#ifdef TELLS_PIECES
#define TELLS true
#else
#define TELLS false
#endif

#ifdef E4M3_OPERANDS
#define OPERAND_BYTES 1
#else
#define OPERAND_BYTES 2
#endif

namespace raymoe {

constexpr u32 TOKENS = MOST_TOKENS, STAGES = PRODUCT_STAGES;
constexpr u32 HALF_ROWS = 128;  // rows of weights in each half of a tile
constexpr u32 OUTPUTS = GATED ? HALF_ROWS : 2 * HALF_ROWS;
constexpr u32 ROW_BYTES = 128, COLUMNS = ROW_BYTES / OPERAND_BYTES;  // of a stage
constexpr u32 HALF_BYTES = HALF_ROWS * ROW_BYTES, WEIGHT_BYTES = 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + TOKENS * ROW_BYTES;
constexpr u32 STEP = ZEROES_GAPS ? 16 : 8;  // a tile's tokens are a multiple of it
// A tile of up to COLUMN_TOKENS has them as columns of wgmma. One of more has them as rows: it loads TOKENS, of which
// the last may be of no tile, or zeros.
#ifdef E4M3_OPERANDS
constexpr u32 COLUMN_TOKENS = TOKENS < 64 ? TOKENS : 64;
#else
constexpr u32 COLUMN_TOKENS = TOKENS;
#endif
static_assert(TOKENS % STEP == 0 && TOKENS <= 176, "sums of more tokens do not fit in the registers");
static_assert(!(GATED && TRANSPOSED), "gate and up rows of transposed weights are no boxes");
static_assert(!(GATED && TELLS), "a combine takes the results of the last product");

struct ProductParams {
    EncodedMap first;       // [experts][rows of weights][columns], boxes of 128 rows: gate rows, or all rows.
                            // TRANSPOSED_WEIGHTS: [experts][columns][rows], boxes of 64 columns and 64 rows
    EncodedMap second;       // the same, from the first up row on, or the same as `first`
    EncodedMap tokens[4];    // x, boxes of 64, 32, 16 and 8 rows
    const u8* expert_offsets;  // u32[experts + 1]: the first row of each expert
    const u8* expert_counts;   // u32[experts]: its rows
    u8* y;                  // [rows][outputs]
    u8* gate_up;            // STORES_GATE_UP: [rows][2 * outputs]
    const u8* bias;         // BIASED_ROWS: of each row of weights, elements as those of weights
    const u8* row_weights;  // WEIGHTED_ROWS: float[rows]
    u32* taken;             // the counter of tiles
    u64* trace;             // TRACED: u64[blocks][TRACE_POINTS]
    u32 experts;
    u32 outputs;  // of an expert, a multiple of 16
    u32 columns;  // a multiple of 8
    float alpha, limit, up_plus;
    // With TELLS_PIECES, else null and 0.
    ColumnPieces* pieces;
    const u64* dispatch;  // the number of the dispatch that brought the rows
    u32 piece_tiles;      // tiles of a piece side by side; the last piece may have fewer
    u32 unused;
    u64 unused_too[2];  // up to a multiple of 64 bytes
};

// A tile as the loading thread describes it.
struct ProductTile {
    u32 expert;
    u32 output;  // its first one
    u32 row;     // the first row of x and y
    u32 rows;    // rows of this expert; 0: there is no tile any more
    u32 stored;  // rows of y that are stored: more than `rows` where a gap becomes zeros
    u32 piece;   // of columns; 0 without TELLS_PIECES
};

// The tokens that a tile loads.
__device__ __forceinline__ u32 loaded_tokens(const ProductTile& tile) {
    return tile.stored > COLUMN_TOKENS ? TOKENS : rounded_up(tile.stored, STEP);
}

// The tiles of tokens that an expert has.
__device__ __forceinline__ u32 token_tiles(u32 rows) { return (rows + TOKENS - 1) / TOKENS; }

// The tiles of an expert side by side: of all outputs, and with TELLS_PIECES of a piece.
__device__ __forceinline__ u32 output_tiles(const ProductParams& p) { return (p.outputs + OUTPUTS - 1) / OUTPUTS; }
__device__ __forceinline__ u32 output_tiles(const ProductParams& p, u32 piece) {
    return min(p.piece_tiles, output_tiles(p) - piece * p.piece_tiles);
}

// Shared memory.
struct Memory {
    u32 begin;  // a multiple of 1024

    __device__ __forceinline__ u32 weights(u32 stage) const { return begin + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 tokens(u32 stage) const { return weights(stage) + WEIGHT_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return begin + STAGES * STAGE_BYTES + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(STAGES) + stage * 8; }
    __device__ __forceinline__ u32 told(u32 record) const { return empty(STAGES) + record * 8; }
    __device__ __forceinline__ u32 read(u32 record) const { return told(2) + record * 8; }
    __device__ __forceinline__ u32 tile(u32 record) const { return read(2) + record * 32; }
    // The number of tiles before an expert's, with TELLS_PIECES of one output tile.
    __device__ __forceinline__ u32 first_tile(u32 expert) const { return tile(2) + expert * 4; }
};

}  // namespace raymoe
