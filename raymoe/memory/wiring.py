"""Share memory between ranks: each rank makes its own, all swap descriptors, each maps its peers and proves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from raymoe.errors import ConfigError, RaymoeError, WiringError
from raymoe.memory.layout import Layout

# Acting together


class Collectives(Protocol):
    """The part of a world that is needed here."""

    rank: int
    size: int
    generation: int
    name: str

    def swap(self, value: object, what: str, timeout_s: float | None = None) -> list[object]: ...

    def barrier(self, what: str) -> None: ...

    def agree(self, problem: RaymoeError | None, what: str) -> None: ...


class Gathering(Protocol):
    """Ranks that can gather before they have a world, in a process group or in a meeting by Ray."""

    rank: int
    size: int
    known_address: str | None  # ranks on other machines reach this one there, if that is known already

    def device(self, device: str) -> str:
        """Choose the device of this rank's world."""

    def gather(
        self, device: torch.device | None, descriptor: dict[str, object] | None, problem: Exception | None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Gather a name for the world, and what all ranks give. Where one has a problem, all ranks raise.

        `device` is the device of this rank's world, if the world is open.
        """


def act_together(world: Collectives, act: Callable[[], None], what: str) -> None:
    """Call `act`, then raise on all ranks if it failed on any."""
    problem: RaymoeError | None = None
    try:
        act()
    except RaymoeError as error:
        problem = error
    world.agree(problem, what)


def prove(
    world: Collectives, what: str, write: Callable[[int, int], None], read: Callable[[int], int], serial: int = 0
) -> None:
    """Prove that each mapping leads to the memory of the rank that it is used for.

    Rank r writes a number made of r and p into proof word r of peer p. If two mappings are swapped, each number lands
    at the wrong owner, which sees it. `serial` distinguishes the proofs of a world.
    """
    ranks = range(world.size)

    def number(writer: int, owner: int) -> int:
        return ((world.generation + 1 << 24) + serial) * world.size**2 + writer * world.size + owner

    def write_proofs() -> None:
        for peer in ranks:
            write(peer, number(world.rank, peer))

    def check_proofs() -> None:
        for peer in ranks:
            written, expected = read(peer), number(peer, world.rank)
            if written != expected:
                raise WiringError(
                    f"{what}: rank {peer} wrote {written} into the memory of rank {world.rank}; {expected} was expected"
                )

    act_together(world, write_proofs, f"{what}: write proofs")
    act_together(world, check_proofs, f"{what}: check proofs")


# Sharing memory. `host_shm` (a module) and `cuda_ipc.DeviceMemory` (an object) make the segments.


class Segment(Protocol):
    """Memory of this rank, which a peer maps by its descriptor, or a mapping of a peer's memory."""

    nbytes: int

    def descriptor(self) -> dict[str, object]: ...

    def unpublish(self) -> None: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Segment)
S_co = TypeVar("S_co", bound=Segment, covariant=True)


class SegmentSource(Protocol[S_co]):
    """Makes segments. A call that raises leaves nothing allocated. Own memory is zeroed."""

    def own(self, name: str, nbytes: int) -> S_co: ...

    def map_peer(self, descriptor: dict[str, object]) -> S_co: ...


def share(world: Collectives, source: SegmentSource[S], layout: Layout, what: str) -> list[S]:
    """Make a segment on every rank and map all; return them in rank order. Either all ranks get them or all raise."""
    own: S | None = None
    offer: tuple[dict[str, object], str] | None = None
    problem: RaymoeError | None = None
    try:
        own = source.own(f"raymoe-{world.name}-{what}"[:200], layout.nbytes)
        offer = own.descriptor(), layout.hash
    except RaymoeError as error:
        problem = error
    theirs = world.swap(offer, f"{what}: memory")
    segments: list[S] = []
    try:
        for peer, other in enumerate(theirs):
            if own is not None and isinstance(other, tuple):
                if other[1] != layout.hash:
                    raise WiringError(
                        f"{what}: layout {other[1]} on rank {peer}, {layout.hash} on rank {world.rank}; all ranks must "
                        "ask for one layout"
                    )
                segments.append(own if peer == world.rank else source.map_peer(other[0]))
    except RaymoeError as error:
        problem = error
    try:
        world.agree(problem, f"{what}: mapping")
    except RaymoeError:
        _undo(world, [segment for segment in segments if segment is not own], own, what)
        raise
    assert own is not None
    own.unpublish()
    return segments


def _undo(world: Collectives, mapped: list[S], own: S | None, what: str) -> None:
    """Close all mappings on all ranks, then free. If the ranks cannot meet any more, the process frees at its end."""
    for segment in mapped:
        segment.close()
    with suppress(RaymoeError):  # the caller raises the cause
        world.barrier(f"{what}: undone")
        if own is not None:
            own.close()


# Groups


class Wired(Protocol):
    """A world that is open, and not yet wired."""

    def wire(self, descriptors: Sequence[dict[str, object]]) -> None: ...


def wire_group(ranks: tuple[int, ...], group: Wired | None, theirs: Sequence[object]) -> None:
    """Wire a group, after a check that all ranks of its world asked for the same one."""
    for rank, other in enumerate(theirs):
        assert isinstance(other, tuple)
        if other[0] != ranks:
            raise ConfigError(f"rank {rank} asks for a group of {list(other[0])} while another asks for {list(ranks)}")
    if group is not None:
        descriptors = [other[1] for other in theirs if isinstance(other, tuple)]
        group.wire([descriptors[rank] for rank in ranks])
