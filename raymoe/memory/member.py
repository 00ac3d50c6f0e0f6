"""Who a rank is, what it asks for, and whether the descriptors of all fit together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import raymoe
from raymoe.job.errors import ConfigError, WiringError
from raymoe.memory.host_shm import check_fields

DEVICES = ("cpu", "cuda")
SOURCES = Path(raymoe.__file__).parent

_AGREED = {
    "name": str,
    "size": int,
    "generation": int,
    "version": str,
    "code_hash": str,
    "layout_hash": str,
    "boot_id": str,
    "kind": str,
    "device": str,
    "driver": int,
}
_OWN = {"rank": int, "gpu": str, "share_gpu": bool}


def code_hash(sources: Path = SOURCES) -> str:
    """Of all Python of this package: ranks that run different code under one version are no peers. About 5 ms.

    >>> code_hash() == code_hash(), len(code_hash())
    (True, 64)
    """
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(f"{path.relative_to(sources)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Options(TypedDict, total=False):
    """What `World.open` takes besides rank and size; `Member` has the meanings and what holds where one is left out."""

    generation: int
    name: str
    timeout_s: float
    device: str
    share_gpu: bool


@dataclass(frozen=True)
class Member:
    """One rank of a world."""

    rank: int
    size: int
    generation: int = 0
    name: str = "world"
    timeout_s: float = 30.0
    device: str = "cpu"
    share_gpu: bool = False
    """On every rank: ranks may be on one GPU. For tests of right and wrong, never for speed. Means nothing on CPUs."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} in a world of {self.size}; ranks are 0 to size - 1, and a world has at least one"
            )
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; waits need a positive number of seconds")
        if self.device not in DEVICES:
            raise ConfigError(f"device is {self.device}; a world is on {' or '.join(DEVICES)}")

    def in_group(self, ranks: Sequence[int], serial: int) -> Member | None:
        """Who this rank is in a group of ranks of its world; None where it is not in it.

        >>> member = Member(rank=2, size=4).in_group([3, 2], serial=1)
        >>> (member.rank, member.size, member.name) if member else None
        (1, 2, 'world-group1')
        """
        known = range(self.size)
        if not ranks or len(set(ranks)) != len(ranks) or any(type(r) is not int or r not in known for r in ranks):
            raise ConfigError(
                f"a group of ranks {list(ranks)} asked for in a world of {self.size}; a group has at least one rank, "
                f"each once, of 0 to {self.size - 1}"
            )
        if self.rank not in ranks:
            return None
        return replace(self, rank=ranks.index(self.rank), size=len(ranks), name=f"{self.name}-group{serial}")


def check_descriptors(descriptors: Sequence[dict[str, object]], mine: dict[str, object]) -> None:
    """Raise unless these are the descriptors of all ranks of this very world, in rank order, `mine` among them."""
    rank, size = mine["rank"], mine["size"]
    if len(descriptors) != size:
        raise WiringError(f"{len(descriptors)} descriptors for a world of {size}; every rank gives one")
    for place, other in enumerate(descriptors):
        check_fields(other, _AGREED | _OWN)
        if other["rank"] != place:
            raise WiringError(f"the descriptor at place {place} is of rank {other['rank']}; they come in rank order")
        for field in _AGREED:
            if other[field] != mine[field]:
                here = f"{mine[field]} on rank {rank}"
                raise WiringError(f"{field} is {other[field]} on rank {place} and {here}; all ranks must agree")
        if place == rank and other != mine:
            raise WiringError(f"the descriptor at place {rank} is not the one that this rank gave")
    if mine["device"] == "cuda":
        _check_gpus(descriptors)


def _check_gpus(descriptors: Sequence[dict[str, object]]) -> None:
    alone = [rank for rank, other in enumerate(descriptors) if not other["share_gpu"]]
    seen: dict[object, int] = {}
    for rank, other in enumerate(descriptors):
        first = seen.setdefault(other["gpu"], rank)
        if first != rank and alone:
            who = "no rank" if len(alone) == len(descriptors) else f"all ranks but {', '.join(map(str, alone))}"
            raise WiringError(
                f"ranks {first} and {rank} are both on GPU {other['gpu']}; give each rank one of its own "
                f"(num_gpus: 1), or set share_gpu on every rank to share one for a test ({who} set it)"
            )
