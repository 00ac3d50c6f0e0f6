"""Messages between ranks, put and get: by TMA, the copy engine, NCCL or host memory.

Read first: `pair.py` (`raymoe.Channel`), `channel.py` (channels between any ranks), `spec.py` (the memory map).
"""
