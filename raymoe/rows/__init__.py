"""Functions over rows on one GPU: norms, SwiGLU, expressions, and the pipeline of tiles under them.

Read first: `norm.py` (the functions), `kernels.py` (their tensors), `pipe.py`, `launch.py`.
"""
