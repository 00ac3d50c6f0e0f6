// Pieces of columns: a product of experts stores its results piece by piece, and a combine beside it begins with the
// pieces that are there.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 MOST_COLUMN_PIECES = 8;

// Of one exchange, on this GPU. Zeros before the first product.
struct ColumnPieces {
    // The number of the last dispatch whose rows have this piece. Writer: the warp that counts the last tile of the
    // piece, by a release. Reader: a warp of the combine, with acquire.
    u64 ready[MOST_COLUMN_PIECES];
    // How often warps of the running product have stored their part of a tile of this piece; 0 again after the last.
    u32 stored[MOST_COLUMN_PIECES];
};
static_assert(sizeof(ColumnPieces) == 96, "");

}  // namespace raymoe
