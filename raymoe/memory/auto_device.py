"""Which device `auto` means, in a Ray actor or task and in a process group. Pure functions of what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.errors import ConfigError


@dataclass(frozen=True)
class Sight:
    """What this process sees of GPUs through torch."""

    gpus: int
    current: int | None
    """Torch's current device of this thread; None where this process has not initialised CUDA."""
    version: str = torch.__version__

    @classmethod
    def now(cls) -> Sight:
        """Look, without initialising CUDA."""
        cuda: Any = torch.cuda  # has no annotations
        if torch.version.cuda is None:
            return cls(0, None)
        return cls(cuda.device_count(), cuda.current_device() if cuda.is_initialized() else None)


def device_in_ray(asked: str, assigned: Sequence[str], visible: str | None, sight: Sight) -> str:
    """The device of a Ray actor or task: the GPU that Ray assigned, else torch's current one, else the CPU.

    `assigned` are Ray's ids of GPUs: numbers or UUIDs, of the node. `visible` is CUDA_VISIBLE_DEVICES, or None.

    >>> device_in_ray("auto", ["3"], "3", Sight(1, None))  # Ray shows an actor its own GPU
    'cuda:0'
    >>> device_in_ray("auto", ["3"], "1,3", Sight(2, 0))  # Ray Train shows a worker those of its neighbours too
    'cuda:1'
    >>> device_in_ray("auto", ["3"], None, Sight(8, None))  # Ray was told to leave the variable alone
    'cuda:3'
    >>> device_in_ray("auto", [], None, Sight(8, 2)), device_in_ray("auto", [], None, Sight(8, None))
    ('cuda:2', 'cpu')

    `cuda` means the same, but never the CPU; any other device is itself.

    >>> device_in_ray("cuda", [], None, Sight(8, None)), device_in_ray("cuda:5", ["3"], "3", Sight(1, None))
    ('cuda:0', 'cuda:5')
    """
    if asked not in ("auto", "cuda"):
        return asked
    if not assigned:
        return _current(asked, sight)
    ids = ", ".join(sorted(assigned))
    if sight.gpus == 0:
        raise ConfigError(
            f"device {asked!r} asked for where Ray assigned GPU {ids}; torch {sight.version} sees no GPU: install a "
            "torch with CUDA that fits the driver, or ask for device 'cpu'"
        )
    ordinals = sorted(_ordinal(gpu, visible, sight.gpus) for gpu in assigned)
    # An actor with several GPUs has chosen one where it has set torch's current device.
    return f"cuda:{sight.current if sight.current in ordinals else ordinals[0]}"


def device_of_group(asked: str, bound: int | None, has_cuda: bool, sight: Sight) -> str:
    """The device of a rank of a process group: the bound one, else torch's current one if the group is for GPUs.

    `has_cuda`: whether GPUs have a backend of their own in this group, as NCCL is.

    >>> device_of_group("auto", 3, True, Sight(8, 0)), device_of_group("auto", None, True, Sight(8, 2))
    ('cuda:3', 'cuda:2')
    >>> device_of_group("auto", None, False, Sight(8, 2)), device_of_group("cuda", None, False, Sight(8, 2))
    ('cpu', 'cuda:2')
    """
    if asked not in ("auto", "cuda"):
        return asked
    if bound is not None:
        return f"cuda:{bound}"
    return _current("cuda", sight) if has_cuda or asked == "cuda" else "cpu"


def _current(asked: str, sight: Sight) -> str:
    """Torch's current device, which is the first GPU until somebody sets another."""
    if sight.current is None and asked == "auto":
        return "cpu"
    return f"cuda:{sight.current or 0}"


def _ordinal(gpu: str, visible: str | None, gpus: int) -> int:
    """Where among the GPUs that this process sees the one is that Ray calls `gpu`."""
    if visible is None:
        found = int(gpu) if gpu.isdecimal() else None
    else:
        entries = [entry.strip() for entry in visible.split(",")]
        # CUDA takes the first letters of a UUID for all of it.
        alike = [entry == gpu or (entry[:4] == "GPU-" and gpu.startswith(entry)) for entry in entries]
        found = alike.index(True) if True in alike else None
    if found is None or found >= gpus:
        shown = "is not set" if visible is None else f"is {visible!r}"
        raise ConfigError(
            f"the GPU that Ray assigned asked for, which is {gpu}; CUDA_VISIBLE_DEVICES {shown} and torch sees {gpus} "
            "GPUs, so it has no number here: name the device, for example 'cuda:0'"
        )
    return found
