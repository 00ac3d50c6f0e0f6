"""Run the loop of every workload: warm up, time, verify and report progress.

A workload gives one function that does a step and returns how long each of its operations took on this rank. A sample
is the time of the slowest rank, so ranks swap their times after each block of steps. A block takes BLOCK_SECONDS: long
enough to make the swaps cheap, short enough to report progress often. All ranks see the same times, so all choose the
same length for the next block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Protocol

from raymoe.config import Case
from raymoe.cuda.nvtx import nvtx_range
from raymoe.errors import Aborted, PeerTimeout, WrongResult
from raymoe.memory.world import World
from raymoe.workload.memory_needed import MANY_RUNS, SMALL_TOKENS
from raymoe.workload.progress import MOST_LOADS, Block, Listener
from raymoe.workload.tails import by_rank, over_steps, percentile
from raymoe.workload.traffic import Load, Traffic

# Statistics of a list of times.


def spread(us: Sequence[float]) -> dict[str, object]:
    """Return the keys of a result line about times in microseconds. A sample is one run; a step's keys may say more.

    >>> spread([4.0, 2.0])
    {'samples': 2, 'runs': 1, 'us_p50': 3.0, 'us_p99': 4.0, 'us_min': 2.0, 'us_max': 4.0}
    """
    return {
        "samples": len(us),
        "runs": 1,
        "us_p50": median(us),
        "us_p99": percentile(us, 99),
        "us_min": min(us),
        "us_max": max(us),
    }


def runs_of(tokens: int, captured: object, l2: str | None) -> int:
    """Return how many runs a sample is the mean of: one for CPU ranks, and for an eager call on a cold cache.

    >>> runs_of(128, True, "cold"), runs_of(128, False, "cold"), runs_of(4096, True, "warm"), runs_of(128, False, None)
    (20, 1, 1, 1)
    """
    return MANY_RUNS if tokens <= SMALL_TOKENS and (l2 == "warm" or (captured and l2 == "cold")) else 1


def on_wire(total: float, busiest: float, us: float) -> dict[str, object]:
    """Return the keys about bytes: `total` between all ranks, `busiest` in one direction of one rank's port.

    >>> on_wire(total=4e6, busiest=1e6, us=100.0)
    {'bytes_wire': 4000000, 'gbps_wire': 10.0}
    >>> on_wire(total=0, busiest=0, us=100.0)
    {'bytes_wire': 0, 'gbps_wire': None}
    """
    return {"bytes_wire": round(total), "gbps_wire": busiest / us / 1e3 if busiest else None}


BLOCK_SECONDS = 0.2
LONGEST_BLOCK = 1024  # steps; ranks swap their times in one message of at most 64 KiB on the world's board
VERIFY_EVERY = 50


@dataclass(frozen=True)
class Step:
    """One step on one rank: microseconds of each operation, and the error if the step was verified."""

    us: tuple[float, ...]
    error: float | None = None
    host_us: tuple[float, ...] = ()
    """Microseconds of each call on the host, if they were measured beside the GPU's."""


StepTimes = tuple[tuple[float, ...], tuple[float, ...]]
"""`us` and `host_us` of one step on one rank."""


class DoStep(Protocol):
    def __call__(self, index: int, *, verify: bool) -> Step: ...


class WorkloadStep(DoStep, Protocol):
    """A step of a workload, on CPU ranks or GPU ranks."""

    @property
    def ops(self) -> tuple[tuple[str, str | None], ...]:
        """The operations that a step times, in this order, each with the state of the L2 cache (None on CPU ranks)."""

    @property
    def keys(self) -> Line:
        """The keys of a result line that only the step knows."""

    def close(self) -> None:
        """Free what the step holds. A call after it is an error."""


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
class Samples:
    """Times of each operation in microseconds, of the slowest rank, and the largest error (None: not verified)."""

    us: list[list[float]] = field(default_factory=list)
    rank_us: list[list[list[float]]] = field(default_factory=list)
    """Microseconds of each operation on each rank, by operation and rank."""
    host_us: list[list[list[float]]] = field(default_factory=list)
    """Microseconds of calls on the host, by operation and rank. A call waits for no other rank, so each has its own."""
    max_error: float | None = None

    @property
    def verified(self) -> bool | None:
        return None if self.max_error is None else True

    def add(self, all_ranks: tuple[StepTimes, ...]) -> None:
        """Add the times of one step on all ranks."""
        us = list(zip(*(us for us, _ in all_ranks), strict=True))
        host_us = list(zip(*(host_us for _, host_us in all_ranks), strict=True))
        self.us = self.us or [[] for _ in us]
        self.rank_us = self.rank_us or [[[] for _ in op] for op in us]
        self.host_us = self.host_us or [[[] for _ in op] for op in host_us]
        for slowest, op in zip(self.us, us, strict=True):
            slowest.append(max(op))
        for kept, ops in ((self.rank_us, us), (self.host_us, host_us)):
            for ranks, op in zip(kept, ops, strict=True):
                for times, time in zip(ranks, op, strict=True):
                    times.append(time)


