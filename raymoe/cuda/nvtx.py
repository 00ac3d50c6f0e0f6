"""NVTX ranges: the phases of a rank's host thread, by name, in Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def nvtx_range(device: torch.device, name: str) -> Iterator[None]:
    """Mark the phase inside this context, on a rank with a GPU. On a CPU rank this does nothing.

    It calls push and pop itself, because `torch.cuda.nvtx.range` takes braces in a name for format fields.
    """
    if device.type != "cuda":
        yield
        return
    import torch  # not above: raymoe.device loads without it

    nvtx: Any = torch.cuda.nvtx  # has no annotations
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()
