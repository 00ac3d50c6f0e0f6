// The steps of a warpgroup, of raymoe/base/ptx_matrix.cuh; see warpgroup.h.

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "raymoe/base/ptx_matrix.cuh"

namespace emulator {

namespace {

constexpr u32 WARPS = 4, PART_ROWS = 16, PART_BYTES = 32;  // of each row
constexpr u32 UNDEFINED = 0x7FBFDEAD;  // a signalling NaN, which arithmetic changes to a quiet one
constexpr u32 SM_REGISTERS = 65536;

// ---- operands -------------------------------------------------------------------------------------------------------

// Rows of PART_BYTES in shared memory, as a descriptor says.
struct Operand {
    u32 begin, group_stride;  // bytes between groups of 8 rows

    explicit Operand(u64 descriptor)
        : begin((descriptor & 0x3FFF) * 16), group_stride((descriptor >> 32 & 0x3FFF) * 16) {}

    // Half a row: 16 bytes.
    u32 piece(u32 row, u32 half) const {
        const u32 linear = begin + row / 8 * group_stride + row % 8 * 128 + half * 16;
        return linear ^ (linear >> 7 & 7) << 4;
    }
};

void check_descriptor(u64 descriptor, u32 rows) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) {
        machine->fail("the emulator supports only wgmma descriptors with the 128-byte swizzle and no base offset");
    }
    const Operand operand{descriptor};
    for (u32 row = 0; row < rows; ++row) {
        if (std::max(operand.piece(row, 0), operand.piece(row, 1)) + 16 > self()->block->shared_bytes) {
            machine->fail("wgmma reads row " + std::to_string(row) + " after the end of shared memory");
        }
    }
}

using raymoe::ptx::Element;

// All 8-bit floats, because converting each operand anew would take most of the time.
const float* e4m3_values() {
    static const std::vector<float> values = [] {
        std::vector<float> made(256);
        for (u32 i = 0; i < 256; i += 4) {
            raymoe::ptx::from_e4m3x4(i * 0x01010101u + 0x03020100u, &made[i]);
        }
        return made;
    }();
    return values.data();
}

u32 columns_of(const Step& step) {
    return step.element == static_cast<u8>(Element::E4M3) ? PART_BYTES : PART_BYTES / 2;
}

