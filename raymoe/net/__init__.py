"""Collectives of other libraries with bounded waits: NCCL on GPUs, Gloo on CPUs, and rails between domains.

Read first: `rail.py`.
"""
