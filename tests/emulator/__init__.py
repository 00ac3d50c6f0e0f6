"""Runs the kernels on a CPU: many ranks in one process, and a seed draws the interleaving.

`build.py` compiles kernels/*.cu with a C++ compiler against its own include/raymoe/base/. `machine.py` has the
memory and the streams; `ranks.py` runs the exchange's own backends on them. runtime/ describes the machine: words and
fences in ptx_words.cpp, bulk copies in ptx_bulk.cpp, tensor maps in ptx_tensor.cpp, wgmma in warpgroup.h, plain
accesses in plain.cpp, races in shared memory in shared.h.
`python -m tests.emulator` leaves out every fence in turn; `python -m tests.emulator.soak` draws random cases.

How the machine orders memory, an access and to whom it is visible, and when:

* Shared memory: An access needs a barrier, an mbarrier or `__syncwarp` after the conflicting access of another
  thread. If nothing orders the two, the emulator stops and names both, in every interleaving.
* Bytes of a bulk load: Threads that found the phase of its mbarrier complete, and threads that these synchronise
  with.
* Bulk copies of a stage: Each thread runs `fence.proxy.async` after its own accesses to the stage, and hands the
  stage on after that.
* Box of a tensor map: As the bytes of a bulk load. Elements lie as the 128-byte swizzle puts them.
* Operands of wgmma: Each warp's part reads them at a random moment between the issue by all four warps and the wait
  that covers it. They must have come, and whoever overwrites them must know that each warp's wait has ended.
* Sums of wgmma: NaN from the issue to the wait. The registers need `wgmma_fence` after other accesses.
* Ordinary store to global memory, by `ptx.cuh` or by a pointer: Its thread at once, its block after a barrier, its
  GPU after a release at GPU scope and an acquire, peers after a release at system scope. Without a release: at a
  random time, or not before the kernel ends.
* End of a kernel: Later kernels of the same stream see its stores. Peers see them later, unless a kernel releases
  them at system scope.
* Line of 128 bytes: Whole. With the fault `torn_lines` each half of a line arrives by itself, and a test shows that
  values are then wrong: the LL path needs whole lines.

Shuffles, votes, matches and reductions make a warp converge and order no memory. The emulator sees plain accesses
because kernels are compiled with `-fsanitize=thread`, whose calls go to it.
"""
