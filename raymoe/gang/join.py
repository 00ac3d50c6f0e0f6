"""`raymoe.join`: make a world out of actors that are already there.

For whoever has Ray actors of their own (an inference engine, a trainer) and wants the exchange inside them. The ranks
meet in a small named actor, swap descriptors through it once, and never need Ray for an exchange again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from raymoe.job.errors import ConfigError, WiringError

if TYPE_CHECKING:
    from raymoe.memory.world import World

LOOK_S = 0.02  # between two looks at who has come


class Meeting:
    """Where the ranks of one world leave their descriptors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptors: dict[int, dict[str, Any]] = {}
        self.came: set[int] = set()  # also those that have left again: they are not the ones to wait for

    def enter(self, rank: int, size: int, descriptor: dict[str, Any]) -> str | None:
        """Leave a descriptor; returns why that is refused, or None."""
        if size != self.size:
            return f"rank {rank} says size {size}, the first to come said {self.size}"
        if rank in self.descriptors:
            return f"rank {rank} is taken by pid {self.descriptors[rank]['pid']}"
        self.descriptors[rank] = descriptor
        self.came.add(rank)
        return None

    def leave(self, rank: int) -> None:
        """Take a descriptor back."""
        self.descriptors.pop(rank, None)

    def present(self) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """The descriptors that are there by now, and all ranks that ever came."""
        return self.descriptors, self.came


def join(name: str, rank: int, size: int, timeout_s: float = 60.0) -> World:
    """Join the world `name` as `rank` of `size`, from inside a Ray actor; every rank calls this once.

    Returns when every peer is mapped and proved. The world is on the CPU: ranks share memory of one machine. Worlds
    that live at the same time have different names; when a world is closed, its name is free.

        world = raymoe.join("experts", rank, size)
        with raymoe.Exchange(world, raymoe.ExchangeSpec(tokens=512, hidden=1024, experts=32, topk=4)) as ex:
            got = ex.dispatch(x, topk_idx, topk_weights)
            y = ex.combine(rows, got)
        world.close()
    """
    if not 0 <= rank < size:
        raise ConfigError(f"asked to join {name!r} as rank {rank} of {size}; ranks go from 0 to {size - 1}")
    if not ray.is_initialized():
        raise ConfigError(f"asked to join {name!r} outside Ray; call it inside a Ray actor, or ray.init() first")
    from raymoe.memory.world import World

    deadline = time.monotonic() + timeout_s
    world = World.open(rank, size, name=name, timeout_s=timeout_s)
    try:
        meeting = _enter(name, rank, size, dict(world.descriptor()), deadline)
        world.wire(_everyone(meeting, name, rank, size, deadline))
    except BaseException:
        world.close()
        raise
    if rank == 0:  # every rank has what it came for, since `wire` ends with a barrier; the name is free again
        ray.kill(meeting)
    return world


def _enter(name: str, rank: int, size: int, descriptor: dict[str, Any], deadline: float) -> Any:
    """The meeting of this name, with our descriptor in it. One that is being ended is waited out."""
    actor: Any = ray.remote(num_cpus=0)(Meeting)
    options = actor.options(name=f"raymoe/join/{name}", namespace="raymoe", get_if_exists=True)
    while True:
        try:
            meeting = options.remote(size)
            entry = meeting.enter.remote(rank, size, descriptor)
            refusal: str | None = ray.get(entry, timeout=max(1.0, deadline - time.monotonic()))
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                asked = f"asked to join {name!r} as rank {rank} of {size}"
                raise WiringError(f"{asked}, and Ray had no place to meet in time: {type(error).__name__}") from error
            time.sleep(LOOK_S)
            continue
        if refusal is not None:
            asked = f"asked to join {name!r} as rank {rank} of {size}"
            raise WiringError(f"{asked}, refused: {refusal}; use another name or rank")
        return meeting


def _everyone(meeting: Any, name: str, rank: int, size: int, deadline: float) -> list[dict[str, Any]]:
    while True:
        try:
            present, came = ray.get(meeting.present.remote(), timeout=max(1.0, deadline - time.monotonic()))
        except (RayActorError, GetTimeoutError) as error:
            said = f"rank {rank} joined {name!r}, and the rank that came first has died"
            raise WiringError(f"{said}; join again") from error
        if len(present) == size:
            return [present[peer] for peer in range(size)]
        if time.monotonic() > deadline:
            meeting.leave.remote(rank)
            missing = ", ".join(str(peer) for peer in range(size) if peer not in came)
            raise WiringError(f"rank {rank} of {size} joined {name!r} and waited in vain for rank {missing}")
        time.sleep(LOOK_S)
