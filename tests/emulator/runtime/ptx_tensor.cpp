// Loads by tensor maps, of raymoe/base/ptx_matrix.cuh.
//
// They complete like bulk loads: late, in any order, by the async proxy. A box lies in shared memory with the 128-byte
// swizzle, by which the hardware exchanges bits 4 to 6 of an address with their XOR with bits 7 to 9. Elements outside
// of the tensor are zeros.

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "raymoe/base/ptx_matrix.cuh"

namespace emulator {

namespace {

constexpr u32 MOST_DIMENSIONS = 5;
constexpr u64 MARK = 0x70616D206F6D7972;  // the first word of a map that tests/emulator/tensor_map.py packed

// A tensor map: a struct of tests/emulator/tensor_map.py.
struct Map {
    u64 mark, address;
    u32 dimensions, swizzle;  // 128: the only one
    u32 element, unused;      // bytes of an element
    u32 sizes[MOST_DIMENSIONS], box[MOST_DIMENSIONS];
    u64 strides[MOST_DIMENSIONS - 1];  // bytes between neighbours, from the second dimension on
};

static_assert(sizeof(Map) <= sizeof(raymoe::EncodedMap), "a map has 128 bytes");

// 16 bytes of a box: those before `bytes` come from memory, the others are zeros.
struct Piece {
    const Region* region;
    const u8* from;
    u32 into, bytes;
};

struct BoxLoad {
    Block* block;
    u32 barrier, bytes;
    u64 proxy_time;
    std::vector<Piece> pieces;
};

Map unpacked(const raymoe::EncodedMap& encoded, u32 dimensions) {
    Map map;
    std::memcpy(&map, &encoded, sizeof map);
    if (map.mark != MARK) {
        machine->fail("a load by a tensor map that is none of the emulator's");
    }
    if (map.dimensions != dimensions) {
        machine->fail("a load of " + std::to_string(dimensions) + " dimensions by a tensor map of " +
                      std::to_string(map.dimensions));
    }
    if (map.swizzle != 128 || map.box[0] * map.element != 128) {
        machine->fail("the emulator supports only boxes of 128-byte rows with the 128-byte swizzle");
    }
    return map;
}

// The pieces of one row of a box; `outside`: of the tensor.
void add_row(BoxLoad& load, const Map& map, long long x, const u8* row, bool outside, u32 shared) {
    const u32 together = LINE / map.element;
    const long long left = outside ? 0 : map.sizes[0] - x;
    for (u32 piece = 0; piece < 8; ++piece) {
        const long long first = x + piece * together, inside = first < 0 ? 0 : left - piece * together;
        const u32 bytes = static_cast<u32>(std::clamp<long long>(inside * map.element, 0, LINE));
        const u32 linear = shared + piece * LINE, into = linear ^ (linear >> 7 & 7) << 4;
        const u8* from = bytes == 0 ? nullptr : row + first * map.element;
        load.pieces.push_back({bytes == 0 ? nullptr : &checked(from, bytes, LINE, "tensor loads"), from, into, bytes});
    }
}

void land(const BoxLoad& load) {
    const ProxyView view{load.block->launch->rank->number, load.proxy_time};
    for (const Piece& piece : load.pieces) {
        u8 bytes[LINE] = {};
        if (piece.bytes != 0) {
            view.read_line(*piece.region, piece.from, bytes);
            std::fill(bytes + piece.bytes, bytes + LINE, 0);
        }
        std::memcpy(load.block->shared + piece.into, bytes, LINE);
    }
    complete_load(*load.block, load.barrier, load.bytes);
}

}  // namespace

}  // namespace emulator

namespace raymoe::ptx {

using emulator::machine;
using emulator::self;

void tensor_load(u32 shared, const EncodedMap& encoded, const u32* corner, u32 dimensions, u32 barrier) {
    machine->maybe_yield();
    const emulator::Map map = emulator::unpacked(encoded, dimensions);
    const int x = static_cast<int>(corner[0]);
    if (shared % 1024 != 0) {
        machine->fail("a box with the 128-byte swizzle begins at " + std::to_string(shared) +
                      " of shared memory, no multiple of 1024");
    }
    if (x * static_cast<int>(map.element) % static_cast<int>(emulator::LINE) != 0) {
        machine->fail("the emulator supports only boxes that begin at multiples of 16 bytes, not at element " +
                      std::to_string(x));
    }
    u32 rows = 1;
    for (u32 i = 1; i < dimensions; ++i) {
        rows *= map.box[i];
    }
    auto load = std::make_shared<emulator::BoxLoad>();
    *load = {self()->block, barrier, rows * 128, self()->proxy_time, {}};
    emulator::begin_load(shared, load->bytes, barrier);
    for (u32 number = 0; number < rows; ++number) {
        u64 address = map.address;  // wraps, so that coordinates may cancel out
        bool outside = false;
        for (u32 i = 1, left = number; i < dimensions; left /= map.box[i++]) {
            const long long at = static_cast<int>(corner[i]) + static_cast<long long>(left % map.box[i]);
            outside = outside || at < 0 || at >= map.sizes[i];
            address += static_cast<u64>(at) * map.strides[i - 1];
        }
        emulator::add_row(*load, map, x, reinterpret_cast<const u8*>(address), outside, shared + number * 128);
    }
    machine->later(machine->delay(), [load] { emulator::land(*load); });
}

}  // namespace raymoe::ptx
