// The parameters of combine_ll.cu, and the work of its warps. Some sum the rows of this rank's experts for peers'
// tokens, the others add the ranks' sums.
#pragma once

#include "raymoe/peer/combine/combine.cuh"
#include "raymoe/peer/ll/dealing.cuh"
#include "raymoe/peer/ll/lines.cuh"
#include "raymoe/peer/ll/roles_ll.cuh"
#include "raymoe/base/vectors.cuh"

namespace raymoe {

#ifndef FEW_REDUCED
#define FEW_REDUCED 4  // groups of lines of a sum that a warp works on at a time; even
#endif
#ifndef FEW_SUMMED
#define FEW_SUMMED 2  // groups of a row of y that a warp works on at a time
#endif
constexpr u32 RANKS_AT_A_TIME = 4;  // ranks whose lines of a row of y are in flight at a time

struct CombineLlParams : CombineCall {
    // Offsets in every rank's heap, for each parity. The parity is the epoch of combine mod 2. combine_ll.cu has the
    // memory map. The lines of a rank begin at the same place for every exchange of a workspace.
    u64 rows[2];
    u64 statuses[2];

    u32 lines;         // of a rank, in `rows`
    Dealing reduced;   // deals the sums for peers out to warps that reduce
    Dealing summed;    // deals rows of y out to warps that sum
    u32 leaving_sms;   // SMs that reduce
    u32 arriving_sms;  // SMs that sum
};

__device__ __forceinline__ u8* line_slot(const CombineLlParams& p, u32 peer, u32 parity, u32 rank, u32 token) {
    const u64 line = static_cast<u64>(rank) * p.lines + static_cast<u64>(token) * lines_of(p.row_bytes);
    return p.peers.slot(peer, p.rows[parity], line, LINE_BYTES);
}

// Sums `count` groups of this rank's experts' rows of a token, from group `first` on, in the order of k, and rounds
// once. The loads of ROWS rows are in flight at a time. All threads of the warp call this.
template <class Type, u32 GROUPS, u32 ROWS>
__device__ __forceinline__ void sum_experts(const CombineLlParams& p, u64 entry, u32 hits, u32 first, u32 count,
                                            ptx::Bytes16* into) {
    const Part part(first, p.row_bytes);
    float sums[GROUPS][Type::COUNT] = {};
    while (hits != 0) {
        ptx::Bytes16 loaded[ROWS][GROUPS];
        float weights[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            const u64 chosen = __shfl_sync(0xFFFFFFFF, entry, hits == 0 ? 0 : __ffs(hits) - 1);
            const u8* row = p.expert_rows + static_cast<u64>(static_cast<u32>(chosen)) * p.row_bytes;
            const float weight = p.weighted ? __uint_as_float(static_cast<u32>(chosen >> 32)) : 1.0f;
            weights[i] = hits == 0 ? 0 : weight;
#pragma unroll
            for (u32 g = 0; g < GROUPS; ++g) {
                loaded[i][g] = part.load(hits != 0 && g < count, row, g);
            }
            hits &= hits - 1;
        }
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
#pragma unroll
            for (u32 g = 0; g < GROUPS; ++g) {
                float values[Type::COUNT];
                Type::unpack(loaded[i][g], values);
#pragma unroll
                for (u32 j = 0; j < Type::COUNT; ++j) {
                    sums[g][j] += weights[i] * values[j];
                }
            }
        }
    }
#pragma unroll
    for (u32 g = 0; g < GROUPS; ++g) {
        into[g] = Type::pack(sums[g]);
    }
}

// A warp that sums this rank's experts' rows for tokens of peers.
template <class Type>
class LocalReduction {
  public:
    __device__ LocalReduction(const CombineLlParams& p, u32 warp, u32 warps)
        : p_(p), dealing_(p.reduced), at_(warp), warps_(warps) {}

    // Only issues loads, before the epoch is known.
    __device__ __forceinline__ void begin() {
        const u32 lane = threadIdx.x % 32;
        sent_ = lane < p_.peers.ranks ? p_.summary->tokens[lane] : 0;
        load();
    }

