"""Workload exchange: time dispatch and combine, with no other work between them."""
