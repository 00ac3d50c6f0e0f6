"""Tell the other ranks that this one gives up. They stop at once, instead of waiting until their own deadlines.

A rank whose wait ran out of time leaves its operation, and with it all later ones. A peer that comes late would wait
for it in vain, and name it. So the rank leaves a *farewell*, which says for whom it waited, and *rings* its peers.

The awaited rank may itself wait for another. So every rank in a long wait shows for whom it waits, with a count that
grows while it waits: its *beat*. A rank that gives up follows the beats to the rank that does not wait.

Inside a domain this goes through shared memory (`raymoe.memory.bell`). Between domains farewell and beats are records
in the world's store (`StoredFarewell`). Ranks in long waits read it there, and ring their domain.
"""

from __future__ import annotations

import copy
import json
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from raymoe.errors import Aborted, PeerTimeout, RaymoeError
from raymoe.memory.bell import Beat, Bell, Farewell
from raymoe.memory.heap import Heap
from raymoe.memory.wait import Waiter

E = TypeVar("E", bound=BaseException)

KEY = "failed"
"""The key of the store that holds the farewell of the rank that failed last."""
_ASK_EVERY_S = 0.2
_ANSWER_S, _TELL_S = 1.0, 0.2  # limits of one question, and of one record that is written
_BEATS_S = 0.5  # a rank that waits beats in the store more often than once in this time


# Between domains


class Store(Protocol):
    """The part of `raymoe.memory.across.BoundedStore` that is needed here."""

    address: Any

    @property
    def busy(self) -> bool: ...

    def ask(self, method: str, *arguments: object, timeout_s: float) -> Any: ...


class StoredFarewell:
    """Farewell and beats in the store of a world, which rank 0 serves. Each record follows a MAC.

    - `failed`: the farewell of the rank that failed last.
    - `waiting r`: the beat of rank r. It writes one whenever it asks for a farewell.

    `inside` is the waiter of this rank's domain, whose first rank is `first`.
    """

    def __init__(self, store: Store, waiter: Waiter, inside: Waiter, first: int) -> None:
        self._store, self._waiter, self._inside, self._first = store, waiter, inside, first
        self._check_at, self._count = 0.0, 0

    def tell(self, farewell: Farewell) -> None:
        """Publish a farewell. Best effort: without it ranks of other domains wait until their deadlines."""
        if not self._store.busy:
            with suppress(RuntimeError, RaymoeError):  # the store does not answer, or this rank was told meanwhile
                self._set(KEY, farewell.pack(), _TELL_S)

    def check(self) -> None:
        """Raise the error of a rank that gave up. Asks the store now and then only."""
        if self._store.busy or time.monotonic() < self._check_at:
            return
        with suppress(RuntimeError):  # the store does not answer; the wait goes on to its deadline
            self.read()
        self._check_at = time.monotonic() + _ASK_EVERY_S

    def check_timeouts(self) -> None:
        """Do the same where ranks meet without a rail: a rank that failed for another reason can still come there."""
        try:
            self.check()
        except RaymoeError as error:
            if isinstance(error, PeerTimeout):
                raise

    def read(self) -> None:
        """Raise the error of a rank that gave up, and `RuntimeError` where the store does not answer."""
        if (awaited := self._awaited()) is not None:
            self._beat(awaited)
        record = self._get(KEY, "the reason of a rank that failed")
        if record is None:
            return
        error = Farewell.unpack(record).error_on(self._waiter.rank)
        if isinstance(error, PeerTimeout):
            self._waiter.stop(error)
        raise error

    def beat_of(self, rank: int) -> Beat | None:
        if self._store.busy:
            return None
        try:
            record = self._get(f"waiting {rank}", f"the beat of rank {rank}")
        except RuntimeError:  # the store does not answer
            return None
        if record is None:
            return None
        peer, count = json.loads(record)
        return peer, count

    def pause(self, awaited: int) -> None:
        """Let every rank that waits beat again, this one too, or return when another has given up first."""
        end = time.monotonic() + _BEATS_S
        with suppress(RuntimeError, PeerTimeout):
            while time.monotonic() < end and self._waiter.failure is None:
                self._beat(awaited)
                self.read()
                time.sleep(_BEATS_S / 10)

    def _awaited(self) -> int | None:
        if (inside := self._inside.waiting) is not None:
            return self._first + inside[1]
        return None if self._waiter.waiting is None else self._waiter.waiting[1]

    def _beat(self, awaited: int) -> None:
        self._count += 1
        self._set(f"waiting {self._waiter.rank}", json.dumps((awaited, self._count)).encode(), _ANSWER_S)

    def _set(self, key: str, record: bytes, timeout_s: float) -> None:
        self._store.ask("set", key, self._store.address.seal(key, record), timeout_s=timeout_s)

    def _get(self, key: str, what: str) -> bytes | None:
        """Return a record; None where there is none."""
        if not self._store.ask("check", [key], timeout_s=_ANSWER_S):
            return None
        record: bytes = self._store.address.opened(key, self._store.ask("get", key, timeout_s=_ANSWER_S), what)
        return record


