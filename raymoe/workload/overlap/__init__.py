"""Workload overlap: dispatch and combine beside a matrix product on the same GPU."""