void read_row(const Block& block, const Operand& operand, u32 row, const Step& step, float* into) {
    u8 bytes[PART_BYTES];
    for (u32 half = 0; half < 2; ++half) {
        std::memcpy(bytes + half * LINE, block.shared + operand.piece(row, half), LINE);
    }
    if (step.element == static_cast<u8>(Element::E4M3)) {
        std::transform(bytes, bytes + PART_BYTES, into, [](u8 bits) { return e4m3_values()[bits]; });
        return;
    }
    for (u32 i = 0; i < PART_BYTES / 2; ++i) {
        u16 bits;
        std::memcpy(&bits, bytes + i * 2, 2);
        into[i] = step.element == static_cast<u8>(Element::F16) ? raymoe::ptx::from_f16(bits)
                                                                : __uint_as_float(static_cast<u32>(bits) << 16);
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

u32 first_row(const Warp& warp) {
    return warp.threads[0]->index / 32 % WARPS * PART_ROWS;
}

// Reads the operands, and adds the part's products to the sums in order of the columns.
void multiply(Part& part) {
    part.done = true;
    const u32 others = part.step.number, columns = columns_of(part.step);
    float row[PART_ROWS][PART_BYTES], other[PART_BYTES];
    for (u32 r = 0; r < PART_ROWS; ++r) {
        read_row(*part.block, Operand{part.step.rows}, first_row(*part.warp) + r, part.step, row[r]);
    }
    for (u32 n = 0; n < others; ++n) {
        read_row(*part.block, Operand{part.step.others}, n, part.step, other);
        for (u32 r = 0; r < PART_ROWS; ++r) {
            const u32 lane = r % 8 * 4 + n % 8 / 2, index = n / 8 * 4 + r / 8 * 2 + n % 2;
            float& sum = part.sums->values[lane * part.sums->each + index];
            sum = part.step.flag ? sum : 0.0f;
            for (u32 k = 0; k < columns; ++k) {
                sum += row[r][k] * other[k];
            }
        }
    }
}

// Multiplies all parts of a warp up to this one, in order.
void multiply_up_to(const Part& last) {
    for (const auto& part : last.warp->member.parts) {
        if (!part->done) {
            multiply(*part);
        }
        if (part.get() == &last) {
            break;
        }
    }
}

bool undefined(const Sums& sums) {
    for (u32 lane = 0; lane < 32; ++lane) {
        for (u32 i = 0; i < sums.each; ++i) {
            if (__float_as_uint(sums.at[lane][i]) != UNDEFINED) {
                return false;
            }
        }
    }
    return true;
}

void check_untouched(const Sums& sums) {
    if (!undefined(sums)) {
        machine->fail("it has written sums while wgmma adds to them");
    }
}

// Takes the sums out of the threads' memory, unless a product that is under way has them.
std::shared_ptr<Sums> taken_sums(Warp& warp, u32 columns) {
    auto* const first = reinterpret_cast<float*>(warp.values[0]);
    for (const auto& part : warp.member.parts) {
        if (part->sums->at[0] == first) {
            if (part->sums->each != columns / 2) {
                machine->fail("a wgmma of other columns than the one before, to which the sums belong");
            }
            check_untouched(*part->sums);
            return part->sums;
        }
    }
    if (!warp.member.fenced) {
        machine->fail("no wgmma_fence stands between the accesses to these sums and wgmma");
    }
    auto sums = std::make_shared<Sums>();
    sums->each = columns / 2;
    sums->values.resize(32 * sums->each);
    const float nothing = __uint_as_float(UNDEFINED);
    for (u32 lane = 0; lane < 32; ++lane) {
        sums->at[lane] = reinterpret_cast<float*>(warp.values[lane]);
        std::memcpy(&sums->values[lane * sums->each], sums->at[lane], sums->each * sizeof(float));
        std::fill(sums->at[lane], sums->at[lane] + sums->each, nothing);
    }
    return sums;
}

void put_back(const Sums& sums) {
    check_untouched(sums);
    for (u32 lane = 0; lane < 32; ++lane) {
        std::memcpy(sums.at[lane], &sums.values[lane * sums.each], sums.each * sizeof(float));
    }
}

// Notes the reads of an operand. Each thread of the warp must know that some of the rows have come.
void note_reads(Warp& warp, const Operand& operand, u32 first, u32 rows, u32 group) {
    auto& reads = warp.member.reads;
    reads.resize((warp.block->shared_bytes + LINE - 1) / LINE);
    for (u32 row = first; row < first + rows; ++row) {
        for (u32 half = 0; half < 2; ++half) {
            const u32 at = operand.piece(row, half);
            note_product_read(warp.threads[row % 32], {at, LINE});
            reads[at / LINE] = group;
        }
    }
}

void issue(Warp& warp, Warpgroup& warpgroup, const Step& step, bool last) {
    Member& member = warp.member;
    check_descriptor(step.rows, WARPS * PART_ROWS);
    check_descriptor(step.others, step.number);
    const u32 group = member.groups + 1;
    note_reads(warp, Operand{step.rows}, first_row(warp), PART_ROWS, group);
    note_reads(warp, Operand{step.others}, 0, step.number, group);
    auto part = std::make_shared<Part>();
    *part = {warp.block, &warp, step, group, member.steps, taken_sums(warp, step.number), false, false};
    ++part->sums->unfinished;
    member.parts.push_back(part);
    warpgroup.issued.push_back(part);
    if (!last) {
        return;
    }
    const auto begins = [&](const std::shared_ptr<Part>& each) {
        if (each->number != part->number) {
            return false;
        }
        each->begun = true;
        machine->later(machine->delay(), [each] {
            if (!each->done) {
                multiply_up_to(*each);
            }
        });
        return true;
    };
    auto& issued = warpgroup.issued;
    issued.erase(std::remove_if(issued.begin(), issued.end(), begins), issued.end());
    for (Thread* thread : warpgroup.waiting) {
        machine->make_ready(thread);
    }
    warpgroup.waiting.clear();
}

// The last group that a wait covers.
u32 covered(const Warp& warp, u32 younger) {
    return warp.member.groups < younger ? 0 : warp.member.groups - younger;
}

bool all_have_begun(const Warp& warp, u32 group) {
    const auto& parts = warp.member.parts;
    return std::all_of(parts.begin(), parts.end(),
                       [&](const auto& part) { return part->begun || part->group > group; });
}

void end_wait(Warp& warp, u32 younger) {
    Member& member = warp.member;
    EndedWait ended{covered(warp, younger), {}};
    while (!member.parts.empty() && member.parts.front()->group <= ended.group) {
        const auto part = member.parts.front();
        multiply_up_to(*part);
        member.parts.pop_front();
        if (--part->sums->unfinished == 0) {
            put_back(*part->sums);
        }
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        ended.stamps[lane] = {warp.threads[lane]->index, warp.threads[lane]->count};
    }
    member.waits.push_back(ended);
    member.fenced = false;
}

bool knows_complete(const Thread* me, const Member& member, u32 group) {
    for (const EndedWait& wait : member.waits) {
        if (wait.group >= group) {
            return std::any_of(wait.stamps, wait.stamps + 32, [me](Stamp each) { return knows(me, each); });
        }
    }
    return false;
}

// ---- registers ------------------------------------------------------------------------------------------------------

// A block begins with equal registers for all threads, as many as a whole SM has for it.
u32 registers_at_launch(const Block& block) {
    return SM_REGISTERS / block.launch->threads / 8 * 8;
}

bool exchange_registers(Warp& warp, const Step& step) {
    Block& block = *warp.block;
    u32& has = warp.member.registers;
    has = has == 0 ? registers_at_launch(block) : has;
    if (step.number % 8 != 0 || step.number < 24 || step.number > 256 ||
        (step.flag ? step.number < has : step.number > has)) {
        machine->fail(std::string(step.flag ? "takes " : "gives registers away down to ") +
                      std::to_string(step.number) + " registers a thread; it has " + std::to_string(has));
    }
    const u32 more = step.flag ? (step.number - has) * 32 : 0;
    if (more > block.free_registers) {
        warp.member.refused = block.exchanges;
        return false;
    }
    ++block.exchanges;
    block.free_registers += step.flag ? -more : (has - step.number) * 32;
    has = step.number;
    for (Thread* thread : block.waiting_for_registers) {
        machine->make_ready(thread);
    }
    block.waiting_for_registers.clear();
    return true;
}

// ---- steps ----------------------------------------------------------------------------------------------------------

Warpgroup& warpgroup_of(const Warp& warp) {
    Block& block = *warp.block;
    const u32 number = warp.threads[0]->index / 32 / WARPS;
    block.warpgroups.resize((block.warps.size() + WARPS - 1) / WARPS);
    if ((number + 1) * WARPS > block.warps.size()) {
        machine->fail("its warpgroup has fewer than four warps");
    }
    return block.warpgroups[number];
}

// Counts a warp's step, which must be that of the other warps. Returns whether it is the last of them.
bool count_step(Warp& warp, Warpgroup& warpgroup, const Step& step) {
    const u32 number = warp.member.steps++;
    if (number == warpgroup.steps.size()) {
        warpgroup.steps.push_back({step, 0});
    }
    auto& [common, warps] = warpgroup.steps[number];
    if (!(common == step)) {
        machine->fail("the warps of its warpgroup take different steps: wgmma and setmaxnreg need all four");
    }
    return ++warps == WARPS;
}

// Waits with the warp for the other threads to take a step.
bool take(const Step& step, u64 value = 0) {
    Warp& warp = *self()->warp;
    if (warp.arrived == 0) {
        warp.member.next = step;
    } else if (!(warp.member.next == step)) {
        machine->fail("the threads of its warp take different steps");
    }
    return collective(Collective::WARPGROUP, 0xFFFFFFFF, value, 0) != 0;
}

}  // namespace

bool take_step(Warp& warp) {
    const Step step = warp.member.next;
    Warpgroup& warpgroup = warpgroup_of(warp);
    if (step.kind == StepKind::REGISTERS && !exchange_registers(warp, step)) {
        return false;
    }
    const bool last = count_step(warp, warpgroup, step);
    switch (step.kind) {
        case StepKind::FENCE: warp.member.fenced = true; break;
        case StepKind::PRODUCT: issue(warp, warpgroup, step, last); break;
        case StepKind::COMMIT: ++warp.member.groups; break;
        case StepKind::WAIT: end_wait(warp, step.number); break;
        case StepKind::REGISTERS: break;
    }
    return true;
}

const char* unfinished_steps(const Block& block) {
    for (std::size_t i = 0; !block.warpgroups.empty() && i < block.warps.size(); ++i) {
        const Warpgroup& warpgroup = block.warpgroups[i / WARPS];
        if (!block.warps[i]->member.parts.empty()) {
            return "with a wgmma that no wait covers";
        }
        if (block.warps[i]->member.steps != warpgroup.steps.size()) {
            return "before all four warps of a warpgroup have taken its last step: wgmma and setmaxnreg need all four";
        }
    }
    return nullptr;
}

void check_products(const Access& access, const char* does) {
    const Thread* me = self();
    for (auto& warp : me->block->warps) {
        const auto& reads = warp->member.reads;
        u32 group = 0;
        for (u32 line = access.at / LINE; !reads.empty() && line * LINE < access.at + access.bytes; ++line) {
            group = std::max(group, reads[line]);
        }
        if (group != 0 && !knows_complete(me, warp->member, group)) {
            machine->fail(std::string(does) + " " + std::to_string(access.bytes) + " bytes of shared memory at " +
                          std::to_string(access.at) + ", which a wgmma of warp " +
                          std::to_string(warp->threads[0]->index / 32) +
                          " reads, and the thread does not know that it is complete");
        }
    }
}

}  // namespace emulator

