// The scale of a block of elements that become 8-bit floats (4 bits of exponent, 3 of mantissa).
//
// Each BLOCK of 128 elements has a float32 scale: its largest finite magnitude divided by the largest 8-bit float. The
// scale is at least the least normal float, so neither it nor its inverse overflows. A block without finite elements
// other than zero has scale 1. An infinity becomes the largest 8-bit float and NaN stays NaN; neither changes the
// scale.
#pragma once

#include "raymoe/base/ptx.cuh"

namespace raymoe {

constexpr u32 SCALED_ELEMENTS = 128;  // of a block with one scale
constexpr float LARGEST_E4M3 = 448.0f;
constexpr float LEAST_REACH = 0x1.cp-118f;  // LARGEST_E4M3 times the least normal float
constexpr u32 INFINITE = 0x7F800000;        // the bits of a float

// The factors of a block's elements: `factor` before they leave, `scale` on arrival.
struct Scaling {
    float scale;
    float factor;

    __device__ __forceinline__ explicit Scaling(float reach) {
        const float bounded = fmaxf(reach, LEAST_REACH);
        scale = reach == 0.0f ? 1.0f : bounded / LARGEST_E4M3;
        factor = reach == 0.0f ? 1.0f : LARGEST_E4M3 / bounded;
    }
};

}  // namespace raymoe
