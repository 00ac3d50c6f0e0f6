"""The Mixture-of-Experts layer around an exchange: router, experts and their weights; norms, SwiGLU and pointwise.

Read first: `layer.py` and `norm.py`. Each function here is loaded at its first use (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raymoe.moe.activation import swiglu as swiglu
    from raymoe.moe.elementwise import pointwise as pointwise
    from raymoe.moe.norm import add_rms_norm as add_rms_norm
    from raymoe.moe.norm import layer_norm as layer_norm
    from raymoe.moe.norm import rms_norm as rms_norm

_LAZY = {
    "add_rms_norm": "raymoe.moe.norm",
    "layer_norm": "raymoe.moe.norm",
    "pointwise": "raymoe.moe.elementwise",
    "rms_norm": "raymoe.moe.norm",
    "swiglu": "raymoe.moe.activation",
}
__all__ = ["add_rms_norm", "layer_norm", "pointwise", "rms_norm", "swiglu"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'raymoe.moe' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
