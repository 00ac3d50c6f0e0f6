"""Defines the errors of raymoe: `except raymoe.errors.PeerTimeout as error`.

All of them are `RaymoeError`. The message is one sentence: what was asked, what was found, what to do. They keep their
attributes when pickled, so a Ray actor or a worker process can raise them to its caller.

>>> import pickle
>>> timeout = PeerTimeout(op="dispatch", epoch=7, peer=1, expected=7, seen=6, waited_s=30.0, rank=0)
>>> str(pickle.loads(pickle.dumps(timeout)))
'rank 0 waited 30.0 s for rank 1 in dispatch (epoch 7): expected 7, seen 6'
"""

# ruff: noqa: N818  (names without Error, because they say what happened: a rank died, a peer timed out)

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = [
    "Aborted",
    "CannotWrite",
    "CaptureError",
    "ClusterError",
    "ConfigError",
    "CudaError",
    "CudaMissing",
    "DataRefused",
    "PeerTimeout",
    "PlacementError",
    "RankDied",
    "RaymoeError",
    "Stopped",
    "WeightsMissing",
    "WiringError",
    "WrongResult",
]


class RaymoeError(Exception):
    """A failure with a known cause. Raised as this class itself, it reports an exception of a rank."""

    exit_code: int = 1
    advice: str = ""
    """The advice to a program that uses the library, at the end of the message. A job gets other words."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}: {self.advice}" if self.advice else text

    def __reduce__(self) -> tuple[Callable[..., RaymoeError], tuple[object, ...]]:
        # By default pickle calls the class with `args`, which fails if __init__ takes other parameters.
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[RaymoeError], args: tuple[object, ...], state: dict[str, object]) -> RaymoeError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(RaymoeError, ValueError):
    """A wrong job, command line or argument. `problems` lists all problems of a config."""

    exit_code = 2

    def __init__(self, message: str, problems: Iterable[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ClusterError(RaymoeError):
    """No Ray cluster: none answers at the given address, or a local Ray does not start."""

    exit_code = 3


class PlacementError(RaymoeError):
    """The cluster cannot hold the gang, or could not in time."""

    exit_code = 3


class WiringError(RaymoeError):
    """Ranks cannot become peers: their descriptors disagree, or a rank cannot reach a peer's memory."""


class RankDied(RaymoeError):
    """The process of a rank has ended."""

    exit_code = 4

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(eq=False)
class PeerTimeout(RaymoeError):
    """A wait for a peer ran out of time. `rank` waited for `peer`; `expected` and `seen` are epochs.

    - `told_by`: the rank that waited, where it told this one. `rank` is then this one.
    - `through`: the rank that was awaited, where that one was waiting for `peer` in turn.
    """

    exit_code = 5

    op: str
    epoch: int
    peer: int
    expected: int
    seen: int
    waited_s: float
    rank: int = -1
    told_by: int = -1
    through: int = -1

    def __post_init__(self) -> None:
        waiting = self.told_by if self.told_by >= 0 else self.rank
        waiter = f"rank {waiting}" if waiting >= 0 else "this rank"
        awaited, waits_too = self.peer, ""
        if self.through >= 0:
            awaited, waits_too = self.through, f"; rank {self.through} was waiting because of rank {self.peer}"
        told = f"; rank {self.rank} was told" if self.told_by >= 0 else ""
        # Only a combine beside a product waits for its own rank.
        beside = self.op == "combine" and awaited == waiting
        whom = "the product of its own experts" if beside else f"rank {awaited}"
        super().__init__(
            f"{waiter} waited {self.waited_s:.1f} s for {whom} in {self.op} (epoch {self.epoch}): "
            f"expected {self.expected}, seen {self.seen}{waits_too}{told}"
        )


class WrongResult(RaymoeError):
    """The result differs from the oracle's by more than the dtype allows."""

    exit_code = 6


class DataRefused(RaymoeError):
    """An exchange refused its input: an id out of range, or more rows than the capacity. The next step works."""

    exit_code = 7

    rows_needed: int | None = None
    """The capacity that would have held the rows of every rank; None where another cause refused the step."""


class WeightsMissing(RaymoeError):
    """A step needs weights that hold no values: they sleep, or were not loaded after a wake, or a load did not end."""


class CannotWrite(RaymoeError):
    """A result could not be written. The message names the path and the system's reason."""

    exit_code = 8


class Aborted(RaymoeError):
    """A rank was told to stop and is not the cause itself. `peer` is the rank that it was waiting for, if any."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Stopped(RaymoeError):
    """The user or the system asked the command to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; finished cases are kept")
        self.signum = signum
        self.exit_code = 128 + signum


class CudaError(RaymoeError):
    """A CUDA driver call failed. `code` is the driver's error number, or 0 if no call was made."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class CudaMissing(CudaError):
    """CUDA is missing: the Python bindings, the driver or a GPU."""


class CaptureError(CudaError):
    """An operation is not possible while a stream is captured, or it broke the capture."""


def printable(text: str) -> str:
    r"""Escape the characters of text from outside that change a terminal or a page: control characters, line ends,
    marks of writing direction, lone surrogates.

    >>> print(printable("a\x1b[31mb\r\n\u202e"), printable("µs ✓"))
    a\x1b[31mb\r\n\u202e µs ✓
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_SHOWN = 80  # characters of a value that an error message repeats


def shown(text: str) -> str:
    r"""Make text from a user's file fit for one line of an error message.

    >>> shown("a\nb"), shown("x" * 200) == "x" * 80 + "…"
    ('a\\nb', True)
    """
    plain = printable(text[: _SHOWN + 1])
    return plain if len(plain) <= _SHOWN else plain[:_SHOWN] + "…"


def one_line(text: str, most: int = 400) -> str:
    r"""Make one line of text from another program, without control characters, and cut it.

    >>> one_line("a\nb\x1b"), len(one_line("x" * 900))
    ('a b\\x1b', 401)
    """
    line = " ".join(text.split())
    return printable(line[:most]) + ("…" if len(line) > most else "")


@dataclass(frozen=True)
class Problem:
    """One problem of a config. `where` is the file as the user named it, or `--set a.b=c`; `line` may be None.

    >>> print(Problem("x.yaml", 4, "shape.hiden", "1024", "unknown key", "did you mean 'hidden'?"))
    x.yaml: line 4, shape.hiden = 1024: unknown key, did you mean 'hidden'?
    >>> print(Problem("--set shape.topk=0", None, "shape.topk", "0", "0 is below 1"))
    --set shape.topk=0: 0 is below 1
    """

    where: str
    line: int | None
    key: str
    value: str | None
    reason: str
    hint: str | None = None

    @property
    def text(self) -> str:
        """The whole message except `where`: line, key and value, reason and hint."""
        # The name of a `--set` has its key and value already.
        key = "" if self.where.startswith(f"--set {self.key}=") else self.key
        setting = f"{key} = {self.value}" if key and self.value is not None else key
        place = ", ".join(part for part in (f"line {self.line}" if self.line else "", setting) if part)
        reason = f"{self.reason}, {self.hint}" if self.hint else self.reason
        return f"{place}: {reason}" if place else reason

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text
