"""The identity and options of one rank, and the check that the descriptors of all ranks agree."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import raymoe
from raymoe.errors import ConfigError, WiringError
from raymoe.memory.host_shm import check_fields
from raymoe.packaged import packaged_folder

SOURCES, KERNELS = Path(raymoe.__file__).parent, packaged_folder("kernels")

LONGEST_WAIT_S = 1e6
"""Kernels count a wait's nanoseconds in 64 bits, and Ray counts milliseconds. This limit fits both."""

_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")

_AGREED = {
    "name": str,
    "size": int,
    "generation": int,
    "version": str,
    "code_hash": str,
    "layout_hash": str,
    "kind": str,
    "device": str,
    "driver": int,
}
_SPANNING = {"world": str, "domain": int, "host": str, "inside": dict}
_SAME_INSIDE = ("generation", "version", "code_hash", "device")  # the same in the worlds of all domains
_OWN = {"rank": int, "gpu": str, "share_gpu": bool, "host": str, "boot_id": str, "domain": str}


def code_hash(sources: Path = SOURCES, kernels: Path | None = KERNELS) -> str:
    """Hash this package's Python files and kernels, so that ranks with different code of one version do not wire.

    Takes about 5 ms, once for each world.

    >>> code_hash() == code_hash(), len(code_hash())
    (True, 64)
    """
    digest = hashlib.sha256()
    for name, path in _files(sources, kernels):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(sources: Path, kernels: Path | None) -> Iterator[tuple[str, Path]]:
    """List the files that must be the same on all ranks, each with its name in a source tree."""
    for path in sorted(sources.rglob("*.py")):
        yield f"raymoe/{path.relative_to(sources)}", path
    if kernels is not None:
        for path in sorted(kernels.rglob("*.cu*")):
            yield f"kernels/{path.relative_to(kernels)}", path


class Options(TypedDict, total=False):
    """Options of `World.open` besides rank and size. `Member` has their meanings and defaults."""

    generation: int
    name: str
    timeout_s: float
    device: str
    share_gpu: bool
    domain: str


@dataclass(frozen=True)
class Member:
    """One rank of a world."""

    rank: int
    size: int
    generation: int = 0
    name: str = "world"
    timeout_s: float = 30.0
    device: str = "cpu"
    """`cpu`, `cuda` for the first GPU that this process sees, or `cuda:1` for the second."""
    share_gpu: bool = False
    """Set on every rank, it lets ranks share a GPU. For tests of correctness, never for timing. CPU ranks ignore it."""
    domain: str = ""
    """The key of the rank's domain. Ranks with different keys do not map one another's memory."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or type(self.size) is not int:
            raise ConfigError(f"rank {self.rank!r} in a world of {self.size!r}; rank and size are whole numbers")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} in a world of {self.size}; ranks are 0 to size - 1, and a world has at least one"
            )
        if type(self.name) is not str or not self.name or "\0" in self.name:
            raise ConfigError(f"name is {self.name!r}; a world is named by text that is not empty and holds no NUL")
        if type(self.timeout_s) not in (int, float) or not 0 < self.timeout_s <= LONGEST_WAIT_S:  # NaN fails both
            raise ConfigError(
                f"timeout_s is {self.timeout_s!r}; waits need a number of seconds above 0, {LONGEST_WAIT_S:.0f} at most"
            )
        if type(self.device) is not str or not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device is {self.device!r}; a world is on cpu, cuda or a GPU by its number, such as cuda:1"
            )
        if type(self.domain) is not str:
            raise ConfigError(f"domain is {self.domain!r}; the key of a domain is text")

    @property
    def ordinal(self) -> int | None:
        """Return the GPU's number among those that this process sees; None on the CPU.

        >>> Member(0, 1, device="cuda:3").ordinal, Member(0, 1, device="cuda").ordinal, Member(0, 1).ordinal
        (3, 0, None)
        """
        match = _DEVICE.fullmatch(self.device)
        return int((match and match.group(1)) or 0) if self.kind == "cuda" else None

    @property
    def kind(self) -> str:
        """Return `cpu` or `cuda`: the part of `device` that is the same on all ranks."""
        return self.device.partition(":")[0]

    def descriptor(self) -> dict[str, object]:
        """Return who this rank is, as plain values that the other ranks check."""
        return {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "generation": self.generation,
            "version": raymoe.__version__,
            "device": self.kind,
            "share_gpu": self.share_gpu,
            "host": socket.gethostname(),
            "domain": self.domain,
        }

    def in_group(self, ranks: Sequence[int], serial: int) -> Member | None:
        """Make the member that this rank is in a group of its world's ranks; None if it is not in the group.

        >>> member = Member(rank=2, size=4).in_group([3, 2], serial=1)
        >>> (member.rank, member.size, member.name) if member else None
        (1, 2, 'world-group1')
        """
        known = range(self.size)
        if not ranks or len(set(ranks)) != len(ranks) or any(type(r) is not int or r not in known for r in ranks):
            raise ConfigError(
                f"a group of ranks {list(ranks)} was asked for in a world of {self.size}; a group has at least one "
                f"rank, names each once, and ranks are 0 to {self.size - 1}"
            )
        if self.rank not in ranks:
            return None
        return replace(self, rank=ranks.index(self.rank), size=len(ranks), name=f"{self.name}-group{serial}")


def check_descriptors(descriptors: Sequence[dict[str, object]], own: dict[str, object]) -> None:
    """Raise unless `descriptors` come from all ranks of one world, in rank order, with this rank's `own` among them."""
    rank, size = own["rank"], own["size"]
    if len(descriptors) != size:
        raise WiringError(f"{len(descriptors)} descriptors for a world of {size}; each rank gives one")
    for peer, other in enumerate(descriptors):
        if type(other.get("domain")) is int:  # a rank that asked for a world of several domains
            raise ConfigError(f"domain is {other['domain']} on rank {peer} and left out here; all ranks must agree")
        check_fields(other, _AGREED | _OWN)
    _check_domain(descriptors)
    _check_host(descriptors)
    for place, other in enumerate(descriptors):
        if other["rank"] != place:
            raise WiringError(f"the descriptor at place {place} is of rank {other['rank']}; they come in rank order")
        for field in _AGREED:
            if other[field] != own[field]:
                here = f"{own[field]} on rank {rank}"
                raise WiringError(f"{field} is {other[field]} on rank {place} and {here}; all ranks must agree")
        if place == rank and other != own:
            raise WiringError(f"the descriptor at place {rank} is not the one that this rank gave")
    if own["device"] == "cuda":
        check_gpus(descriptors)


