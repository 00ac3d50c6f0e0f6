"""Messages from the driver to the main process: small, picklable, in the order of what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from raymoe.workload.progress import Span


@dataclass(frozen=True)
class Bounded:
    """The driver's next call may hang in C++: after `seconds`, end the run with this exit code and message."""

    seconds: float | None  # None: the call has returned
    exit_code: int = 1
    message: str = ""


@dataclass(frozen=True)
class Alive:
    """The driver works. It says so between any two calls of Ray, so that the main process notices one that hangs."""


@dataclass(frozen=True)
class Ending:
    """The outcome of the run is known. Only cleaning up is left, which may not change it, for at most `seconds`."""

    outcome: RunOutcome
    seconds: float


@dataclass(frozen=True)
class Connected:
    """Ray is up. `address` is None for a local Ray."""

    address: str | None
    seconds: float


@dataclass(frozen=True)
class Waiting:
    """The ranks are not placed yet; `text` says what is free and who holds the rest."""

    text: str


@dataclass(frozen=True)
class Ready:
    """Every rank of a generation has mapped its peers and proved it. `ranks`: process, node and GPU of each."""

    generation: int
    seconds: float
    ranks: tuple[dict[str, object], ...]


@dataclass(frozen=True)
class Recovered:
    """All ranks of a later generation have done their first step, so long after the loss was noticed."""

    generation: int
    seconds: float


@dataclass(frozen=True)
class Progressed:
    """Rank 0 has done `done` of `total` steps of a case. `total` is 0 while it sets the case up."""

    case: str
    done: int
    total: int
    step_s: float | None = None  # seconds of a step, the mean of the last block


@dataclass(frozen=True)
class ClockShift:
    """Seconds to add to a host's times, and a bound of the error."""

    seconds: float
    error: float

    @classmethod
    def of_answer(cls, sent: float, there: float, answered: float) -> ClockShift:
        """Return the shift that an answer shows: the other clock was at `there` between `sent` and `answered`.

        >>> ClockShift.of_answer(sent=10.0, there=500.25, answered=10.5)
        ClockShift(seconds=-490.0, error=0.25)
        """
        return cls((sent + answered) / 2 - there, (answered - sent) / 2)


@dataclass(frozen=True)
class Profiled:
    """Phases of the driver or of a rank. `shift` converts times of its host to the driver's clock.

    Each message of a host replaces the shift of earlier ones.
    """

    process: str
    host: str
    spans: tuple[Span, ...]
    shift: ClockShift


@dataclass(frozen=True)
class CaseDone:
    """A case is finished. `lines` are its result lines, one for each operation."""

    case: str
    generation: int
    lines: tuple[dict[str, object], ...]


@dataclass(frozen=True)
class CaseStopped:
    """A case was stopped before its last step. `lines` have the samples so far."""

    generation: int
    lines: tuple[dict[str, object], ...]


@dataclass(frozen=True)
class GenerationEnded:
    """A generation has ended. `restarting`: another one follows."""

    generation: int
    cause: str
    culprit: int | None
    message: str
    restarting: bool


@dataclass(frozen=True)
class RunOutcome:
    """The end of the run: the exit code of the command, and the sentence that explains it."""

    exit_code: int
    message: str
    culprit: int | None = None
    traceback: str | None = field(default=None, repr=False)
    # The main process adds these two.
    output: str = field(default="", repr=False)  # of the driver, Ray's own warnings above all
    session: Path | None = None  # directory of the local Ray that the driver started


Message = (
    Alive
    | Bounded
    | Connected
    | Waiting
    | Ending
    | Ready
    | Recovered
    | Progressed
    | Profiled
    | CaseDone
    | CaseStopped
    | GenerationEnded
    | RunOutcome
)
