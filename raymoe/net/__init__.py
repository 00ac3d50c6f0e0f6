"""Collectives of other libraries between the ranks of a world, with bounded waits: NCCL on GPUs, Gloo on CPUs."""
