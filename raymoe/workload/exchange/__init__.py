"""Workload exchange: dispatch and combine with nothing between them on the clock."""
