"""How ranks come to share memory: each makes its own, all swap descriptors, each maps its peers and proves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from raymoe.errors import RaymoeError, WiringError
from raymoe.memory.layout import Layout

# What ranks do one after the other and judge together: above all, prove their mappings to one another.


class Meeting(Protocol):
    """The part of a world that is needed here."""

    rank: int
    size: int
    generation: int
    name: str

    def swap(self, value: object, what: str) -> list[object]: ...

    def barrier(self, what: str) -> None: ...

    def agree(self, problem: RaymoeError | None, what: str) -> None: ...


def act_together(meeting: Meeting, act: Callable[[], None], what: str) -> None:
    """Act, then raise on all ranks if any could not."""
    problem: RaymoeError | None = None
    try:
        act()
    except RaymoeError as error:
        problem = error
    meeting.agree(problem, what)


def prove(
    meeting: Meeting, what: str, write: Callable[[int, int], None], read: Callable[[int], int], serial: int = 0
) -> None:
    """Show that each mapping is the memory of the rank it is taken for.

    Rank r writes a number that names both r and p into slot r of peer p. Two mappings taken for one another put those
    numbers in each other's place, and the owners see it. `serial` tells one proof of a world from another.
    """
    ranks = range(meeting.size)

    def number(writer: int, owner: int) -> int:
        return ((meeting.generation + 1 << 24) + serial) * meeting.size**2 + writer * meeting.size + owner

    def give() -> None:
        for peer in ranks:
            write(peer, number(meeting.rank, peer))

    def judge() -> None:
        for peer in ranks:
            found, expected = read(peer), number(peer, meeting.rank)
            if found != expected:
                raise WiringError(
                    f"{what}: rank {peer} wrote {found} into the memory of rank {meeting.rank}; {expected} was due"
                )

    act_together(meeting, give, f"{what}: proof")
    act_together(meeting, judge, f"{what}: verdict")


# How ranks that have a board come to share memory: each makes its own, all swap descriptors, each maps its peers.
#
# `host_shm` (a module) and `cuda_ipc.DeviceMemory` (an object) are the two sources of such memory.


class Segment(Protocol):
    """Memory of one rank: its own, which a peer maps by the descriptor, or a mapping of a peer's."""

    nbytes: int

    def descriptor(self) -> dict[str, object]: ...

    def unpublish(self) -> None: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Segment)
S_co = TypeVar("S_co", bound=Segment, covariant=True)


class SegmentSource(Protocol[S_co]):
    """Makes segments. Each call gives a whole one or raises and leaves nothing behind; own memory is zeroed."""

    def own(self, name: str, nbytes: int) -> S_co: ...

    def map_peer(self, descriptor: dict[str, object]) -> S_co: ...


def share(meeting: Meeting, source: SegmentSource[S], layout: Layout, what: str) -> list[S]:
    """A segment for this layout on every rank, mapped by all, in rank order. Either all ranks get it or all raise."""
    own: S | None = None
    mine: tuple[dict[str, object], str] | None = None
    problem: RaymoeError | None = None
    try:
        own = source.own(f"raymoe-{meeting.name}-{what}"[:200], layout.nbytes)
        mine = own.descriptor(), layout.hash
    except RaymoeError as error:
        problem = error
    theirs = meeting.swap(mine, f"{what}: memory")
    segments: list[S] = []
    try:
        for peer, other in enumerate(theirs):
            if own is not None and isinstance(other, tuple):
                if other[1] != layout.hash:
                    raise WiringError(f"{what}: layout {other[1]} on rank {peer}, {layout.hash} on rank {meeting.rank}")
                segments.append(own if peer == meeting.rank else source.map_peer(other[0]))
    except RaymoeError as error:
        problem = error
    try:
        meeting.agree(problem, f"{what}: mapping")
    except RaymoeError:
        _undo(meeting, [segment for segment in segments if segment is not own], own, what)
        raise
    assert own is not None
    own.unpublish()
    return segments


def _undo(meeting: Meeting, mapped: list[S], own: S | None, what: str) -> None:
    """All mappings go before any memory does. Where the ranks cannot meet any more, it goes with the process."""
    for segment in mapped:
        segment.close()
    with suppress(RaymoeError):  # the caller raises the cause of all this
        meeting.barrier(f"{what}: undone")
        if own is not None:
            own.close()
