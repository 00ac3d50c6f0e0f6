// Where every entry (token, k) stands among this rank's expert-major rows, in the order (expert, source, token, k), and
// which row of the table each token is. No sort: count_entries.cu has counted the entries of each run of tokens.
//
// Every block adds up what all runs have counted, which tells where each expert begins and what of it is before its own
// run. Each of its warps counts its part of the run, then goes over it again, 32 entries at a time, and numbers them.
// Block 0 also tells the counts: to the caller, to the combine, and to the host where it waits for them.
//
// Where the rows do not fit, nothing has a place and this rank refuses the step.

#define ANY_GPU

#include "raymoe/collective/numbering.cuh"

extern "C" __global__ void __launch_bounds__(256) number_entries(const __grid_constant__ raymoe::NumberParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) u32 shared[];
    if (blockIdx.x == 0) {
        tell_traffic(p);
    }
    Numbering numbering(p, shared);
    numbering.find_experts();
    numbering.number_tokens();
    numbering.number_entries();
    if (blockIdx.x == 0) {
        numbering.tell_counts();
    }
    numbering.fill_gaps();
}
