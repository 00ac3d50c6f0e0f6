"""What the driver process tells the process that keeps it: small picklable facts, in the order they happened."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bounded:
    """The driver enters something that may hang in C++; after `seconds` it is ended with this exit code and message."""

    seconds: float | None  # None: the last bound is lifted
    exit_code: int = 1
    message: str = ""


@dataclass(frozen=True)
class Connected:
    """Ray is up; `address` is None for a Ray of our own."""

    address: str | None
    seconds: float


@dataclass(frozen=True)
class Ready:
    """Every rank of a generation has proved its peers. `ranks` says where each one lives."""

    generation: int
    seconds: float
    ranks: tuple[dict[str, object], ...]


@dataclass(frozen=True)
class Progressed:
    """Rank 0 is this far in a case."""

    case: str
    done: int
    total: int


@dataclass(frozen=True)
class CaseDone:
    """A case is finished; its result lines, one an operation."""

    case: str
    generation: int
    lines: tuple[dict[str, object], ...]


@dataclass(frozen=True)
class GenerationEnded:
    """A generation is over; `restarting` says whether another follows."""

    generation: int
    cause: str
    culprit: int | None
    message: str
    restarting: bool


@dataclass(frozen=True)
class RunOutcome:
    """How the run ended: the exit code of the command and the one sentence that explains it."""

    exit_code: int
    message: str
    culprit: int | None = None
    traceback: str | None = field(default=None, repr=False)


Message = Bounded | Connected | Ready | Progressed | CaseDone | GenerationEnded | RunOutcome
