"""The steps of a thread, and the contents of the model's memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MAX_STEPS = 255  # more than any thread has
RAIL = "rail"  # the role of a thread on a stream of its own

# A slot holds the number of the operation that filled it, which only the model knows. A line also holds its epoch.
OPERATION_MASK = 15
EPOCH_FACTOR = 16  # a line's epoch is multiplied by this
REFUSED_BIT = 128  # the rank refuses the data of the step


class Act(IntEnum):
    """The kinds of steps. Stores and copies are asynchronous: they land at any later time."""

    ENTER = 0  # wait for the stream, check the poison, read the epoch
    STORE = 1  # store into a slot
    DRAIN = 2  # wait until the stores of threads `operands` before their step `value` have landed
    STORE_WORD = 3  # `value`, or what word `operands` holds
    WAIT = 4  # wait until a word is at least `value`, or what word `operands` holds
    READ = 5  # read slots `operands`, which must be of this operation
    USE = 6  # read a slot in a user's kernel, by the parity of its dispatch
    JOIN = 7  # wait until threads `operands` have ended: the ticket
    STORE_EPOCH = 8
    MAY_FAIL = 9  # fail now, or never in this wait. Of a rail: an abort sets word `at`, and `skips` steps are skipped
    STORE_LINE = 10  # store into a line, with its epoch
    POLL_LINES = 11  # wait until lines `operands` are of this epoch; they must be of this operation
    SKIP_IF_REFUSED = 12  # skip the next `skips` steps if this rank refuses the data
    TAKE_ROW = 13  # take a row as warp `value`, or skip the next `skips` steps if another warp has taken it
    SKIP_UNLESS_TAKEN = 14  # skip the next `skips` steps unless warp `value` has taken the row
    COPY = 15  # copy `operands`, by the copy engine
    COUNT = 16  # add 1 to a word of this rank
    SKIP_IF_ABORTED = 17  # skip the next step if the word of an abort is set


class Step(NamedTuple):
    """One step of a thread. An address is an index into the model's memory."""

    act: Act
    at: int = 0  # the address; of a slot or a line, that of parity 0
    stride: int = 0  # from parity 0 to parity 1
    value: int = 0
    scale: int = 0  # times the epoch, added to `value`
    operands: tuple[int, ...] = ()  # addresses or threads
    refusal: int = 0  # address of the refusal that is stored with a status; 0: none
    statuses: bool = False  # whether a read is of statuses
    skips: int = 0  # steps to skip; MAX_STEPS: all that are left. After statuses: if a rank refuses


@dataclass(frozen=True)
class Thread:
    """A thread of a launch of one rank. `launch` is the launch's index in the program."""

    rank: int
    launch: int
    role: str
    steps: tuple[Step, ...]
