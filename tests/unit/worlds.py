"""Worlds inside one process, with a thread for each rank, for tests that need no second address space."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from raymoe.memory.world import World

DEADLINE_S = 30.0


def together(functions: list[Callable[[], Any]]) -> list[Any]:
    """Run each function in a thread; return results or errors, in order."""
    outcomes: list[Any] = [TimeoutError("a thread did not end in time")] * len(functions)

    def run(place: int, function: Callable[[], Any]) -> None:
        try:
            outcomes[place] = function()
        except Exception as error:  # noqa: BLE001 - the test judges it
            outcomes[place] = error

    threads = [
        threading.Thread(target=run, args=(place, function), name=str(place), daemon=True)
        for place, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return outcomes


def wired(size: int, name: str = "test", timeout_s: float = 10.0) -> list[World]:
    """Open and wire the worlds of `size` ranks."""
    worlds = [World.open(rank, size, name=name, timeout_s=timeout_s) for rank in range(size)]
    descriptors = [world.descriptor() for world in worlds]
    for outcome in together([lambda world=world: world.wire(descriptors) for world in worlds]):
        if isinstance(outcome, Exception):
            raise outcome
    return worlds


def inner_world(outer: World) -> World:
    """Make another world of the same ranks, which can end while they still meet in `outer`."""
    world = World.open(outer.rank, outer.size, name="inner", timeout_s=outer.timeout_s)
    world.wire([dict(descriptor) for descriptor in outer.swap(world.descriptor(), "inner world")])  # type: ignore[call-overload]
    return world


def close(worlds: list[World]) -> None:
    """Close all worlds at the same time; raise the first error."""
    for outcome in together([world.close for world in worlds]):
        if isinstance(outcome, Exception):
            raise outcome


def each(worlds: list[World], function: Callable[[World], Any]) -> list[Any]:
    """Call the function on every rank at the same time; return results or errors, in rank order."""
    return together([lambda world=world: function(world) for world in worlds])
