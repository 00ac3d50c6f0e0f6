"""Switch torch's current device, because some torch calls act only on the current device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

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
