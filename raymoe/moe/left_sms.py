"""The SMs that products of experts leave to an exchange beside them.

A block of a product stays until there are no tiles. So an exchange that is enqueued later would find no SM before the
product's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LEFT: ContextVar[int] = ContextVar("SMs left by products", default=0)


@contextmanager
def leaving(sms: int) -> Iterator[None]:
    """Let products that this thread enqueues inside leave so many SMs.

    >>> with leaving(32):
    ...     blocks_of_product(132, most=1000), blocks_of_product(16, most=1000)
    (100, 1)
    >>> blocks_of_product(132, most=1000), blocks_of_product(132, most=8)
    (132, 8)
    """
    before = _LEFT.set(sms)
    try:
        yield
    finally:
        _LEFT.reset(before)


def blocks_of_product(sms: int, most: int, left: int = 0) -> int:
    """Return the blocks of a product on a GPU of so many SMs, of which it leaves `left` and those of `leaving`."""
    return max(1, min(sms - _LEFT.get() - left, most))
