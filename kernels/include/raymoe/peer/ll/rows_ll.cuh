// Carries rows that cross as they are, for dispatch_ll.cu. Rows that cross as 8-bit floats: quantised_rows_ll.cuh.
//
// A row is cut into units. A warp sends a unit of a row, or places a unit of a row. Senders and placement warps cut
// rows into units in different ways. All loads of a unit are in flight together.
#pragma once

#include "raymoe/peer/ll/lines.cuh"
#include "raymoe/peer/ll/words_ll.cuh"

namespace raymoe {

#ifndef FEW_SENT
#define FEW_SENT 6  // groups of lines that a warp has loaded before it stores any
#endif
#ifndef FEW_PLACED
#define FEW_PLACED 5  // groups of lines that a placing warp waits for together
#endif

// A unit of a row to place: its source, and the routing entries of its row.
struct Arriving {
    u32 source;
    u32 token;
    u32 unit;
    bool comes;   // the source has sent this token
    u64 routing;  // routing entry k, in thread k
};

// The address of a row's lines at a rank.
__device__ __forceinline__ u8* ll_slot(const DispatchLlParams& p, u32 peer, u64 epoch, u32 source, u32 token,
                                       u32 lines) {
    const u64 line = static_cast<u64>(source) * p.lines + static_cast<u64>(token) * lines;
    return p.peers.slot(peer, p.rows[epoch & 1], line, LINE_BYTES);
}

// Calls `act` for the ranks of a mask. Each rank begins with the next rank, so not all ranks store to the same peer at
// once.
template <class Do>
__device__ __forceinline__ void for_each_rank(const Peers& peers, u32 mask, Do act) {
#pragma unroll 1
    for (u32 step = 0; step < peers.ranks; ++step) {
        const u32 peer = peers.in_turn(step);
        if (mask >> peer & 1) {
            act(peer);
        }
    }
}

// Calls `act` for the places of a row; thread k has that of entry k.
template <class Do>
__device__ __forceinline__ void for_each_place(u32 place, Do act) {
    for (u32 left = __ballot_sync(0xFFFFFFFF, place != NOWHERE); left != 0; left &= left - 1) {
        act(__shfl_sync(0xFFFFFFFF, place, __ffs(left) - 1));
    }
}

class PlainLeaving {
  public:
    static constexpr bool EARLY = true;

    __device__ PlainLeaving(const DispatchLlParams& p, u8*) : p_(p), dealing_(p.sent) {}

    // Only issues loads, before the epoch is known.
    __device__ __forceinline__ void begin(u32 token, u32 unit) {
        const u8* row = p_.x + static_cast<u64>(token) * p_.row_bytes;
        const Part part(dealing_.begin(unit), p_.row_bytes);
        const u32 count = dealing_.count(unit);
#pragma unroll
        for (u32 i = 0; i < FEW_SENT; ++i) {
            value_[i] = part.load(i < count, row, i);
        }
    }

    __device__ __forceinline__ void send(u64 epoch, const Unit& unit, u32 mask) {
        const Part part(dealing_.begin(unit.number), p_.row_bytes);
        const u32 count = dealing_.count(unit.number);
#pragma unroll
        for (u32 i = 0; i < FEW_SENT; ++i) {
            value_[i] = part.to_lines(value_[i]);
        }
        for_each_rank(p_.peers, mask, [&](u32 peer) {
            u8* lines = ll_slot(p_, peer, epoch, p_.peers.rank, unit.token, lines_of(p_.row_bytes));
#pragma unroll
            for (u32 i = 0; i < FEW_SENT; ++i) {
                if (i < count) {
                    part.send(lines, i, value_[i], epoch);
                }
            }
        });
    }

  private:
    const DispatchLlParams& p_;
    const Dealing& dealing_;
    ptx::Bytes16 value_[FEW_SENT] = {};
};

// Rows of this rank itself come out of x.
class PlainArriving {
  public:
    static constexpr bool BRIEF = true;  // placing a unit is so little code that the kernel may contain it twice

    __device__ PlainArriving(const DispatchLlParams& p, u64 epoch, u8*)
        : p_(p), epoch_(epoch), dealing_(p.placed) {}

    __device__ __forceinline__ void begin(const Arriving& row) {
        const u32 count = dealing_.count(row.unit);
        begin_ = dealing_.begin(row.unit);
        if (row.source != p_.peers.rank) {
            lines_ = ll_slot(p_, p_.peers.rank, epoch_, row.source, row.token, lines_of(p_.row_bytes));
            gathering_.begin((1u << count) - 1, epoch_);
            return;
        }
        gathering_.begin(0, epoch_);
        const u8* from = p_.x + static_cast<u64>(row.token) * p_.row_bytes;
        const Part part(begin_, p_.row_bytes);
#pragma unroll
        for (u32 i = 0; i < FEW_PLACED; ++i) {
            gathering_.value[i] = part.load(i < count && row.token < p_.tokens, from, i);
        }
    }

    __device__ __forceinline__ void ask() { gathering_.ask(Part(begin_, p_.row_bytes), lines_); }

    __device__ __forceinline__ u32 stale() const { return gathering_.stale(epoch_); }

    __device__ __forceinline__ bool settle(u32 stale) { return gathering_.settle(stale); }

    // The epoch found in a unit that a peer has not sent.
    __device__ __forceinline__ u64 seen(const Arriving& row) const {
        return first_stale_line(lines_, begin_, dealing_.count(row.unit), p_.row_bytes, epoch_);
    }

    __device__ __forceinline__ void place(const Arriving& row, u32 place) {
        const Part part(begin_, p_.row_bytes);
        const u32 count = dealing_.count(row.unit);
        if (row.source != p_.peers.rank) {
#pragma unroll
            for (u32 i = 0; i < FEW_PLACED; ++i) {
                gathering_.value[i] = part.to_pieces(gathering_.value[i]);
            }
        }
        for_each_place(place, [&](u32 at) {
            u8* into = p_.out + static_cast<u64>(at) * p_.out_row_bytes;
#pragma unroll
            for (u32 i = 0; i < FEW_PLACED; ++i) {
                if (i < count) {
                    part.store(into, i, gathering_.value[i]);
                }
            }
        });
    }

  private:
    const DispatchLlParams& p_;
    u64 epoch_;
    const Dealing& dealing_;
    u32 begin_ = 0;
    const u8* lines_ = nullptr;
    Gathering<FEW_PLACED> gathering_;
};

}  // namespace raymoe