def measure(world: World, steps: Steps, do_step: DoStep, report: Listener, label: str) -> Samples:
    """Run all steps. Call `report` after each block.

    If this rank is told to stop, return the samples so far, and leave the error in `world.waiter.interrupted`.
    """
    samples = Samples()
    try:
        with aborting(world), nvtx_range(world.device, label):
            _measure(world, steps, do_step, report, label, samples)
    except Aborted as error:
        if not samples.us:
            raise
        world.waiter.interrupted = error
    return samples


@contextmanager
def aborting(world: World) -> Iterator[None]:
    """Abort the world if a peer did not come, so that nothing that is closed then waits for that peer again."""
    try:
        yield
    except PeerTimeout as error:
        world.abort(str(error))
        raise


def _measure(world: World, steps: Steps, do_step: DoStep, report: Listener, label: str, samples: Samples) -> None:
    done, count = 0, 1
    while done < steps.total:
        count = min(count, steps.total - done)
        began = monotonic()
        own_times: list[StepTimes] = []
        verified: list[tuple[int, float, float]] = []
        with nvtx_range(world.device, f"steps {done} to {done + count - 1}"):
            for index in range(done, done + count):
                if steps.verified(index):
                    step_began = monotonic()
                    step = do_step(index, verify=True)
                    _check_error(world, step.error, index - steps.warmup, steps.bound, samples, label)
                    do_step(index, verify=False)
                    verified.append((index, step_began, monotonic()))
                # The times of a verified step do not count: other work ran between its operations. Nor do those of the
                # step after it: the links were idle meanwhile, and the first dispatch then takes longer.
                step = do_step(index, verify=False)
                own_times.append((step.us, step.host_us))
        ended = monotonic()
        by_step, longest = _times_of_all(world, own_times, ended - began, label)
        met = monotonic()
        for all_ranks in by_step[max(0, steps.warmup - done) :]:
            samples.add(all_ranks)
        us = tuple(sum(op) for op in zip(*(us for us, _ in own_times), strict=True))
        report(Block(done, count, began, ended, met, us, tuple(verified)))
        done += count
        count = max(1, min(LONGEST_BLOCK, int(count * BLOCK_SECONDS / longest)))


def _times_of_all(
    world: World, own_times: list[StepTimes], seconds: float, label: str
) -> tuple[list[tuple[StepTimes, ...]], float]:
    """Return all ranks' times of each step of a block, and the seconds that the slowest rank took for the block."""
    answers = world.swap((seconds, own_times), f"{label}: samples")
    all_ranks: list[list[StepTimes]] = [answer[1] for answer in answers]  # type: ignore[index]
    return list(zip(*all_ranks, strict=True)), max(answer[0] for answer in answers)  # type: ignore[index]


def _check_error(world: World, error: float | None, step: int, bound: float, samples: Samples, label: str) -> None:
    """Raise on all ranks if the error of any is above the bound. They swap errors, so all stop at the same step."""
    errors = [float(str(answer)) for answer in world.swap(error, f"{label}: verify")]
    worst = max(errors)
    if not worst <= bound:
        rank = errors.index(worst)
        raise WrongResult(
            f"{label}: step {step} on rank {rank} has an error of {worst:.3g}, and the bound is {bound:.3g}: "
            "data was lost, mixed up or changed on the way, so the times of this case mean nothing"
        )
    samples.max_error = max(worst, samples.max_error or 0.0)


