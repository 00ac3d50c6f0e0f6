"""Workload pointwise: norms, SwiGLU and a pointwise expression over rows, beside torch, other systems and a copy."""
