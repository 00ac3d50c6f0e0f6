"""Know which weights of a world's layers hold no values, and refuse steps until they do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

from raymoe.errors import RaymoeError, WeightsMissing

_NAMED = 3
"""How many parameters an error names."""


class Halting(Protocol):
    """The part of a world that is needed here."""

    rank: int
    halt: RaymoeError | None


class MissingWeights:
    """The weights of a rank's layers without values, by address. `World.shared` has one for each world.

    >>> class OneRank:
    ...     rank, halt = 0, None
    >>> world = OneRank()
    >>> missing = MissingWeights(world)
    >>> missing.add({4096: "experts.down_proj"}, "a load did not end")
    >>> str(world.halt)
    'rank 0 has no values of experts.down_proj, because a load did not end: load them'
    >>> missing.remove([4096])
    >>> world.halt is None
    True
    """

    def __init__(self, world: Halting) -> None:
        self._world = weakref.ref(world)
        self._names: dict[int, str] = {}
        self._why = self._advice = ""

    def __contains__(self, address: int) -> bool:
        return address in self._names

    def add(self, names: Mapping[int, str], why: str, advice: str = "load them") -> None:
        """Refuse steps until these have values again."""
        self._names |= names
        self._why, self._advice = why, advice
        self._tell()

    def remove(self, addresses: Iterable[int]) -> None:
        """Take note of values. Steps work again where all have them."""
        for address in addresses:
            self._names.pop(address, None)
        self._tell()

    def close(self, together: bool) -> None:
        """Do nothing: this holds no resource."""

    def _tell(self) -> None:
        world = self._world()
        if world is None:
            return
        if not self._names:
            world.halt = None
            return
        names = list(self._names.values())
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        error = WeightsMissing(
            f"rank {world.rank} has no values of {', '.join(names[:_NAMED])}{more}, because {self._why}"
        )
        error.advice = self._advice
        world.halt = error
