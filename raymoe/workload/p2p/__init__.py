"""Workload p2p: copies between ranks, which measure the links of a machine."""
