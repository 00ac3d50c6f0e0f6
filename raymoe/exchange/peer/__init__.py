"""Backends `fused` and `staged`: kernels that write into the memory of peers over NVLink.

Read first: `fused.py` (dispatch and combine), `workspace.py` (the memory), `dispatch.py` (the kernel's parameters).
"""
