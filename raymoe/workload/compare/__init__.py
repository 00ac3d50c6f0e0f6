"""Baselines (`row_push`, `nccl_bare`) and other systems, timed by the same clock as the backends."""
