"""CUDA from Python: compile, load, launch, capture, and one wrapper for each family of kernels.

Read first: `jit.py` (compile), `kernels.py` (load and launch), `dispatch.py` (the parameters of a kernel).
Importing these modules loads neither torch nor a CUDA library.
"""
