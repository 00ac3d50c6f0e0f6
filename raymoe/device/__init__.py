"""CUDA from Python: compile, load, launch, capture, and one wrapper for each family of kernels.

Read first: `jit.py` (compile), `kernels.py` (load and launch), `dispatch.py` (the parameters of a kernel).
Importing any of it loads no torch and no CUDA library.
"""
