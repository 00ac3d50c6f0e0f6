"""Expert-parallel Mixture-of-Experts work on a Ray cluster.

The library is for your own programs, the harness for `raymoe run` and `raymoe submit`. The harness imports the library;
the library never imports the harness. docs/internals/architecture.md has the folders of both.

Importing this package loads neither torch nor ray nor any CUDA library: each name is loaded at its first use (PEP 562).
`__init__.pyi` declares the names for type checkers.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "Channel": "raymoe.transport.channel",
    "Dispatched": "raymoe.exchange.backend",
    "Exchange": "raymoe.exchange.exchange",
    "ExchangeSpec": "raymoe.exchange.spec",
    "MoELayer": "raymoe.moe.layer",
    "Workspace": "raymoe.exchange.peer.workspace",
    "World": "raymoe.memory.world",
    "join": "raymoe.integrations.ray_actors",
    "pointwise": "raymoe.rows.elementwise",
}
__all__ = [
    "Channel",
    "Dispatched",
    "Exchange",
    "ExchangeSpec",
    "MoELayer",
    "Workspace",
    "World",
    "__version__",
    "errors",
    "join",
    "pointwise",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("raymoe.errors")
    if name not in _LAZY:
        raise AttributeError(f"module 'raymoe' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
