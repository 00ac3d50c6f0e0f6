"""Exchanges between NVLink domains: rows cross on a rail, and a backend of one domain does the rest.

Read first: `hierarchical.py` (CPU ranks), then `hierarchical_gpu.py`.
"""
