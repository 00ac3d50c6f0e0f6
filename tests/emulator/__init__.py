"""Kernels of raymoe on a CPU: many ranks in one process, every interleaving drawn from a seed.

`build.py` compiles kernels/*.cu with a C++ compiler against its own include/raymoe/base/ptx.cuh, `machine.py` is memory
and streams, `ranks.py` puts the exchange's own backends on top. What the machine makes of words, fences and bulk copies
is told in runtime/ptx_words.cpp and runtime/ptx_bulk.cpp, of plain accesses in runtime/plain.cpp, of races in shared
memory in runtime/shared.h. `python -m tests.emulator` leaves out every fence in turn, `python -m tests.emulator.soak`
draws cases at random.
"""
