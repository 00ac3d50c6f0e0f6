"""What ranks do one after the other and judge together: above all, prove their mappings to one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from raymoe.job.errors import RaymoeError, WiringError


class Meeting(Protocol):
    """What is asked of a world here."""

    rank: int
    size: int
    generation: int

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
