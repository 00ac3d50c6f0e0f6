"""The finding of a check, which is one line of `raymoe doctor`, and facts that several checks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
NAME_WIDTH = len("stream memory ops")


@dataclass(frozen=True)
class Finding:
    """A line of `raymoe doctor`. `blocks` are the kinds of ranks that cannot run because of a `fail`."""

    level: Literal["ok", "warn", "fail"]
    name: str
    state: str
    way_out: str = ""
    blocks: tuple[Device, ...] = ()

    def line(self) -> str:
        """
        >>> Finding("warn", "/dev/shm", "64 MiB", "give it more, as --shm-size=1g").line()
        'warn  /dev/shm           64 MiB; give it more, as --shm-size=1g'
        """
        text = " ".join(f"{self.state}; {self.way_out}".removesuffix("; ").split())
        return f"{self.level:<4}  {self.name:<{NAME_WIDTH}}  {text}"


def ok(name: str, state: str) -> Finding:
    return Finding("ok", name, state)


def warn(name: str, state: str, way_out: str = "") -> Finding:
    return Finding("warn", name, state, way_out)


def fail(name: str, state: str, way_out: str, blocks: tuple[Device, ...] = ("cuda",)) -> Finding:
    return Finding("fail", name, state, way_out, blocks)


EVERY_RANK: tuple[Device, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class ProbeOutcome:
    """The values that a probe returned. `trouble` says why some are missing: it hung, crashed or raised."""

    values: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class Needs:
    """The needs of a config: where it runs, on how many ranks, with how much memory."""

    config: str
    workload: str
    device: str  # as in the config: auto, cpu or cuda
    ranks: int
    bytes_per_rank: int


@dataclass(frozen=True)
class Machine:
    """The input of the `judge_` functions. Outside of tests, to read the outcome of a probe waits for it."""

    probes: Mapping[str, ProbeOutcome]
    needs: Needs


# Facts that several checks use.

NO_DRIVER = "none: no NVIDIA driver"
CUDA_NEEDED = (13, 0)
"""The CUDA version that kernels are compiled for; an older driver does not load them."""


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "GPU"), count(4, "GPU")
    ('1 GPU', '4 GPUs')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def no_driver(machine: Machine) -> bool:
    """Return whether neither CUDA nor NVML is installed; False for a driver that is installed but does not answer."""
    return "missing" in machine.probes["cuda"].values and "missing" in machine.probes["nvml"].values


def cuda_version(machine: Machine) -> tuple[int, int] | None:
    version = machine.probes["cuda"].values.get("version")
    return None if version is None else (int(version[0]), int(version[1]))


def too_old(machine: Machine) -> bool:
    version = cuda_version(machine)
    return version is not None and version < CUDA_NEEDED


def gpus_of(machine: Machine) -> Sequence[Any]:
    """Return the GPUs that the CUDA driver shows to this process."""
    gpus: Sequence[Any] = machine.probes["cuda"].values.get("gpus", ())
    return gpus


def nothing_to_check(machine: Machine, name: str) -> Finding | None:
    """Return the line of a check that has no GPU to check, or None. The check `driver` says why CUDA does not start."""
    if no_driver(machine):
        return ok(name, NO_DRIVER)
    if too_old(machine) or "gpus" not in machine.probes["cuda"].values:
        return warn(name, "not checked, since CUDA cannot be used here: see driver")
    if not gpus_of(machine):
        return ok(name, "none: no GPU is visible to this process")
    return None
