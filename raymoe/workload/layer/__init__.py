"""Workload layer: a whole Mixture-of-Experts layer, dispatch, experts, combine."""
