"""Dispatch and combine, by several backends with one contract.

Read first: `exchange.py` (the public class), `backend.py` (the contract), `fused.py` (the fastest backend).
"""
