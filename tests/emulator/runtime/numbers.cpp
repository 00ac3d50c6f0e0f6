// Conversions between floats as on the GPU: to nearest even; every NaN becomes the canonical NaN.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "raymoe/base/ptx.cuh"

namespace raymoe::ptx {

namespace {

u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

u32 to_bf16(float value) {
    if (std::isnan(value)) {
        return 0x7FFF;
    }
    const u32 bits = bits_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// Rounds to a float with so many bits of mantissa; `least` is its smallest exponent of normal numbers.
float rounded(float value, int mantissa, int least) {
    int exponent;
    std::frexp(value, &exponent);  // value = f * 2^exponent, f in [0.5, 1)
    const int step = (exponent - 1 < least ? least : exponent - 1) - mantissa;
    return std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
}

u32 to_f16(float value) {
    const u32 sign = bits_of(value) >> 16 & 0x8000;
    if (std::isnan(value)) {
        return 0x7FFF;
    }
    const float near = std::isinf(value) ? value : rounded(std::fabs(value), 10, -14);
    if (std::fabs(near) > 65504.0f) {
        return sign | 0x7C00;
    }
    int exponent;
    std::frexp(near, &exponent);
    if (near < std::ldexp(1.0f, -14)) {
        return sign | static_cast<u32>(std::ldexp(near, 24));
    }
    const u32 mantissa = static_cast<u32>(std::ldexp(near, 11 - exponent)) - 1024;
    return sign | static_cast<u32>(exponent + 14) << 10 | mantissa;
}

u32 to_e4m3(float value) {
    if (std::isnan(value)) {
        return 0x7F;
    }
    const u32 sign = bits_of(value) >> 24 & 0x80;
    const float near = std::isinf(value) ? 448.0f : std::fmin(rounded(std::fabs(value), 3, -6), 448.0f);
    if (near < std::ldexp(1.0f, -6)) {
        return sign | static_cast<u32>(std::ldexp(near, 9));
    }
    int exponent;
    std::frexp(near, &exponent);
    return sign | static_cast<u32>(exponent + 6) << 3 | (static_cast<u32>(std::ldexp(near, 4 - exponent)) - 8);
}

float scaled(u32 number, int exponent) {
    return std::ldexp(static_cast<float>(number), exponent);
}

float from_e4m3(u32 bits) {
    const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = (bits & 0x7F) == 0x7F ? NAN
                       : exponent == 0       ? scaled(mantissa, -9)
                                             : scaled(8 + mantissa, static_cast<int>(exponent) - 10);
    return bits & 0x80 ? -size : size;
}

// Of each pair of 16-bit floats the one further from zero, with the product of their signs. Values above `infinity` are
// NaN.
u32 further(u32 a, u32 b, u32 infinity) {
    u32 found = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const u32 one = a >> shift & 0x7FFF, other = b >> shift & 0x7FFF, signs = (a ^ b) >> shift & 0x8000;
        const bool is_one = one <= infinity, is_other = other <= infinity;
        const u32 most = is_one && (!is_other || one > other) ? one : other;
        found |= (is_one || is_other ? signs | most : 0x7FFF) << shift;
    }
    return found;
}

}  // namespace

u32 further_bf16x2(u32 a, u32 b) { return further(a, b, 0x7F80); }
u32 further_f16x2(u32 a, u32 b) { return further(a, b, 0x7C00); }

u32 to_bf16x2(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }
u32 to_f16x2(float low, float high) { return to_f16(high) << 16 | to_f16(low); }

float from_f16(u32 half) {
    const u32 exponent = half >> 10 & 31, mantissa = half & 1023;
    const float size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                       : exponent == 0 ? scaled(mantissa, -24)
                                       : scaled(1024 + mantissa, static_cast<int>(exponent) - 25);
    return half & 0x8000 ? -size : size;
}

u32 to_e4m3x4(const float* from) {
    return to_e4m3(from[3]) << 24 | to_e4m3(from[2]) << 16 | to_e4m3(from[1]) << 8 | to_e4m3(from[0]);
}

void from_e4m3x4(u32 four, float* into) {
    for (int i = 0; i < 4; ++i) {
        into[i] = from_e4m3(four >> 8 * i & 255);
    }
}

}  // namespace raymoe::ptx
