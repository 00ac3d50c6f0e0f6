"""Choose the device that `auto` stands for, in a Ray actor or task and in a process group. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.errors import ConfigError


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that this process sees through torch."""

    count: int
    current: int | None
    """Torch's current device of this thread; None where this process has not initialised CUDA."""
    version: str = torch.__version__

    @classmethod
    def now(cls) -> VisibleGpus:
        """Ask torch, without initialising CUDA."""
        cuda: Any = torch.cuda  # has no annotations
        if torch.version.cuda is None:
            return cls(0, None)
        return cls(cuda.device_count(), cuda.current_device() if cuda.is_initialized() else None)


def device_in_ray(device: str, assigned: Sequence[str], variable: str | None, gpus: VisibleGpus) -> str:
    """Choose the device of a Ray actor or task: the GPU that Ray assigned, else torch's current one, else the CPU.

    `assigned` holds Ray's ids of GPUs: numbers or UUIDs, of the node. `variable` is CUDA_VISIBLE_DEVICES, or None.

    >>> device_in_ray("auto", ["3"], "3", VisibleGpus(1, None))  # Ray shows an actor its own GPU only
    'cuda:0'
    >>> device_in_ray("auto", ["3"], "1,3", VisibleGpus(2, 0))  # Ray Train shows its neighbours' GPUs too
    'cuda:1'
    >>> device_in_ray("auto", ["3"], None, VisibleGpus(8, None))  # Ray was told not to set the variable
    'cuda:3'
    >>> device_in_ray("auto", [], None, VisibleGpus(8, 2)), device_in_ray("auto", [], None, VisibleGpus(8, None))
    ('cuda:2', 'cpu')

    `cuda` means the same, but never the CPU. Any other device is returned as it is.

    >>> device_in_ray("cuda", [], None, VisibleGpus(8, None))
    'cuda:0'
    >>> device_in_ray("cuda:5", ["3"], "3", VisibleGpus(1, None))
    'cuda:5'
    """
    if device not in ("auto", "cuda"):
        return device
    if not assigned:
        return _current(device, gpus)
    ids = ", ".join(sorted(assigned))
    if gpus.count == 0:
        raise ConfigError(
            f"device {device!r} was asked for and Ray assigned GPU {ids}; torch {gpus.version} sees no GPU: install a "
            "torch with CUDA that fits the driver, or ask for device 'cpu'"
        )
    ordinals = sorted(_ordinal(gpu, variable, gpus.count) for gpu in assigned)
    # An actor with several GPUs chooses one by setting torch's current device.
    return f"cuda:{gpus.current if gpus.current in ordinals else ordinals[0]}"


def device_of_group(device: str, bound: int | None, has_cuda: bool, gpus: VisibleGpus) -> str:
    """Choose the device of a rank of a process group: the bound one, else torch's current one if GPUs have a backend.

    `has_cuda`: whether GPUs have a backend of their own in the group, for example NCCL. Without one, `auto` is the CPU.

    >>> device_of_group("auto", 3, True, VisibleGpus(8, 0)), device_of_group("auto", None, True, VisibleGpus(8, 2))
    ('cuda:3', 'cuda:2')
    >>> device_of_group("auto", None, False, VisibleGpus(8, 2)), device_of_group("cuda", None, False, VisibleGpus(8, 2))
    ('cpu', 'cuda:2')
    """
    if device not in ("auto", "cuda"):
        return device
    if bound is not None:
        return f"cuda:{bound}"
    return _current("cuda", gpus) if has_cuda or device == "cuda" else "cpu"


def _current(device: str, gpus: VisibleGpus) -> str:
    """Return torch's current device. Where CUDA is not initialised, `auto` is the CPU and `cuda` the first GPU."""
    if gpus.current is None and device == "auto":
        return "cpu"
    return f"cuda:{gpus.current or 0}"


def _ordinal(gpu: str, variable: str | None, count: int) -> int:
    """Return the number in this process of the GPU with Ray's id `gpu`. The process sees `count` GPUs."""
    if variable is None:
        ordinal = int(gpu) if gpu.isdecimal() else None
    else:
        entries = [entry.strip() for entry in variable.split(",")]
        # CUDA accepts the first letters of a UUID.
        matches = [entry == gpu or (entry[:4] == "GPU-" and gpu.startswith(entry)) for entry in entries]
        ordinal = matches.index(True) if True in matches else None
    if ordinal is None or ordinal >= count:
        value = "is not set" if variable is None else f"is {variable!r}"
        raise ConfigError(
            f"Ray assigned GPU {gpu}; CUDA_VISIBLE_DEVICES {value} and torch sees {count} GPUs, so that GPU has no "
            "number in this process: name the device, for example 'cuda:0'"
        )
    return ordinal
