"""Backends `allgather` and `collective`: NCCL moves the rows, kernels number them, place them and sum them.

Read first: `nccl_backends.py`, then `nccl_kernels.py`.
"""
