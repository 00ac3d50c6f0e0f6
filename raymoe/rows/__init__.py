"""Functions over rows on one GPU: norms, SwiGLU, expressions, and the pipeline of tiles under them.

Read first: `norm.py` (the functions), `norm_kernels.py` (their kernels), `pipe_shape.py` (blocks), `row_launch.py`.
"""
