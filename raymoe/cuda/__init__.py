"""The CUDA runtime from Python: compile, load, launch, order streams, capture graphs. No kernel of ours is named here.

Read first: `jit.py` (compile), `row_launch.py` (load and launch), `params.py` (the parameters of a kernel).
Importing these modules loads neither torch nor a CUDA library.
"""
