"""Workload p2p: copies between ranks, which tell what the links of a machine give."""
