"""The most blocks of NCCL's kernels on a rail. No torch here."""

RAIL_BLOCKS = 8
"""Each may hold an SM of its own while a dispatch runs. Not timed."""
