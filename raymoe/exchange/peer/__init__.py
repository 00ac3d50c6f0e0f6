"""Backends `fused` and `staged`: kernels that write into the memory of peers over NVLink.

Read first: `staged.py` (a backend as a table of launches), `peer_backend.py` (which runs it), `workspace.py` (the
memory).
"""
