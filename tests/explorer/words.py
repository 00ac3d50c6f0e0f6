"""The way of many tokens: rows go into slots, and words say that they are there. Of dispatch.cu, alltoallv.cu and
combine.cu."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.fault import Fault
from tests.explorer.kernel import Kernel, Roles
from tests.explorer.steps import EVER, Act, Step

YOUNGER = 1  # rows of a lane whose stores may be under way while the ones before are announced


class WordKernel(Kernel):
    """A launch that announces what it stores by words."""

    def roles(self) -> Roles:
        roles: Roles = {}
        if self.launch.sends and self.speaks():
            for sender in range(self.case.senders):
                self._add_sender(roles, sender)
        if self.launch.tells and self.speaks():
            self._add_tellers(roles)
        if self.launch.receives:
            role = "placer" if self.launch.kind == "dispatch" else "summer"
            for peer in self.peers:
                roles[f"{role} of {peer}"] = list(self._reader(peer))
            if self.case.own == "copied" and self.launch.kind == "dispatch":
                roles["placer of own rows"] = list(self._own_placer(self.first + len(roles)))
        roles["out"] = list(self._out(len(roles)))
        return roles

    # ---- what sends --------------------------------------------------------------------------------------------------

    def _add_sender(self, roles: Roles, sender: int) -> None:
        """The lanes of a block, and what says behind one fence that all of them are done."""
        first = self.first + len(roles)
        of = tuple(range(first, first + self.case.lanes))
        alone = len(of) == 1
        for lane, thread in enumerate(of, start=sender * self.case.lanes):
            steps = self.abstaining(self._pushes(lane, thread))
            if alone or (thread == first and self.faulty(Fault.LANES_APART)):
                steps += self._released((thread,), EVER, self.said_done(sender))
            roles[f"lane {lane}"] = steps
        if not alone and not self.faulty(Fault.LANES_APART):
            roles[f"sender {sender}"] = [Step(Act.JOIN, of=of), *self._released(of, EVER, self.said_done(sender))]

    def _pushes(self, lane: int, thread: int) -> list[Step]:
        """Rows that no other lane takes. The word of a row follows when YOUNGER more have been pushed."""
        ahead = 1 + (self.case.timeouts and self.case.late) + len(self.abstaining([]))  # ENTER, DARE, ABSTAIN
        steps: list[Step] = []
        begins = []  # the step at which each row's stores begin
        for token in range(self.case.tokens):
            begins.append(len(steps) + ahead)
            pushed = [self.store("row", peer, token) for peer in self.peers if token in self.rows(self.rank, peer)]
            steps += self._guarded(Act.TAKE, lane, token, pushed)
            if token >= YOUNGER:
                steps += self._said(lane, token - YOUNGER, thread, begins[token - YOUNGER + 1])
        for token in range(max(0, self.case.tokens - YOUNGER), self.case.tokens):
            steps += self._said(lane, token, thread, EVER)
        return steps

    def _said(self, lane: int, token: int, thread: int, before: int) -> list[Step]:
        """The words of a row; with stages it has none of its own."""
        if self.launch.way == "stages":
            return []
        to = [peer for peer in self.peers if token in self.rows(self.rank, peer)]
        at = [self.memory[self.launch.kind, "arrived", peer, self.rank, token] for peer in to]
        words = [Step(Act.WORD, each, scale=1) for each in at]
        return self._guarded(Act.HOLD, lane, token, self._released((thread,), before, words) if words else [])

    def _guarded(self, act: Act, lane: int, token: int, steps: list[Step]) -> list[Step]:
        """What one lane does, of all that could. Lanes of a staged dispatch know their rows beforehand."""
        lanes = self.case.senders * self.case.lanes
        if lanes == 1 or not steps:
            return steps
        if self.launch.way == "stages":
            return steps if token % lanes == lane else []
        at = self.memory["taken", self.rank, self.launch.kind, token]
        return [Step(act, at, value=lane + 1, skips=len(steps)), *steps]

    def _released(self, of: tuple[int, ...], before: int, words: list[Step]) -> list[Step]:
        """Words behind what threads `of` have stored before a step."""
        drain = Step(Act.DRAIN, of=of, value=before)
        return [*words, drain] if self.faulty(Fault.ROWS_AFTER_WORD) else [drain, *words]

    def said_done(self, sender: int) -> list[Step]:
        at = [self.memory[self.launch.kind, "done", peer, self.rank, sender] for peer in self.listeners()]
        return [Step(Act.WORD, each, scale=1) for each in at]

    # ---- what tells --------------------------------------------------------------------------------------------------

    def _add_tellers(self, roles: Roles) -> None:
        """Routers of a dispatch; in a combine the one thread that tells why its rank refuses the data, if it does."""
        tellers = tuple(self.first + len(roles) + each for each in range(self._parts()))
        name = "router" if self.launch.kind == "dispatch" else "teller"
        for number in range(len(tellers)):
            told = [self.store("told", peer, number) for peer in self.peers]
            roles[f"{name} {number}"] = told if self.launch.kind == "dispatch" else [self.saying(each) for each in told]
        heads = [
            Step(Act.WORD, self.memory[self.launch.kind, "head", peer, self.rank], scale=1) for peer in self.listeners()
        ]
        released = tellers[:1] if self.faulty(Fault.RELAXED_TICKET) else tellers
        drain = Step(Act.DRAIN, of=released, value=EVER)
        last = [*heads, drain] if self.faulty(Fault.HEAD_BEFORE_COUNTS) else [drain, *heads]
        roles[f"last {name}"] = [Step(Act.JOIN, of=tellers), *last]

    def _parts(self) -> int:
        """Of what is told beside the rows."""
        if self.launch.kind == "dispatch":
            return self.case.routers
        return 1 if self.case.routers or self.case.refused or self.case.mixed else 0

    # ---- what waits and reads ----------------------------------------------------------------------------------------

    def _unheard(self, peer: int) -> bool:
        return peer == self.rank and self.faulty(Fault.OWN_UNHEARD)

    def heads(self) -> list[Step]:
        at = [self.memory[self.launch.kind, "head", self.rank, peer] for peer in self.awaited()]
        return [Step(Act.WAIT, each, scale=1) for each in at]

    def _reader(self, peer: int) -> Iterator[Step]:
        yield from self.heads()
        if self.launch.kind == "combine":
            yield from self._statuses()
        elif peer in self.awaited():
            yield from (self.read("told", [peer], number) for number in range(self._parts()))
            if self.refuses() or self.case.layout == "rank":
                return  # what does not fit is not placed, and with layout rank nothing is
        staged = self.launch.way in ("stages", "blocks") and self.launch.kind == "dispatch"
        if staged:
            yield from self.last_words()
        for token in self.rows(peer, self.rank):
            if not staged and not self._unheard(peer):
                at = self.memory[self.launch.kind, "arrived", self.rank, peer, token]
                yield Step(Act.WAIT, at, scale=1)
            yield self.row(peer, token)

    def row(self, peer: int, token: int) -> Step:
        return self.read("row", [peer], token)

    def _statuses(self, skips: int = EVER) -> Iterator[Step]:
        if self._parts():
            yield self.heeding(self.read("told", self.heard(), 0), skips)

    def _own_placer(self, thread: int) -> Iterator[Step]:
        """With layout rank: the rows of this rank itself into their slots."""
        yield from self.heads()
        if not self.refuses():
            yield from (self.store("row", self.rank, token) for token in self.rows(self.rank, self.rank))
        if not self.faulty(Fault.OWN_UNAWAITED):
            yield Step(Act.DRAIN, of=(thread,), value=EVER)

    def _out(self, others: int) -> Iterator[Step]:
        join = Step(Act.JOIN, of=tuple(range(self.first, self.first + others)))
        epoch = Step(Act.EPOCH, self.memory["epoch", self.rank, self.launch.kind])
        if self.faulty(Fault.EPOCH_BY_FIRST_OUT):
            yield epoch
        yield join
        if self.launch.receives:
            if self.launch.kind == "combine":
                yield from self.heads()
                yield from self._statuses(skips=0)
            if self.launch.kind == "combine" or not self.faulty(Fault.NO_LAST_WORDS):
                yield from self.last_words()
            if self.launch.kind == "combine" and self.faulty(Fault.REFUSAL_UNCOUNTED):
                yield from self._statuses()
        stores = self.launch.sends if self.faulty(Fault.EPOCH_BY_SEND) else self.launch.receives
        if stores and not self.faulty(Fault.EPOCH_BY_FIRST_OUT):
            yield epoch

    def last_words(self) -> Iterator[Step]:
        """That all senders of all ranks have nothing more to send; of a block there is one."""
        senders = 1 if self.launch.way == "blocks" or self.faulty(Fault.SENDERS_UNHEARD) else self.case.senders
        for peer in self.awaited():
            for sender in range(0 if self._unheard(peer) else senders):
                yield Step(Act.WAIT, self.memory[self.launch.kind, "done", self.rank, peer, sender], scale=1)
