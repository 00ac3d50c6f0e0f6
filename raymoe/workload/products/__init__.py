"""Workload products: the products of experts by every system, in turns. Read first: `run_products.py`."""