    __device__ __forceinline__ void run(u64 epoch) {
        u32 most = 0;
#pragma unroll 1
        for (u32 step = 0; step + 1 < p_.peers.ranks; ++step) {
            most = max(most, __shfl_sync(0xFFFFFFFF, sent_, p_.peers.in_turn(step)));
        }
        while (at_ < dealing_.all(most)) {
            const Unit now = unit_;
            const u64 entry = entry_;
            at_ += warps_;
            load();  // the next one, while this one's rows are in flight
            reduce(epoch, now, entry);
        }
    }

  private:
    __device__ __forceinline__ void load() {
        if (at_ < dealing_.all(p_.slot_tokens)) {
            unit_ = dealing_.unit(at_);
            entry_ = p_.entry(p_.peers.in_turn(unit_.step), unit_.token);
        }
    }

    __device__ __forceinline__ void reduce(u64 epoch, const Unit& unit, u64 entry) {
        const u32 first = dealing_.begin(unit.number), count = dealing_.count(unit.number);
        const u32 source = p_.peers.in_turn(unit.step);
        const bool sent = unit.token < __shfl_sync(0xFFFFFFFF, sent_, source);
        const u32 hits = __ballot_sync(0xFFFFFFFF, sent && static_cast<u32>(entry) != NOWHERE);
        if (hits == 0) {
            return;
        }
        constexpr u32 HALF = FEW_REDUCED / 2;
        ptx::Bytes16 sums[FEW_REDUCED];
        if (__popc(hits) <= 2) {  // with few rows, more groups at a time
            sum_experts<Type, FEW_REDUCED, 2>(p_, entry, hits, first, count, sums);
        } else {
            sum_experts<Type, HALF, 4>(p_, entry, hits, first, count, sums);
            sum_experts<Type, HALF, 4>(p_, entry, hits, first + HALF, count < HALF ? 0 : count - HALF, sums + HALF);
        }
        trace_first(p_.trace, AT_FIRST_PUSH);
        u8* slot = line_slot(p_, source, epoch & 1, p_.peers.rank, unit.token);
        const Part part(first, p_.row_bytes);
#pragma unroll
        for (u32 g = 0; g < FEW_REDUCED; ++g) {
            const ptx::Bytes16 value = part.to_lines(sums[g]);
            if (g < count) {
                part.send(slot, g, value, epoch);
            }
        }
        trace(p_.trace, AT_LAST_PUSH);
    }

    const CombineLlParams& p_;
    const Dealing& dealing_;
    u32 at_;
    u32 warps_;
    u32 sent_ = 0;   // the tokens that rank i sent here, in thread i
    Unit unit_{};    // unit `at_`
    u64 entry_ = 0;  // entry k of its row, in thread k
};

// A warp that adds the ranks' sums of tokens of this rank.
template <class Type>
class FinalReduction {
  public:
    __device__ FinalReduction(const CombineLlParams& p, u32 warp, u32 warps)
        : p_(p), dealing_(p.summed), at_(warp), warps_(warps) {}

    // Only issues loads, before the epoch is known.
    __device__ __forceinline__ void begin() {
        if (has_unit()) {
            unit_ = dealing_.unit(at_);
            mask_ = p_.masks[unit_.token];
            entry_ = p_.entry(p_.peers.rank, unit_.token);
        }
    }

    // Computes this rank's own sum, which does not cross.
    __device__ __forceinline__ void sum_own() {
        if (!has_unit()) {
            return;
        }
        const bool own = mask_ >> p_.peers.rank & 1;
        const u32 hits = __ballot_sync(0xFFFFFFFF, own && static_cast<u32>(entry_) != NOWHERE);
        sum_experts<Type, FEW_SUMMED, 4>(p_, entry_, hits, first(), count(), own_);
#pragma unroll
        for (u32 g = 0; g < FEW_SUMMED; ++g) {
            own_[g] = Part(first(), p_.row_bytes).to_lines(own_[g]);
        }
    }

    // Finishes the unit that `begin` and `sum_own` have begun, and does all others. Returns false if a wait failed;
    // then the last block out fills y with NaN.
    __device__ __forceinline__ bool run(u64 epoch) {
        bool ok = true;
        while (has_unit() && ok) {
            if constexpr (MIXED_ROLES) {
                sum_own();  // in this place alone, so the kernel has the code once
            }
            ok = sum(epoch);
            at_ += warps_;
            begin();
            if constexpr (!MIXED_ROLES) {
                sum_own();
            }
        }
        return ok;
    }

