"""The ranks of a world, and the memory that they share.

Read first: `world.py` (who we are, who our peers are), `layout.py` and `heap.py` (regions), `wait.py` (bounded waits).
"""