# Timelines: when the blocks of a kernel come to its points, over several runs on all ranks.

TIMELINE_RUNS = 9

Times = Mapping[str, tuple[float, float, float]]
"""By point: microseconds after the start at which the first, the median and the last block came to it."""

Timeline = list[list[str | float]]
"""Times in a result line: [point, first, median, last], in order of time."""


def median_times(samples: Sequence[Times]) -> Times:
    """Return the medians for each point, over the samples in which blocks came to it.

    >>> median_times([{"start": (0.0, 1.0, 2.0)}, {"start": (0.0, 3.0, 9.0), "end": (4.0, 5.0, 6.0)}])
    {'start': (0.0, 2.0, 5.5), 'end': (4.0, 5.0, 6.0)}
    """
    medians = {}
    for point in dict.fromkeys(point for sample in samples for point in sample):
        first, middle, last = zip(*(sample[point] for sample in samples if point in sample), strict=True)
        medians[point] = median(first), median(middle), median(last)
    return medians


def timeline_of_slowest(ranks: Sequence[Times]) -> Timeline:
    """Return the timeline of the slowest rank: the one with the latest time of a last block.

    >>> quick = {"start": (0.0, 0.0, 0.1), "end": (5.0, 6.0, 7.0)}
    >>> timeline_of_slowest([quick, {"end": (4.0, 6.03, 8.26), "start": (0.0, 0.1, 0.2)}, quick])
    [['start', 0.0, 0.1, 0.2], ['end', 4.0, 6.0, 8.3]]
    """
    slowest = max(ranks, key=lambda times: max(last for *_, last in times.values()))
    in_order = sorted(slowest.items(), key=lambda item: (item[1][1], item[1][2]))
    return [[point, *(round(us, 1) for us in times)] for point, times in in_order]


# Keys that the result lines of a case share.

Line = dict[str, object]


def result_line(case: Case, op: str, traffic: Traffic, samples: Samples, index: int) -> Line:
    """Return the line of the operation with samples `samples.us[index]`. The caller adds keys or replaces them."""
    times = spread(samples.us[index])
    tail = {"us_by_rank": by_rank(samples.rank_us[index]), "us_over_steps": over_steps(samples.us[index])}
    return {
        "case": case.name,
        "workload": case.job.workload,
        "op": op,
        "graph": False,
        "ranks": case.job.world.ranks,
        **times,
        **tail,
        **on_wire(traffic.total, traffic.busiest, float(str(times["us_p50"]))),
        "verified": samples.verified,
        "max_error": samples.max_error,
        "device": "cpu",
    }


def shape_keys(case: Case, backend: str) -> Line:
    """Return the keys that workloads with an exchange add."""
    shape, exchange = case.job.shape, case.job.exchange
    dispatch, combine = (way or shape.dtype for way in (exchange.wire.dispatch, exchange.wire.combine))
    return {
        "backend": backend,
        "wire": dispatch if dispatch == combine else f"{dispatch}/{combine}",
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "experts": shape.experts,
        "topk": shape.topk,
        "dtype": shape.dtype,
        "routing": case.job.routing.kind,
        "seed": case.job.routing.seed,
        "layout": exchange.layout,
        "alignment": exchange.alignment,
        "padding": exchange.padding,
    }


def load_keys(load: Load, index: int) -> Line:
    """Return the keys about the load of experts and of ranks. Only the first line of a case, `index` 0, has each
    expert's rows, and only up to MOST_LOADS experts.

    >>> load = Load([4.0, 0.0, 2.0, 2.0], busiest_rows=32, capacity=64)
    >>> load_keys(load, 1)
    {'expert_load_imbalance': 2.0, 'rows_busiest': 32, 'rows_capacity': 64}
    >>> load_keys(load, 0)["expert_load"]
    [4.0, 0.0, 2.0, 2.0]
    """
    keys: Line = {"expert_load_imbalance": round(load.imbalance(), 3)}
    keys |= {"rows_busiest": load.busiest_rows, "rows_capacity": load.capacity}
    if index == 0 and len(load.by_expert) <= MOST_LOADS:
        keys["expert_load"] = [round(rows, 2) for rows in load.by_expert]
    return keys
