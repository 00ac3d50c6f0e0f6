"""A run directory, and what is made of it: tables and plots.

Read first: `results.py` (the keys of a result line), `directory.py` (who writes what), `tables.py`.
"""