# A rank of a world


def last_of_chain(first: int, beat_of: Callable[[int], Beat | None], pause: Callable[[], None]) -> int:
    """Follow the beats from a rank to the one that does not wait, or that has stopped in its wait.

    >>> beats = {1: iter([(2, 7), (2, 9)]), 2: iter([(3, 4), (3, 4)])}  # rank 2 does not beat any more
    >>> last_of_chain(1, lambda rank: next(beats[rank]) if rank in beats else None, lambda: None)
    2
    """
    chain: list[int] = [first]
    before: dict[int, Beat] = {}
    while (beat := beat_of(chain[-1])) is not None and beat[0] not in chain:
        before[chain[-1]] = beat
        chain.append(beat[0])
    if before:
        pause()
    for rank in chain:
        if rank not in before or (beat_of(rank) or before[rank]) == before[rank]:
            return rank
    return chain[-1]


class Farewells:
    """The part of one rank's world that tells and is told. It refers to no world."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = self._stops = waiter
        self._bell: Bell | None = None
        self._outer: tuple[weakref.ref[Farewells], Sequence[int]] | None = None
        self._domain: Farewells | None = None
        self.stored: StoredFarewell | None = None
        """Farewell and beats for ranks of other domains."""
        self.closing = False
        """Whether this rank has begun to close its world. It gives nothing up then."""

    @property
    def inside(self) -> bool:
        """Whether this is the world of a domain, whose ranks tell and hear by the numbers of the whole world."""
        return self._outer is not None

    def span(self, domain: Farewells, ranks: Sequence[int]) -> None:
        """Take the bells of a domain, before it listens. Its ranks, here `ranks`, tell and hear through this world."""
        domain._outer = weakref.ref(self), ranks
        domain._stops, self._domain = self._waiter, domain

    def listen(self, heap: Heap, size: int) -> None:
        if size > 1:
            self._bell = Bell(heap, size, self._stops)
            self._waiter.beat = self._bell.beat

    def give_up(self, error: E) -> E | RaymoeError:
        """Tell the other ranks, stop this one, and return the error to raise.

        An `Aborted` of this rank alone is not told: others may go on.
        """
        if self.closing:
            return error
        if self._outer is not None:
            self._give_up_outside(error)
            return error
        failure = self._waiter.failure
        if failure is None:
            if isinstance(error, Aborted):
                return error
            cause: E | RaymoeError = self._traced(error) if isinstance(error, PeerTimeout) else error
            failure = self._waiter.failure  # a peer may have told this rank meanwhile
        if failure is None:
            self._tell(cause)
            return cause
        self._ring(failure)  # where this rank has read it in the store
        return copy.copy(failure) if isinstance(error, Aborted | PeerTimeout) else error

    def close(self) -> None:
        self._waiter.beat = None
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()

    def _tell(self, error: BaseException) -> None:
        farewell = Farewell.of(error, self._waiter.rank)
        if self.stored is None or isinstance(error, PeerTimeout):  # else the rail publishes it
            self._ring(error)
            if self.stored is not None:
                self.stored.tell(farewell)
            # A copy drops the traceback, which refers to exchanges and channels.
            self._waiter.stop(copy.copy(farewell.error_on(self._waiter.rank)))

    def _ring(self, error: BaseException) -> None:
        bell = self._bell if self._domain is None else self._domain._bell
        if bell is not None:
            bell.ring(Farewell.of(error, self._waiter.rank))

    def _traced(self, error: PeerTimeout) -> PeerTimeout:
        """Name the rank at the end of the chain of waits that begins with the awaited rank."""
        beats: Bell | StoredFarewell | None = self.stored or self._bell
        if beats is None:
            return error
        culprit = last_of_chain(error.peer, beats.beat_of, lambda: beats.pause(error.peer))
        if culprit in (error.peer, self._waiter.rank):
            return error
        return replace(error, peer=culprit, through=error.peer)

    def _give_up_outside(self, error: BaseException) -> None:
        """Name ranks by their numbers in the outer world, and give up there."""
        assert self._outer is not None
        outer, ranks = self._outer[0](), self._outer[1]
        if isinstance(error, PeerTimeout) and error.told_by < 0:
            error = replace(error, peer=ranks[error.peer], rank=ranks[error.rank])
        if outer is not None:
            outer.give_up(error)
