"""What a thread can do, and what stands in a place of memory afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

EVER = 255  # no thread has so many steps

# A slot holds the number of the operation that filled it, which the model alone knows; a line its epoch too.
OF = 15
EPOCHS = 16  # what a line's epoch is multiplied by
REFUSED = 128  # besides: the rank refuses the data of the step


class Act(IntEnum):
    ENTER = 0  # wait for the stream, look at the poison, read the epoch
    STORE = 1  # a store into a slot sets out; it lands at any time
    DRAIN = 2  # until the stores that threads `of` made before their step `value` have landed
    WORD = 3  # a store into a word sets out
    WAIT = 4  # until a word is at least `value`
    READ = 5  # slots `of`, which must be of this operation
    USE = 6  # a slot by a kernel of the user's: the half is that of the dispatch it belongs to
    JOIN = 7  # until threads `of` have ended: the ticket
    EPOCH = 8  # store the epoch
    DARE = 9  # fail, or go on for good
    LINE = 10  # a store into a line, with its epoch, sets out
    LOOK = 11  # until the lines `of` are all of this epoch; they must be of this operation
    ABSTAIN = 12  # leave out the next `skips` steps where this rank refuses the data
    TAKE = 13  # a row that no lane has taken, as lane `value`; leave out the next `skips` steps where one has
    HOLD = 14  # leave out the next `skips` steps where it is not lane `value` that has taken the row
    COPY = 15  # a store of what is at `of` sets out, by the copy engine


class Step(NamedTuple):
    act: Act
    at: int = 0  # place in memory; of the even half, for a slot or a line
    stride: int = 0  # from the even half to the odd one
    value: int = 0
    scale: int = 0  # what the epoch adds to `value`
    of: tuple[int, ...] = ()
    says: int = 0  # place of the refusal that goes with what is stored; 0: none does
    heeds: bool = False  # what is read are statuses of ranks
    skips: int = 0  # steps to leave out where one of them, or this rank, refuses; EVER: all that are left


@dataclass(frozen=True)
class Thread:
    rank: int
    place: int  # of its launch in the program
    role: str
    steps: tuple[Step, ...]
