// Which items the warps of a combine take: pieces of rows, each for one rank.
#pragma once

#include "raymoe/peer/combine/combine.cuh"

namespace raymoe {

// Gives items to warps by number, in order. A warp's first ones follow from its own number, so it asks for none before
// it begins. Beside a product some warps begin much later than others, so there all items go to those that ask.
class Items {
  public:
    static constexpr u32 KNOWN = 2;  // a warp's item and the next one, whose places it loads meanwhile

    __device__ __forceinline__ Items(u64* taken, u32 warp, u32 warps)
        : taken_(taken), warp_(warp), warps_(warps) {}

    // The i-th of the first KNOWN items. All threads of the warp call this.
    __device__ __forceinline__ u32 first(u32 i) const { return BESIDE_PRODUCT ? number(ask()) : warp_ + i * warps_; }

    // Asks for an item after those. Thread 0 of the warp gets the answer.
    __device__ __forceinline__ u32 ask() const {
        return threadIdx.x % 32 == 0 ? static_cast<u32>(ptx::atomic_add(taken_, 1)) : 0;
    }

    // The item of an answer. All threads of the warp call this.
    __device__ __forceinline__ u32 number(u32 answer) const {
        return (BESIDE_PRODUCT ? 0 : KNOWN * warps_) + __shfl_sync(0xFFFFFFFF, answer, 0);
    }

  private:
    u64* taken_;
    u32 warp_, warps_;
};

// The work of a block.
struct Role {
    bool reduces;  // it is of the local reduction, else of the final one
    u32 block;     // its number among those that do the same
};

// The role of this block. Beside a product blocks of both kinds take turns, because the first blocks begin long before
// the others.
__device__ __forceinline__ Role role(u32 local_blocks, u32 final_blocks) {
    const u32 block = blockIdx.x;
    if (!BESIDE_PRODUCT) {
        return block < local_blocks ? Role{true, block} : Role{false, block - local_blocks};
    }
    const u32 all = local_blocks + final_blocks, before = (block * local_blocks + all - 1) / all;
    const bool reduces = ((block + 1) * local_blocks + all - 1) / all > before;
    return {reduces, reduces ? before : block - before};
}

}  // namespace raymoe
