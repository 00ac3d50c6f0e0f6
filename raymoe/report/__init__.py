"""Writes and reads run directories, and makes tables, plots and a page of their results.

Read first: `results.py` (the keys of a result line), `directory.py` (which files a run writes), `tables.py`, `page.py`.
"""