  private:
    __device__ __forceinline__ bool has_unit() const { return at_ < dealing_.all(p_.tokens); }

    __device__ __forceinline__ u32 first() const { return dealing_.begin(unit_.number); }

    __device__ __forceinline__ u32 count() const { return dealing_.count(unit_.number); }

    // Adds the sums of the current unit in the order of ranks. Returns false if a wait failed.
    __device__ __forceinline__ bool sum(u64 epoch) {
        const Part part(first(), p_.row_bytes);
        float sums[FEW_SUMMED][Type::COUNT] = {};
        for (u32 left = mask_; left != 0;) {
            u32 ranks[RANKS_AT_A_TIME], asked = 0, found = 0;
#pragma unroll
            for (u32 i = 0; i < RANKS_AT_A_TIME; ++i) {
                ranks[i] = left == 0 ? p_.peers.rank : __ffs(left) - 1;
                found |= left == 0 ? 0 : 1u << i;
                asked |= ranks[i] == p_.peers.rank ? 0 : ((1u << count()) - 1) << (i * FEW_SUMMED);
                left &= left - 1;
            }
            Gathering<RANKS_AT_A_TIME * FEW_SUMMED> lines;
            lines.begin(asked, epoch);
            auto look = [&] {
                lines.ask([&](bool wanted, u32 i, const ptx::Bytes16& otherwise) {
                    const u8* slot = line_slot(p_, p_.peers.rank, epoch & 1, ranks[i / FEW_SUMMED], unit_.token);
                    return part.look(wanted, slot, i % FEW_SUMMED, otherwise);
                });
                return lines.settle(__reduce_or_sync(0xFFFFFFFF, lines.stale(epoch)));
            };
            auto missed = [&](u64& seen) { return missing_rank(epoch, seen); };
            if (!wait_as_warp(look, missed, epoch, p_.op, p_.watch)) {
                return false;
            }
            trace_first(p_.trace, AT_FIRST_ROW);
#pragma unroll
            for (u32 i = 0; i < RANKS_AT_A_TIME * FEW_SUMMED; ++i) {
                const u32 rank = i / FEW_SUMMED, g = i % FEW_SUMMED;
                if (found >> rank & 1) {
                    const bool own = ranks[rank] == p_.peers.rank;
                    const ptx::Bytes16 came{own ? own_[g].low : lines.value[i].low,
                                            own ? own_[g].high : lines.value[i].high};
                    float values[Type::COUNT];
                    Type::unpack(came, values);
#pragma unroll
                    for (u32 j = 0; j < Type::COUNT; ++j) {
                        sums[g][j] += values[j];
                    }
                }
            }
        }
        u8* row = p_.y + static_cast<u64>(unit_.token) * p_.row_bytes;
#pragma unroll
        for (u32 g = 0; g < FEW_SUMMED; ++g) {
            const ptx::Bytes16 value = part.to_pieces(Type::pack(sums[g]));
            if (g < count()) {
                part.store(row, g, value);
            }
        }
        trace(p_.trace, AT_LAST_ROW);
        return true;
    }

    // The first rank whose sum has not come, and the epoch found instead. One thread calls this after a wait has
    // failed.
    __device__ __forceinline__ u32 missing_rank(u64 epoch, u64& seen) const {
        u32 rank = p_.peers.rank;
        seen = epoch;
#pragma unroll 1
        for (u32 left = mask_ & ~(1u << p_.peers.rank); left != 0 && seen == epoch; left &= left - 1) {
            rank = __ffs(left) - 1;
            const u8* lines = line_slot(p_, p_.peers.rank, epoch & 1, rank, unit_.token);
            seen = first_stale_line(lines, first(), count(), p_.row_bytes, epoch);
        }
        return rank;
    }

    const CombineLlParams& p_;
    const Dealing& dealing_;
    u32 at_;
    u32 warps_;
    Unit unit_{};    // unit `at_`
    u32 mask_ = 0;   // ranks that the token went to
    u64 entry_ = 0;  // entry k of this rank's experts, in thread k
    ptx::Bytes16 own_[FEW_SUMMED];
};

}  // namespace raymoe
