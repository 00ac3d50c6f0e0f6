// The CUDA keywords and intrinsics that raymoe's kernels use, for a C++ compiler. No standard header: a kernel is a
// small file that compiles in about a second, because the code behind these functions is compiled once (runtime/).
//
// `__shared__` and `__grid_constant__` are not defined: tests/emulator/build.py rewrites these declarations.
#pragma once

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#pragma GCC visibility push(default)

struct EmulatedIndex {
    unsigned int x, y, z;
};

// Indices of the running thread; the scheduler sets them at each switch.
extern EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum class Collective { SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_XOR, BALLOT, ALL, MATCH, OR, MAX, TRANSPOSED, WARPGROUP };

// A collective of all 32 threads of a warp. Each passes a value and an argument, and gets its own result.
unsigned long long collective(Collective kind, unsigned int mask, unsigned long long value, unsigned int argument);

// The barrier of the whole block. Returns true if every thread votes true.
bool block_barrier(bool vote);

// The block's memory for static declaration `number`, the same for all of its threads.
void* static_shared(unsigned int number, unsigned long long bytes);

// The block's memory whose size is given at launch.
unsigned char* dynamic_shared();

unsigned long long shared_offset(const void* pointer);

// Adds to a word of shared memory, and returns the value before.
unsigned int shared_add(unsigned int* word, unsigned int value);

template <class T>
T& static_variable(unsigned int number) {
    return *static_cast<T*>(static_shared(number, sizeof(T)));
}

template <class T>
T passed(Collective kind, unsigned int mask, T value, unsigned int argument) {
    static_assert(sizeof(T) <= 8, "at most a word");
    unsigned long long word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    word = collective(kind, mask, word, argument);
    __builtin_memcpy(&value, &word, sizeof(T));
    return value;
}

}  // namespace emulator

#pragma GCC visibility pop

inline void __syncthreads() { emulator::block_barrier(true); }
inline int __syncthreads_and(int vote) { return emulator::block_barrier(vote != 0); }
inline void __syncwarp(unsigned int mask = 0xFFFFFFFF) { emulator::collective(emulator::Collective::SYNC, mask, 0, 0); }

template <class T>
T __shfl_sync(unsigned int mask, T value, unsigned int lane) {
    return emulator::passed(emulator::Collective::SHUFFLE, mask, value, lane);
}
template <class T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int step) {
    return emulator::passed(emulator::Collective::SHUFFLE_UP, mask, value, step);
}
template <class T>
T __shfl_xor_sync(unsigned int mask, T value, unsigned int bits) {
    return emulator::passed(emulator::Collective::SHUFFLE_XOR, mask, value, bits);
}
inline unsigned int __ballot_sync(unsigned int mask, int vote) {
    return static_cast<unsigned int>(emulator::collective(emulator::Collective::BALLOT, mask, vote != 0, 0));
}
inline int __all_sync(unsigned int mask, int vote) {
    return static_cast<int>(emulator::collective(emulator::Collective::ALL, mask, vote != 0, 0));
}
template <class T>
unsigned int __match_any_sync(unsigned int mask, T value) {
    unsigned long long word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    return static_cast<unsigned int>(emulator::collective(emulator::Collective::MATCH, mask, word, 0));
}

inline unsigned int __reduce_or_sync(unsigned int mask, unsigned int value) {
    return static_cast<unsigned int>(emulator::collective(emulator::Collective::OR, mask, value, 0));
}
inline int __reduce_max_sync(unsigned int mask, int value) {
    constexpr unsigned int SIGN = 1u << 31;  // flipping it makes negative numbers the smaller ones
    const unsigned int moved = static_cast<unsigned int>(value) ^ SIGN;
    return static_cast<int>(static_cast<unsigned int>(emulator::collective(emulator::Collective::MAX, mask, moved, 0)) ^
                            SIGN);
}
inline unsigned int __reduce_max_sync(unsigned int mask, unsigned int value) {
    return static_cast<unsigned int>(emulator::collective(emulator::Collective::MAX, mask, value, 0));
}
inline int __any_sync(unsigned int mask, int vote) { return __ballot_sync(mask, vote) != 0; }

inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned int bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(unsigned int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }

inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned int result = 0;
    for (unsigned int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned int>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    }
    return result;
}

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(unsigned int bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fabsf(float a) { return __builtin_fabsf(a); }
inline float sqrtf(float a) { return __builtin_sqrtf(a); }
inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
inline float expf(float a) { return __builtin_expf(a); }
inline float logf(float a) { return __builtin_logf(a); }
inline float tanhf(float a) { return __builtin_tanhf(a); }
inline float erff(float a) { return __builtin_erff(a); }
inline float __expf(float a) { return __builtin_expf(a); }
inline float __fdividef(float a, float b) {  // zero where the divisor is above 2^126 and finite
    const float size = __builtin_fabsf(b);
    return size > 0x1p126f && size < __builtin_inff() ? a * 0.0f : a / b;
}
template <class T>
constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T>
constexpr T max(T a, T b) { return a < b ? b : a; }

inline unsigned long long __cvta_generic_to_shared(const void* pointer) { return emulator::shared_offset(pointer); }

// For shared memory only.
inline unsigned int atomicAdd(unsigned int* word, unsigned int value) { return emulator::shared_add(word, value); }
