"""The loop that every workload runs in: warm up, time, verify, tell how far it is.

A workload gives one function that does a step and says how long each of its operations took on this rank. A sample is
the time of the slowest rank, so ranks swap their times after each block of steps. A block is long enough to keep the
swap out of the way and short enough to keep the progress alive; the ranks agree on its length because all of them see
the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from raymoe.job.errors import PeerTimeout, WrongResult
from raymoe.memory.world import World

BLOCK_SECONDS = 0.2
LONGEST_BLOCK = 1024  # steps; their times travel in one message of the world's board, 64 KiB at most
VERIFY_EVERY = 50


@dataclass(frozen=True)
class Step:
    """One step on one rank: microseconds of each operation, and the error found where it was verified."""

    us: tuple[float, ...]
    error: float | None = None
    host_us: tuple[float, ...] = ()
    """Of the calls on the host, where that is another time and is known."""


Times = tuple[tuple[float, ...], tuple[float, ...]]
"""Of one step on one rank: `us` and `host_us`."""


class DoStep(Protocol):
    def __call__(self, index: int, *, verify: bool) -> Step: ...


@dataclass(frozen=True)
class Steps:
    """How many steps, which of them are verified, and how large an error may be."""

    warmup: int
    count: int
    verify: bool
    bound: float

    @property
    def total(self) -> int:
        return self.warmup + self.count

    def verified(self, index: int) -> bool:
        """The first timed step, every 50th after it, and the last.

        >>> steps = Steps(warmup=2, count=60, verify=True, bound=0.01)
        >>> [index for index in range(steps.total) if steps.verified(index)]
        [2, 52, 61]
        """
        timed = index - self.warmup
        return self.verify and (timed == self.count - 1 or (timed >= 0 and timed % VERIFY_EVERY == 0))


@dataclass
class Measured:
    """The samples of each operation in microseconds, slowest rank, and the largest error; None where nothing was
    verified."""

    us: list[list[float]] = field(default_factory=list)
    host_us: list[list[list[float]]] = field(default_factory=list)
    """Of the calls on the host, by operation and rank: a rank's call waits for no other rank, so each has its own."""
    max_error: float | None = None

    @property
    def verified(self) -> bool | None:
        return None if self.max_error is None else True


def measure(world: World, steps: Steps, do_step: DoStep, tell: Callable[[int, float], None], what: str) -> Measured:
    """Run all steps. `tell` is called after each block with the steps done so far and the block's seconds."""
    with aborting(world):
        return _measure(world, steps, do_step, tell, what)


@contextmanager
def aborting(world: World) -> Iterator[None]:
    """Where a peer is gone, nothing that is closed on the way out shall wait for it once more."""
    try:
        yield
    except PeerTimeout as error:
        world.abort(str(error))
        raise


def _measure(world: World, steps: Steps, do_step: DoStep, tell: Callable[[int, float], None], what: str) -> Measured:
    measured = Measured()
    done, block = 0, 1
    while done < steps.total:
        block = min(block, steps.total - done)
        started = perf_counter()
        mine: list[Times] = []
        for index in range(done, done + block):
            step = do_step(index, verify=steps.verified(index))
            mine.append((step.us, step.host_us))
            if steps.verified(index):
                _judge(world, step.error, index - steps.warmup, steps.bound, measured, what)
        seconds = perf_counter() - started
        by_step, longest = _times_of_all(world, mine, seconds, what)
        for all_ranks in by_step[max(0, steps.warmup - done) :]:
            _add(measured, all_ranks)
        done += block
        tell(done, seconds)
        block = max(1, min(LONGEST_BLOCK, int(block * BLOCK_SECONDS / longest)))
    return measured


def _times_of_all(world: World, mine: list[Times], seconds: float, what: str) -> tuple[list[tuple[Times, ...]], float]:
    """All ranks' times of each step of a block, and the longest that a rank took for the block."""
    answers = world.swap((seconds, mine), f"{what}: samples")
    all_ranks: list[list[Times]] = [answer[1] for answer in answers]  # type: ignore[index]
    return list(zip(*all_ranks, strict=True)), max(answer[0] for answer in answers)  # type: ignore[index]


def _add(measured: Measured, all_ranks: tuple[Times, ...]) -> None:
    """Take one step's times into the samples."""
    us = [max(op) for op in zip(*(us for us, _ in all_ranks), strict=True)]
    host_us = list(zip(*(host_us for _, host_us in all_ranks), strict=True))
    measured.us = measured.us or [[] for _ in us]
    measured.host_us = measured.host_us or [[[] for _ in op] for op in host_us]
    for samples, sample in zip(measured.us, us, strict=True):
        samples.append(sample)
    for ranks, op in zip(measured.host_us, host_us, strict=True):
        for samples, sample in zip(ranks, op, strict=True):
            samples.append(sample)


def _judge(world: World, error: float | None, step: int, bound: float, measured: Measured, what: str) -> None:
    """Every rank hears every rank's error, so that all of them stop on the same step."""
    errors = [float(str(each)) for each in world.swap(error, f"{what}: verify")]
    worst = max(errors)
    if not worst <= bound:
        rank = errors.index(worst)
        raise WrongResult(
            f"{what}: step {step} on rank {rank} has an error of {worst:.3g} and {bound:.3g} is the bound: "
            "data was lost, mixed up or changed on the way, and the times of this case mean nothing"
        )
    measured.max_error = max(worst, measured.max_error or 0.0)
