"""Time several pieces of work in turns, by the clock of workload exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

import raymoe
from raymoe.workload.clock import OpClock

WARMUP = 2


def in_turns(
    world: raymoe.World, works: dict[str, Callable[[], None]], check: Callable[[], None], calls: int, rounds: int
) -> dict[str, list[float]]:
    """Return the times of all works in each round, by the slowest rank.

    `calls` of each are captured. With 0 the works are graphs already.
    """
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), ExitStack() as closing:
        clock = OpClock(world, stream, check, captured=calls > 0, calls=max(calls, 1))
        closing.callback(clock.close)
        for work in works.values():  # kernels are loaded before a capture
            work()
        check()
        ops = {name: clock.timed(work) for name, work in works.items()}
        times: dict[str, list[float]] = {name: [] for name in ops}
        for number in range(rounds + WARMUP):
            for name, op in ops.items():
                us = slowest(clock.us_cold(op) if calls else clock.cold_us(works[name]), world)
                if number >= WARMUP:
                    times[name].append(round(us, 2))
        return times


def slowest(us: float, world: raymoe.World) -> float:
    """Return the time of the slowest rank."""
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, us)
    return max(float(one) for one in every)