namespace raymoe::ptx {

using emulator::machine;
using emulator::self;
using emulator::Step;
using emulator::StepKind;

void set_registers(u32 registers, bool taken) {
    emulator::Block& block = *self()->block;
    while (!emulator::take({StepKind::REGISTERS, registers, 0, 0, taken})) {
        if (block.exchanges != self()->warp->member.refused) {
            continue;  // others have given some away since then
        }
        self()->doing = "waits for registers that others give away";
        self()->where = 0;
        block.waiting_for_registers.push_back(self());
        machine->block_thread();
    }
}

void wgmma_fence() { emulator::take({StepKind::FENCE}); }

void wgmma_commit() { emulator::take({StepKind::COMMIT}); }

void wgmma_of(float* sums, u32 columns, u64 rows, u64 others, Element element, bool add) {
    emulator::take({StepKind::PRODUCT, columns, rows, others, add, static_cast<u8>(element)},
                   reinterpret_cast<u64>(sums));
}

void wgmma_wait_for(u32 younger) {
    emulator::Warp& warp = *self()->warp;
    emulator::warpgroup_of(warp);
    while (!emulator::all_have_begun(warp, emulator::covered(warp, younger))) {
        self()->doing = "waits until all four warps have issued its wgmma";
        self()->where = 0;
        emulator::warpgroup_of(warp).waiting.push_back(self());
        machine->block_thread();
    }
    emulator::take({StepKind::WAIT, younger});
}

}  // namespace raymoe::ptx
