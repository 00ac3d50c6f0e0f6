// Computes the place of every entry (token, k) among this rank's expert-major rows, in the order (expert, source,
// token, k). It also computes the row of the table that holds each token. It does not sort: count_entries.cu has
// counted each run of tokens.
//
//   1. Every block sums the counts of all runs. The sums give the start of each expert, and its entries before this
//      run.
//   2. Each warp counts its part of the run, then reads it again, 32 entries at a time, and numbers the entries.
//   3. Block 0 also writes the counts for the caller, for the combine, and for the host if it waits for them.
//
// Where the rows do not fit, no entry has a place, and this rank refuses the step.

#define ANY_GPU

#include "raymoe/nccl/numbering.cuh"

extern "C" __global__ void __launch_bounds__(256) number_entries(const __grid_constant__ raymoe::NumberParams p) {
    using namespace raymoe;
    extern __shared__ __align__(16) u32 shared[];
    if (blockIdx.x == 0) {
        store_traffic(p);
    }
    Numbering numbering(p, shared);
    numbering.find_experts();
    numbering.number_tokens();
    numbering.number_entries();
    if (blockIdx.x == 0) {
        numbering.store_counts();
    }
    numbering.fill_gaps();
}