def _check_domain(descriptors: Sequence[dict[str, object]]) -> None:
    """Refuse ranks of several domains.

    >>> _check_domain([{"domain": "0"}, {"domain": "0"}, {"domain": "1"}])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raymoe.errors.WiringError: rank 0 is in domain '0' and rank 2 in domain '1'; ranks map one another's memory ...
    """
    for rank, other in enumerate(descriptors):
        if other["domain"] != descriptors[0]["domain"]:
            raise WiringError(
                f"rank 0 is in domain {descriptors[0]['domain']!r} and rank {rank} in domain {other['domain']!r}; "
                "ranks map one another's memory inside a domain only: make a world of several domains by "
                "World.of(domain=), or one for each domain"
            )


def _check_host(descriptors: Sequence[dict[str, object]]) -> None:
    """Refuse ranks on several hosts. Boot ids distinguish hosts, because host names may repeat.

    >>> _check_host([{"host": "a", "boot_id": "1"}, {"host": "b", "boot_id": "2"}, {"host": "a", "boot_id": "1"}])
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raymoe.errors.WiringError: a world on 2 hosts: ranks 0, 2 on a (boot 1) and ranks 1 on b (boot 2); its ranks ...
    """
    places: dict[object, list[int]] = {}
    for rank, other in enumerate(descriptors):
        places.setdefault(other["boot_id"], []).append(rank)
    if len(places) > 1:
        hosts = [
            f"ranks {', '.join(map(str, ranks))} on {descriptors[ranks[0]]['host']} (boot {str(boot)[:8]})"
            for boot, ranks in places.items()
        ]
        raise WiringError(
            f"a world on {len(hosts)} hosts: {' and '.join(hosts)}; its ranks map one another's memory, so place them "
            "on one host (STRICT_PACK in Ray), or make a domain for each host (domain=)"
        )


def check_gpus(descriptors: Sequence[dict[str, object]]) -> None:
    """Refuse two ranks on one GPU unless all ranks asked to share."""
    not_sharing = [str(rank) for rank, other in enumerate(descriptors) if not other["share_gpu"]]
    seen: dict[object, int] = {}
    for rank, other in enumerate(descriptors):
        first = seen.setdefault(other["gpu"], rank)
        if first != rank and not_sharing:
            sharing = "no rank" if len(not_sharing) == len(descriptors) else f"all ranks but {', '.join(not_sharing)}"
            raise WiringError(
                f"ranks {first} and {rank} are both on GPU {other['gpu']}; give each rank one of its own (num_gpus=1 "
                "in Ray, torch.cuda.set_device(LOCAL_RANK) under torchrun), or set share_gpu on every rank to share "
                f"one for a test ({sharing} set it)"
            )


# Several domains


def check_spanning(descriptors: Sequence[dict[str, Any]], rank: int, size: int, world: dict[str, object]) -> None:
    """Raise unless the descriptors come from all ranks of a world of several domains.

    `world` has the name and the domain's size that this `rank` asked for. The world of each domain checks its own
    descriptors too.
    """
    if len(descriptors) != size:
        raise WiringError(f"{len(descriptors)} descriptors for a world of {size}; each rank gives one")
    check_fields(descriptors[0], {"port": int, "secret": bytes})
    own = world | _same_inside(descriptors[rank])
    for peer, other in enumerate(descriptors):
        check_fields(other, _SPANNING)
        theirs = {"world": other["world"], "domain": other["domain"]} | _same_inside(other)
        for field, value in own.items():
            if theirs[field] != value:
                here = f"{value} on rank {rank}"
                raise WiringError(f"{field} is {theirs[field]} on rank {peer} and {here}; all ranks must agree")
    if descriptors[rank]["inside"]["device"] == "cuda":
        check_gpus([descriptor["inside"] for descriptor in descriptors])


def _same_inside(descriptor: dict[str, Any]) -> dict[str, object]:
    inside: dict[str, object] = descriptor["inside"]
    return {field: inside.get(field) for field in _SAME_INSIDE}


def check_domain_size(size: object, ranks: int) -> None:
    """Refuse a number of ranks in a domain that does not divide the ranks of the world."""
    if type(size) is not int or size < 1 or ranks % size:
        raise ConfigError(
            f"domain is {size!r} in a world of {ranks} ranks; it is the number of ranks in a domain, and all "
            "domains have the same number"
        )


def check_domain_sizes(theirs: Sequence[dict[str, Any]], size: int) -> None:
    """Refuse ranks that asked for domains of another size, or for none."""
    for rank, other in enumerate(theirs):
        if other.get("domain") != size or "network" not in other:
            other_size = other["domain"] if "network" in other else "left out"
            raise ConfigError(f"domain is {other_size} on rank {rank} and {size} here; all ranks must agree")
