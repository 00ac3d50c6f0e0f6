"""The ranks of a world, and the memory that they share.

Read first: `world.py` (the ranks and their memory), `layout.py` and `heap.py` (regions), `wait.py` (bounded waits).
"""
