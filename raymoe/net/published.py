"""Numbers between domains: a rank that waits for its rail publishes how far it is in the world's store.

Ranks of a rail share no memory. A rank writes its number and reads those of its peers only in a long wait, so short
waits do not use the store. A rank that leaves an operation because of an error publishes the reason, and every rank in
a long wait reads it (`raymoe.memory.giving_up`).

The store has a key `entered by r`, beside those of rounds (`raymoe.memory.across`): the number of the last operation
that rank r has waited long for. It only grows. The record follows a MAC.
"""

from __future__ import annotations

import time
from typing import Any

from raymoe.memory.bell import Farewell
from raymoe.memory.world import SpanningWorld

_EVERY_S = 0.2  # how often a rank that waits asks the store: its questions share the link with the rows
_ANSWER_S = 1.0  # the limit of one question. A wait ends late by as much where rank 0 does not answer


class PublishedNumbers:
    """The numbers of operations that ranks publish while they wait, and the reason of a rank that failed."""

    def __init__(self, world: SpanningWorld) -> None:
        self._me, self._domains = world.domain_index, world.domains
        self._per_domain, self._place = world.domain.size, world.place
        self._store, self._farewell = world.store, world.farewell
        self._number, self._late, self._ask_at = 0, (0, 0), 0.0
        """The number that `lagging` was called with last, its answer, and the time of the next question."""
        self._seen = [0] * world.domains
        """The largest number of each peer so far. Another program may put an older record of a peer into the store."""

    def enter(self, number: int) -> None:
        """Publish nothing yet: most waits end in their first slice."""

    def lagging(self, number: int) -> tuple[int, int]:
        """Return the first peer, by its rank, that has not entered this operation, else the next peer; its number.

        Raises the reason of a rank that has failed, and `WiringError` for a record that no rank has written.
        """
        peers = [(self._me + step) % self._domains for step in range(1, self._domains)]
        if self._number < number:  # the question before the first slice
            self._number, self._ask_at = number, 0.0
            return self._rank(peers[0]), number - 1
        if time.monotonic() >= self._ask_at:
            self._late = self._first_late(peers, number)
            self._ask_at = time.monotonic() + _EVERY_S
        return self._late

    def fail(self, reason: str) -> None:
        """Publish why this rank leaves its operation. Best effort: without it the others wait until their deadlines."""
        self._farewell.tell(Farewell(reason))

    def check_failed(self) -> None:
        """Raise the reason of a rank that has failed. Asks the store now and then only."""
        self._farewell.check()

    def _first_late(self, peers: list[int], number: int) -> tuple[int, int]:
        if self._store.busy:
            return self._unanswered(peers)
        try:
            self._set(self._key(self._me), str(number))
            self._farewell.read()
            for peer in peers:
                entered = self._get(self._key(peer), f"the number of operations of rank {self._rank(peer)}")
                self._seen[peer] = max(self._seen[peer], int(entered or 0))
        except RuntimeError:
            return self._unanswered(peers)
        peer = next((peer for peer in peers if self._seen[peer] < number), peers[0])
        return self._rank(peer), self._seen[peer]

    def _unanswered(self, peers: list[int]) -> tuple[int, int]:
        """Return rank 0, which serves the store: it is gone or stopped, or its link is slow. Rank 0, on a machine that
        is too busy, returns its next peer."""
        return (0 if self._rank(self._me) else self._rank(peers[0])), 0

    def _set(self, key: str, record: str) -> None:
        self._ask("set", key, self._store.address.seal(key, record.encode()))

    def _get(self, key: str, what: str) -> str | None:
        """Return a record; None where there is none."""
        if not self._ask("check", [key]):
            return None
        return self._store.address.opened(key, self._ask("get", key), what).decode()

    def _ask(self, method: str, *arguments: object) -> Any:
        return self._store.ask(method, *arguments, timeout_s=_ANSWER_S)

    def _key(self, domain: int) -> str:
        return f"entered by {self._rank(domain)}"

    def _rank(self, domain: int) -> int:
        return domain * self._per_domain + self._place
