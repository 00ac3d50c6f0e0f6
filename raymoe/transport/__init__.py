"""Messages between ranks, by put and get: over TMA, the copy engine, NCCL or host memory.

Read first: `channel.py` (`raymoe.Channel`), `channels.py` (channels between any ranks), `spec.py` (the memory map).
"""
