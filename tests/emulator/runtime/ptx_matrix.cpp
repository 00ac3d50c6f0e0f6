// The steps of a warpgroup, of raymoe/base/ptx_matrix.cuh; see warpgroup.h.

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "raymoe/base/ptx_matrix.cuh"

namespace emulator {

using raymoe::ptx::OperandForm;

namespace {

constexpr u32 WARPS = 4, PART_ROWS = 16, PART_COLUMNS = 16;
constexpr u32 MOST_DEPTH = 2 * PART_COLUMNS;  // of 8-bit operands
constexpr u32 UNDEFINED = 0x7FBFDEAD;  // a signalling NaN, which arithmetic changes to a quiet one
constexpr u32 SM_REGISTERS = 65536;

// ---- operands -------------------------------------------------------------------------------------------------------

// Rows of 16 elements in shared memory, as a descriptor says. 16 bytes of it are 8 columns of a row; of a transposed
// operand they are 8 rows of a column. Two 8-bit columns count as one here.
struct Operand {
    u32 begin, group_stride;  // bytes between groups of 8 rows; transposed: of 8 columns
    u32 rows_stride;          // transposed: bytes between groups of 64 rows
    bool transposed;

    Operand(u64 descriptor, bool is_transposed)
        : begin((descriptor & 0x3FFF) * 16),
          group_stride((descriptor >> 32 & 0x3FFF) * 16),
          rows_stride((descriptor >> 16 & 0x3FFF) * 16),
          transposed(is_transposed) {}

    // The 16 bytes that hold an element.
    u32 piece(u32 row, u32 column) const {
        const u32 linear = transposed ? begin + row / 64 * rows_stride + column / 8 * group_stride + column % 8 * 128 +
                                            row % 64 / 8 * 16
                                      : begin + row / 8 * group_stride + row % 8 * 128 + column / 8 * 16;
        return linear ^ (linear >> 7 & 7) << 4;
    }

    u32 element(u32 row, u32 column) const { return piece(row, column) + (transposed ? row : column) % 8 * 2; }

    // Calls `visit` with the place of all 16 bytes of some rows, and with their number.
    template <typename Visit>
    void each_piece(u32 first, u32 rows, const Visit& visit) const {
        u32 number = 0;
        for (u32 row = first; row < first + rows; row += transposed ? 8 : 1) {
            for (u32 column = 0; column < PART_COLUMNS; column += transposed ? 1 : 8) {
                visit(piece(row, column), number++);
            }
        }
    }
};

void check_descriptor(u64 descriptor, bool transposed, u32 rows) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) {
        machine->fail("the emulator supports only wgmma descriptors with the 128-byte swizzle and no base offset");
    }
    Operand{descriptor, transposed}.each_piece(0, rows, [](u32 at, u32 number) {
        if (at + LINE > self()->block->shared_bytes) {
            machine->fail("wgmma reads 16 bytes, number " + std::to_string(number) +
                          " of an operand, after the end of shared memory");
        }
    });
}

float element(const u8* at, bool half) {
    u16 bits;
    std::memcpy(&bits, at, 2);
    return half ? raymoe::ptx::from_f16(bits) : __uint_as_float(static_cast<u32>(bits) << 16);
}

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

void read_row(const Block& block, const Operand& operand, u32 row, OperandForm form, float* into) {
    for (u32 column = 0; column < PART_COLUMNS; ++column) {
        const u8* at = block.shared + operand.element(row, column);
        if (form.e4m3) {
            into[2 * column] = e4m3_values()[at[0]];
            into[2 * column + 1] = e4m3_values()[at[1]];
        } else {
            into[column] = element(at, form.half);
        }
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

u32 first_row(const Warp& warp) {
    return warp.threads[0]->index / 32 % WARPS * PART_ROWS;
}

// Reads the operands, and adds the part's products to the sums in order of the columns.
void multiply(Part& part) {
    part.done = true;
    const u32 others = part.step.number;
    const OperandForm form = part.step.form;
    const u32 depth = form.e4m3 ? MOST_DEPTH : PART_COLUMNS;
    const Operand rows{part.step.rows, form.transposed_rows}, columns{part.step.others, form.transposed_others};
    float row[PART_ROWS][MOST_DEPTH], other[MOST_DEPTH];
    for (u32 r = 0; r < PART_ROWS; ++r) {
        read_row(*part.block, rows, first_row(*part.warp) + r, form, row[r]);
    }
    for (u32 n = 0; n < others; ++n) {
        read_row(*part.block, columns, n, form, other);
        for (u32 r = 0; r < PART_ROWS; ++r) {
            const u32 lane = r % 8 * 4 + n % 8 / 2, index = n / 8 * 4 + r / 8 * 2 + n % 2;
            float& sum = part.sums->values[lane * part.sums->each + index];
            sum = form.add ? sum : 0.0f;
            for (u32 k = 0; k < depth; ++k) {
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

// Notes the reads of an operand. Each thread of the warp must know that some of the bytes have come.
void note_reads(Warp& warp, const Operand& operand, u32 first, u32 rows, u32 group) {
    auto& reads = warp.member.reads;
    reads.resize((warp.block->shared_bytes + LINE - 1) / LINE);
    operand.each_piece(first, rows, [&](u32 at, u32 number) {
        note_product_read(warp.threads[number % 32], {at, LINE});
        reads[at / LINE] = group;
    });
}

void issue(Warp& warp, Warpgroup& warpgroup, const Step& step, bool last) {
    Member& member = warp.member;
    check_descriptor(step.rows, step.form.transposed_rows, WARPS * PART_ROWS);
    check_descriptor(step.others, step.form.transposed_others, step.number);
    const u32 group = member.groups + 1;
    note_reads(warp, Operand{step.rows, step.form.transposed_rows}, first_row(warp), PART_ROWS, group);
    note_reads(warp, Operand{step.others, step.form.transposed_others}, 0, step.number, group);
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
        (step.taken ? step.number < has : step.number > has)) {
        machine->fail(std::string(step.taken ? "takes " : "gives registers away down to ") +
                      std::to_string(step.number) + " registers a thread; it has " + std::to_string(has));
    }
    const u32 more = step.taken ? (step.number - has) * 32 : 0;
    if (more > block.free_registers) {
        warp.member.refused = block.exchanges;
        return false;
    }
    ++block.exchanges;
    block.free_registers += step.taken ? -more : (has - step.number) * 32;
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

void wgmma_of(float* sums, u32 columns, u64 rows, u64 others, OperandForm form) {
    emulator::take({StepKind::PRODUCT, columns, rows, others, false, form}, reinterpret_cast<u64>(sums));
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
