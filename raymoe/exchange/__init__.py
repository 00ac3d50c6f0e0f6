"""Dispatch and combine: several backends behind one interface.

The files here are the interface. Each folder is a family of backends: `peer`, `nccl`, `cpu`; `domains` between NVLink
domains. Read first: `exchange.py` (the public class), `backend.py` (the interface), `peer/staged.py` (the launches of a
backend over NVLink).
"""
