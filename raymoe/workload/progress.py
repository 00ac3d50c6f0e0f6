"""The progress of a case, and limits of its result lines. The driver imports this module, so it loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MOST_LOADS = 1024
"""Experts whose load goes into a result line. A line of more experts has their imbalance only."""
FAR = 1.5
"""From this multiple of the median on, a 99th percentile is far from it: the line then has its times over the steps."""
MOST_POINTS = 200
"""Times over the steps in a result line."""
MOST_RANK_TIMES = 64
"""Ranks whose own times are in a result line."""


@dataclass(frozen=True)
class OpWork:
    """An operation that each step times."""

    op: str  # as in result lines
    nbytes: float = 0.0  # that this rank sends to others in one run of it; of a copy, those that it receives
    how: Mapping[str, str] = field(default_factory=dict)
    """Keys of the result line that tell runs of the operation apart: `backend`, `transport`, `l2`, `beside`."""


@dataclass(frozen=True)
class StepWork:
    """The work of one step on this rank, as an average over the draws that steps take turns with."""

    ops: tuple[OpWork, ...] = ()
    tokens: float = 0.0
    imbalance: float | None = None
    """Rows of this rank's busiest expert, divided by the mean of all experts of all ranks."""
    rank_load: float | None = None
    """Rows of this rank's experts, divided by the mean of all ranks."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps of a loop on one rank. Times are seconds of CLOCK_MONOTONIC."""

    first: int  # index of the first step
    steps: int
    began: float
    ended: float  # this rank did its steps
    met: float  # all ranks did
    us: tuple[float, ...] = ()  # microseconds of each operation, over all steps
    verified: tuple[tuple[int, float, float], ...] = ()  # index, begin and end of each verified step

    @property
    def done(self) -> int:
        """Steps of the loop that are done with this block."""
        return self.first + self.steps

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def verify_seconds(self) -> float:
        """Seconds of the verified steps. Each takes longer than others: it computes what the results must be."""
        return sum(ended - began for _, began, ended in self.verified)

    @property
    def step_s(self) -> float:
        """Seconds of a timed step. A verified step is done once more for the clock, so it counts too.

        >>> round(Block(0, 4, began=0.0, ended=3.4, met=3.5, verified=((2, 0.2, 3.2),)).step_s, 3)
        0.1
        """
        return (self.seconds - self.verify_seconds) / self.steps


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of a case are done, the last of them in `block`."""

    done: int
    total: int
    block: Block
    work: StepWork = StepWork()


@dataclass(frozen=True)
class Span:
    """A phase of a process, for the trace of a run. Times are seconds of CLOCK_MONOTONIC of its host."""

    name: str
    began: float
    ended: float
    generation: int = 0


Listener = Callable[[Block], None]


def step_listener(
    progress: Callable[[Progress], None], total: int, before: int = 0, work: StepWork | None = None
) -> Listener:
    """Return a listener for one of the loops of a case of `total` steps; earlier loops did `before` of them.

    >>> heard = []
    >>> step_listener(heard.append, total=100, before=50)(Block(first=8, steps=2, began=1.0, ended=1.2, met=1.3))
    >>> heard[0].done, heard[0].total, round(heard[0].block.seconds, 3)
    (60, 100, 0.2)
    """
    return lambda block: progress(Progress(before + block.done, total, block, work or StepWork()))


def in_words(done: int, total: int, step_s: float | None = None) -> str:
    """Return the progress of a case as a part of a line. `step_s`: seconds of a step.

    >>> in_words(0, 0), in_words(7, 50), in_words(7, 50, 0.00193), in_words(7, 50, 35e-6), in_words(7, 50, 2.5)
    ('setting up', 'step 7/50', 'step 7/50, 1.93 ms a step', 'step 7/50, 35 us a step', 'step 7/50, 2.5 s a step')
    """
    if not total:
        return "setting up"
    if not step_s:
        return f"step {done}/{total}"
    factor, unit = next((pair for pair in ((1, "s"), (1e3, "ms")) if step_s * pair[0] >= 1), (1e6, "us"))
    return f"step {done}/{total}, {step_s * factor:.3g} {unit} a step"
