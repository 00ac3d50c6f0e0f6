"""Existing engines between the ranks of a world, with waits that end: NCCL between GPUs, Gloo between CPU ranks."""
