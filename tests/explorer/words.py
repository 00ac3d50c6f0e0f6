"""The path with words: rows go into slots, and words announce them (dispatch.cu, alltoallv.cu, combine.cu)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.fault import Fault
from tests.explorer.kernel import Kernel, Roles
from tests.explorer.steps import MAX_STEPS, Act, Step

YOUNGER = 1  # rows of a warp whose stores may be in flight while earlier rows are announced


class WordKernel(Kernel):
    """A launch that announces its stores by words."""

    def roles(self) -> Roles:
        roles: Roles = {}
        if self.launch.sends and self.sends_words():
            for sender in range(self.case.senders):
                self._add_sender(roles, sender)
        if self.launch.sends_metadata and self.sends_words():
            self._add_metadata_senders(roles)
        if self.launch.receives:
            role = "placement block" if self.launch.kind == "dispatch" else "final reduction"
            for peer in self.peers:
                roles[f"{role} of {peer}"] = list(self._reader(peer))
            if self.launch.beside:
                roles["final reduction of own rows"] = list(self._own_pieces())
            if self.has_own_placement_block():
                roles["placement block of own rows"] = list(self.own_placement_block(self.first + len(roles)))
        if self.launch.beside:
            senders = [self.first + at for at, role in enumerate(roles) if role.startswith("sender warp")]
            roles["product"] = list(self._product(self.first + len(roles)))
            if self.has_fault(Fault.PRODUCT_AWAITS_COMBINE):
                roles["product"].append(Step(Act.JOIN, operands=tuple(senders)))
        roles["out"] = list(self._out(len(roles)))
        return roles

    # ---- senders -----------------------------------------------------------------------------------------------------

    def _add_sender(self, roles: Roles, sender: int) -> None:
        """Add the warps of a block, and the thread that stores its done words after one fence."""
        first = self.first + len(roles)
        of = tuple(range(first, first + self.case.warps))
        alone = len(of) == 1
        for warp, thread in enumerate(of, start=sender * self.case.warps):
            steps = self.unless_refused(self._pushes(warp, thread))
            if alone or (thread == first and self.has_fault(Fault.WARPS_APART)):
                steps += self._after_drain((thread,), MAX_STEPS, self.done_words(sender))
            roles[f"sender warp {warp}"] = steps
        if not alone and not self.has_fault(Fault.WARPS_APART):
            roles[f"sender {sender}"] = [
                Step(Act.JOIN, operands=of),
                *self._after_drain(of, MAX_STEPS, self.done_words(sender)),
            ]

    def _pushes(self, warp: int, thread: int) -> list[Step]:
        """Push the rows that no other warp takes.

        A row's word follows after YOUNGER more rows, or before the warp waits for the next chunk of x.
        """
        ahead = (
            1 + (self.case.timeouts and self.case.late) + len(self.unless_refused([]))
        )  # ENTER, MAY_FAIL, SKIP_IF_REFUSED
        steps: list[Step] = []
        begins = []  # the first step of each row's stores
        announced, from_x = 0, self.reads_of_x()
        for token in range(self.case.tokens):
            if self.launch.crossing and token % self.case.chunk == 0:
                for earlier in range(announced, token):
                    steps += self._row_words(warp, earlier, thread, MAX_STEPS)
                announced = token
            begins.append(self._length(steps) + ahead)
            pushed = [self.store("row", peer, token) for peer in self.peers if token in self.rows(self.rank, peer)]
            row = [*from_x[token], *pushed] if pushed else []
            steps += self._only_one_warp(Act.TAKE_ROW, warp, token, row)
            if token >= announced + YOUNGER:
                steps += self._row_words(warp, announced, thread, begins[announced + 1])
                announced += 1
        for token in range(announced, self.case.tokens):
            steps += self._row_words(warp, token, thread, MAX_STEPS)
        return steps

    def reads_of_x(self) -> list[list[Step]]:
        """For each token, the steps in which its row is awaited and read; none where all rows are there."""
        if self.launch.beside:
            return [self._read_of_piece(token) for token in range(self.case.tokens)]
        return [[] for _ in range(self.case.tokens)]

    # ---- a combine beside the product of its rows --------------------------------------------------------------------

    def _product(self, thread: int) -> Iterator[Step]:
        """Store the pieces of the rows, and after each its word: the dispatch's number. Refused rows have no tile.

        A token stands for a piece of columns here: each has rows of its own, which leave in their order.
        """
        for token in range(0 if self.refuses() else self.case.tokens):
            store = Step(Act.STORE, self.memory["place", self.rank, token], value=self.launch.dispatch)
            word = Step(Act.STORE_WORD, self.memory["ready", self.rank, token], value=self.launch.dispatch)
            drain = Step(Act.DRAIN, operands=(thread,), value=MAX_STEPS)
            yield from (store, word, drain) if self.has_fault(Fault.PIECE_BEFORE_ROWS) else (store, drain, word)

    def _read_of_piece(self, token: int) -> list[Step]:
        """Wait for a piece, and read it."""
        piece = 0 if self.has_fault(Fault.FIRST_PIECE_ONLY) else token
        number = 1 if self.has_fault(Fault.PIECE_OF_ANY_STEP) else self.launch.dispatch
        read = Step(Act.READ, value=self.launch.dispatch, operands=(self.memory["place", self.rank, token],))
        wait = Step(Act.WAIT, self.memory["ready", self.rank, piece], value=number)
        return [read] if self.has_fault(Fault.PIECE_UNHEARD) else [wait, read]

    def _own_pieces(self) -> Iterator[Step]:
        yield from self.heads()
        yield from self._statuses()
        for token in range(0 if self.refuses() else self.case.tokens):
            yield from self._read_of_piece(token)

    # ---- senders, continued ------------------------------------------------------------------------------------------

    def _length(self, steps: list[Step]) -> int:
        """The number of steps with the points at which waits may fail."""
        return len(steps) + self.case.timeouts * sum(step.act is Act.WAIT for step in steps)

    def _row_words(self, warp: int, token: int, thread: int, until: int) -> list[Step]:
        """The words of a row; with stages there are none."""
        if self.launch.path == "stages":
            return []
        to = [peer for peer in self.peers if token in self.rows(self.rank, peer)]
        at = [self.memory[self.launch.kind, "arrived", peer, self.rank, token] for peer in to]
        words = [Step(Act.STORE_WORD, each, scale=1) for each in at]
        return self._only_one_warp(
            Act.SKIP_UNLESS_TAKEN, warp, token, self._after_drain((thread,), until, words) if words else []
        )

    def _only_one_warp(self, act: Act, warp: int, token: int, steps: list[Step]) -> list[Step]:
        """Steps that only one of the warps does. Warps of a staged dispatch know their rows beforehand."""
        warps = self.case.senders * self.case.warps
        if warps == 1 or not steps:
            return steps
        if self.launch.path == "stages":
            return steps if token % warps == warp else []
        at = self.memory["taken", self.rank, self.launch.kind, token]
        return [Step(act, at, value=warp + 1, skips=self._length(steps)), *steps]

    def _after_drain(self, of: tuple[int, ...], until: int, words: list[Step]) -> list[Step]:
        """Words after a drain of the stores that threads `of` make before their step `until`."""
        drain = Step(Act.DRAIN, operands=of, value=until)
        return [*words, drain] if self.has_fault(Fault.ROWS_AFTER_WORD) else [drain, *words]

    def done_words(self, sender: int) -> list[Step]:
        at = [self.memory[self.launch.kind, "done", peer, self.rank, sender] for peer in self.word_receivers()]
        return [Step(Act.STORE_WORD, each, scale=1) for each in at]

    # ---- metadata ----------------------------------------------------------------------------------------------------

    def _add_metadata_senders(self, roles: Roles) -> None:
        """Add the counting blocks of a dispatch, or the one thread of a combine that sends its rank's status."""
        senders = tuple(self.first + len(roles) + each for each in range(self._parts()))
        name = "counting block" if self.launch.kind == "dispatch" else "status sender"
        for number in range(len(senders)):
            published = [self.store("published", peer, number) for peer in self.peers]
            roles[f"{name} {number}"] = (
                published if self.launch.kind == "dispatch" else [self.with_refusal(each) for each in published]
            )
        heads = [
            Step(Act.STORE_WORD, self.memory[self.launch.kind, "head", peer, self.rank], scale=1)
            for peer in self.word_receivers()
        ]
        released = senders[:1] if self.has_fault(Fault.RELAXED_TICKET) else senders
        drain = Step(Act.DRAIN, operands=released, value=MAX_STEPS)
        last = [*heads, drain] if self.has_fault(Fault.HEAD_BEFORE_COUNTS) else [drain, *heads]
        roles[f"last {name}"] = [Step(Act.JOIN, operands=senders), *last]

    def _parts(self) -> int:
        """The number of messages of metadata."""
        if self.launch.kind == "dispatch":
            return min(self.case.counting_blocks, 1) if self.launch.known else self.case.counting_blocks
        return 1 if self.case.counting_blocks or self.case.refused or self.case.mixed else 0

    # ---- readers -----------------------------------------------------------------------------------------------------

    def _not_awaited(self, peer: int) -> bool:
        return peer == self.rank and self.has_fault(Fault.OWN_UNHEARD)

    def heads(self) -> list[Step]:
        at = [self.memory[self.launch.kind, "head", self.rank, peer] for peer in self.awaited_peers()]
        return [Step(Act.WAIT, each, scale=1) for each in at]

    def _reader(self, peer: int) -> Iterator[Step]:
        yield from self.heads()
        if self.launch.known:
            yield from self._passes()
            if self.refuses():
                return  # no row has a place
        if self.launch.kind == "combine":
            yield from self._statuses()
        elif not self.launch.known and peer in self.awaited_peers():
            yield from (self.read("published", [peer], number) for number in range(self._parts()))
            if self.refuses() or self.case.layout == "rank":
                return  # rows that do not fit are not placed; with layout rank no rows are
        staged = self.launch.path in ("stages", "blocks") and self.launch.kind == "dispatch"
        if staged:
            yield from self.await_done_words()
        for token in self.rows(peer, self.rank):
            if not staged and not self._not_awaited(peer):
                at = self.memory[self.launch.kind, "arrived", self.rank, peer, token]
                yield Step(Act.WAIT, at, scale=1)
            yield self.row(peer, token)

    def row(self, peer: int, token: int) -> Step:
        return self.read("row", [peer], token)

    def _statuses(self, skips: int = MAX_STEPS) -> Iterator[Step]:
        if self._parts():
            yield self.as_statuses(self.read("published", self.status_ranks(), 0), skips)

    def _passes(self) -> Iterator[Step]:
        """With known routing: read to which dispatch each rank's rows belong."""
        if self._parts():
            yield self.read("published", self.awaited_peers(), 0)

    def has_own_placement_block(self) -> bool:
        return self.case.own == "copied" and self.launch.kind == "dispatch" and not self.launch.known

    def own_placement_block(self, thread: int) -> Iterator[Step]:
        """With layout rank: copy this rank's own rows into their slots."""
        yield from self.heads()
        if not self.refuses():
            yield from (self.store("row", self.rank, token) for token in self.rows(self.rank, self.rank))
        if not self.has_fault(Fault.OWN_UNAWAITED):
            yield Step(Act.DRAIN, operands=(thread,), value=MAX_STEPS)

    def _out(self, count: int) -> Iterator[Step]:
        join = Step(Act.JOIN, operands=tuple(range(self.first, self.first + count)))
        epoch = Step(Act.STORE_EPOCH, self.memory["epoch", self.rank, self.launch.kind])
        if self.has_fault(Fault.EPOCH_BY_FIRST_OUT):
            yield epoch
        yield join
        if self.launch.receives:
            if self.launch.kind == "combine":
                yield from self.heads()
                yield from self._statuses(skips=0)
            if self.launch.known:
                yield from self._passes()
            if self.launch.kind == "combine" or not self.has_fault(Fault.NO_LAST_WORDS):
                yield from self.await_done_words()
            if self.launch.kind == "combine" and self.has_fault(Fault.REFUSAL_UNCOUNTED):
                yield from self._statuses()
        yield from self.last_steps()
        stores = self.launch.sends if self.has_fault(Fault.EPOCH_BY_SEND) else self.launch.receives
        if stores and not self.has_fault(Fault.EPOCH_BY_FIRST_OUT):
            yield epoch

    def last_steps(self) -> Iterator[Step]:
        """The steps of the last block out before it stores the epoch."""
        yield from ()

    def await_done_words(self) -> Iterator[Step]:
        """Wait for the done words of all senders of all ranks; blocks have one sender."""
        senders = 1 if self.launch.path == "blocks" or self.has_fault(Fault.SENDERS_UNHEARD) else self.case.senders
        for peer in self.awaited_peers():
            for sender in range(0 if self._not_awaited(peer) else senders):
                yield Step(Act.WAIT, self.memory[self.launch.kind, "done", self.rank, peer, sender], scale=1)
