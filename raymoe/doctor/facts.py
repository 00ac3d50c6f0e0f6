"""What several judgements ask of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymoe.doctor.finding import Finding, Machine, ok, warn

NO_DRIVER = "none: no NVIDIA driver"
CUDA_NEEDED = (13, 0)
"""What kernels are compiled for; a driver that serves less does not load them."""


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "GPU"), count(4, "GPU")
    ('1 GPU', '4 GPUs')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def no_driver(machine: Machine) -> bool:
    """Neither CUDA nor NVML is installed. A driver that is there and does not answer is another matter."""
    return "missing" in machine.probes["cuda"].values and "missing" in machine.probes["nvml"].values


def cuda_version(machine: Machine) -> tuple[int, int] | None:
    found = machine.probes["cuda"].values.get("version")
    return None if found is None else (int(found[0]), int(found[1]))


def too_old(machine: Machine) -> bool:
    version = cuda_version(machine)
    return version is not None and version < CUDA_NEEDED


def gpus_of(machine: Machine) -> Sequence[Any]:
    """The GPUs that a process of ours sees, as the CUDA driver told."""
    found: Sequence[Any] = machine.probes["cuda"].values.get("gpus", ())
    return found


def absent(machine: Machine, name: str) -> Finding | None:
    """The line of a check that has nothing to look at; why CUDA does not start is told by the check `driver`."""
    if no_driver(machine):
        return ok(name, NO_DRIVER)
    if too_old(machine) or "gpus" not in machine.probes["cuda"].values:
        return warn(name, "not checked, since CUDA cannot be used here: see driver")
    if not gpus_of(machine):
        return ok(name, "none: no GPU is visible to this process")
    return None
