"""CUDA from Python, one concept a file. Importing any of it loads no torch and no CUDA library."""
