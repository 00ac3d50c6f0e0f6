"""What a check found: one line of `raymoe doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
NAME_WIDTH = len("stream memory ops")


@dataclass(frozen=True)
class Finding:
    """A line. `blocks` holds the kinds of ranks that cannot run because of it: none unless it is a `fail`."""

    level: Literal["ok", "warn", "fail"]
    name: str
    found: str
    way_out: str = ""
    blocks: tuple[Device, ...] = ()

    def line(self) -> str:
        """
        >>> Finding("warn", "/dev/shm", "64 MiB", "give it more, as --shm-size=1g").line()
        'warn  /dev/shm           64 MiB; give it more, as --shm-size=1g'
        """
        said = " ".join(f"{self.found}; {self.way_out}".removesuffix("; ").split())
        return f"{self.level:<4}  {self.name:<{NAME_WIDTH}}  {said}"


def ok(name: str, found: str) -> Finding:
    return Finding("ok", name, found)


def warn(name: str, found: str, way_out: str = "") -> Finding:
    return Finding("warn", name, found, way_out)


def fail(name: str, found: str, way_out: str, blocks: tuple[Device, ...] = ("cuda",)) -> Finding:
    return Finding("fail", name, found, way_out, blocks)


EVERY_RANK: tuple[Device, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Outcome:
    """What a probe told. `trouble` says why it did not tell all: it hung, crashed or raised."""

    values: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class Needs:
    """What a config asks of the machine that it runs on."""

    config: str
    workload: str
    device: str  # as in the config: auto, cpu or cuda
    ranks: int
    bytes_per_rank: int


@dataclass(frozen=True)
class Machine:
    """All that judgements look at. Outside of tests the values come when they are first looked at."""

    probes: Mapping[str, Outcome]
    needs: Needs
