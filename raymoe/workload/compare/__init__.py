"""Yardsticks (`row_push`, `nccl_bare`) and other systems, under the same clock as the backends."""
