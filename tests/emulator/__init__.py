"""Runs the kernels on a CPU: many ranks in one process, and a seed draws the interleaving.

`build.py` compiles kernels/*.cu with a C++ compiler against its own include/raymoe/base/. `machine.py` has the
memory and the streams; `ranks.py` runs the exchange's own backends on them. runtime/ describes the machine: words and
fences in ptx_words.cpp, bulk copies in ptx_bulk.cpp, tensor maps in ptx_tensor.cpp, wgmma in warpgroup.h, plain
accesses in plain.cpp, races in shared memory in shared.h.
`python -m tests.emulator` leaves out every fence in turn; `python -m tests.emulator.soak` draws random cases.
"""
