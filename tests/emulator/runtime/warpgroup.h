// Warpgroups: their products (wgmma), and the registers that they exchange (setmaxnreg).
//
// The four warps of a warpgroup must take the same steps, each in its own time. A product has a part for each warp: 16
// rows times all other rows. Parts read shared memory, through the async proxy, when all four warps have issued the
// product: at a random moment, no later than the wait that covers the part, and in the order in which the warp issued
// them. From the issue to the wait the sums in the threads' memory are NaN.
//
// An access that overwrites what a part reads must come after the wait of the part's warp. The clocks of shared.h tell,
// so that a race is found in every interleaving.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "raymoe/base/ptx_matrix.cuh"
#include "shared.h"

namespace emulator {

struct Warp;
struct Block;

enum class StepKind : u8 { FENCE, PRODUCT, COMMIT, WAIT, REGISTERS };

// An instruction of a warpgroup.
struct Step {
    StepKind kind;
    u32 number = 0;            // columns of a product; younger groups of a wait; registers
    u64 rows = 0, others = 0;  // descriptors of a product
    bool taken = false;        // of registers: they are taken, not given away
    raymoe::ptx::OperandForm form = {};  // of a product

    bool operator==(const Step& other) const {
        return kind == other.kind && number == other.number && rows == other.rows && others == other.others &&
               taken == other.taken && form == other.form;
    }
};

// The sums of a warp that products add to. `values` stands for the registers while a product is under way.
struct Sums {
    float* at[32] = {};  // the array of each thread
    u32 each = 0;        // floats of a thread
    u32 unfinished = 0;  // products that add to them and have not been waited for
    std::vector<float> values;
};

// A warp's part of a product.
struct Part {
    Block* block;
    Warp* warp;
    Step step;
    u32 group;   // the number of its group among the warp's
    u32 number;  // of its step among the warpgroup's, from 1
    std::shared_ptr<Sums> sums;
    bool begun = false;  // all warps have issued it
    bool done = false;
};

// A wait that has ended: groups up to `group` are complete for who knows one of the stamps.
struct EndedWait {
    u32 group;
    Stamp stamps[32];
};

// What a warp has done as a member of its warpgroup.
struct Member {
    Step next{};          // at which its threads arrive
    u32 steps = 0;        // that it has taken
    u32 groups = 0;       // that it has committed
    bool fenced = false;  // since the last wait, after which threads may access sums
    u32 registers = 0;    // of each thread; 0: as at the launch
    u32 refused = 0;      // the block's exchanges of registers when there were too few for this warp
    std::deque<std::shared_ptr<Part>> parts;  // that no wait has covered yet
    std::vector<u32> reads;                   // for each 16 bytes of shared memory the last group that reads them
    std::vector<EndedWait> waits;
};

// A step, and how many warps have taken it.
struct CommonStep {
    Step step;
    u32 warps;
};

struct Warpgroup {
    std::vector<CommonStep> steps;
    std::vector<std::shared_ptr<Part>> issued;  // parts of products that not all warps have issued
    std::vector<Thread*> waiting;  // until all warps have issued a product
};

// Takes the step at which all threads of a warp have arrived. Returns false if it has to be tried again later.
bool take_step(Warp& warp);

// Returns why the block may not end, or null.
const char* unfinished_steps(const Block& block);

// Fails the run if a product may still read these bytes, as far as the running thread knows.
void check_products(const Access& access, const char* does);

}  // namespace emulator
