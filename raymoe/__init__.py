"""Expert-parallel Mixture-of-Experts work on a Ray cluster.

Importing this package loads neither torch nor ray nor any CUDA library: names arrive when first used (PEP 562).
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "join": "raymoe.gang.join",
    "Exchange": "raymoe.exchange.exchange",
    "ExchangeSpec": "raymoe.exchange.spec",
}
__all__ = ["Exchange", "ExchangeSpec", "__version__", "join"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'raymoe' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
