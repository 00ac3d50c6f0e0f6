"""Backends of CPU ranks: `host` through shared memory, `gloo` through sockets.

Read first: `cpu_backend.py` (what both do), then `host.py`.
"""
