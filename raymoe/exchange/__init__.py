"""Dispatch and combine: several backends behind one interface.

Read first: `exchange.py` (the public class), `backend.py` (the interface), `fused.py` (the fastest backend).
"""
