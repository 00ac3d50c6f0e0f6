"""Torch's current device and stream: calls that act on them alone, captures, and memory for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SAME = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the calling thread's current device inside the `with`. Almost free where it is current already."""
    import torch

    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _SAME
    other: AbstractContextManager[object] = torch.cuda.device(device)
    return other


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of this device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    import torch

    with on(device):
        return bool(torch.cuda.is_current_stream_capturing())


def keep_for_current_stream(*memory: torch.Tensor | None) -> None:
    """Keep memory until the work now enqueued on the current stream is done, even if its tensors are freed before.

    Otherwise torch would reuse freed memory at once, for allocations on the stream that it was allocated on. Memory of
    the current stream itself, and of CPUs, needs nothing. The whole allocation is kept, also for a view.
    """
    import torch

    for tensor in memory:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CapturedMemory:
    """A memory pool for allocations inside a capture: no other code may reuse them, because replays write to them.

    The captured calls of one exchange share the pool, because they are replayed one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._cuda: Any = torch.cuda  # torch.cuda lacks annotations
        with on(device):  # a pool belongs to the device that is current when it is made
            self._pool: Any = self._cuda.MemPool() if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[object]:
        return self._cuda.use_mem_pool(self._pool, self._device) if capturing(self._device) else nullcontext()

    def close(self) -> None:
        """Drop the pool now. If garbage collection freed it during a capture, torch would end the process.

        Its memory stays until the tensors in it are freed.
        """
        self._pool = None
