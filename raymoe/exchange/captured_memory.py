"""Memory of what a captured call allocates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from raymoe.device.current import capturing, on

_cuda: Any = torch.cuda  # has no annotations


class CapturedMemory:
    """What is allocated inside, while a stream is captured, is given to nothing outside, since a replay writes to it
    again. Captured calls of one exchange share it: they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with on(device):  # a pool belongs to the device that is current when it is made
            self._pool: Any = _cuda.MemPool() if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[object]:
        return _cuda.use_mem_pool(self._pool, self._device) if capturing(self._device) else nullcontext()

    def close(self) -> None:
        """Let go of the pool now, and not when a collection of garbage finds it: torch ends the process if that is
        while any stream is captured. What was allocated stays until its tensors go."""
        self._pool = None
