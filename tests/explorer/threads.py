"""The protocol, as the steps of every thread that takes part.

A thread stands for blocks of a kernel that do one thing: a lane that sends rows, a router, a placer, the last block on
its way out. `docs/protocol.md` is the same in words; the kernels are what both describe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tests.explorer.case import Case, Fault, Launch

SCALE = 8  # a lane's word is epoch * SCALE + tokens done
ALL_DONE = SCALE - 1
YOUNGER = 1  # tokens whose stores may be under way while the ones before are announced
EVER = 255  # no thread has so many steps


class Act(IntEnum):
    ENTER = 0  # wait for the stream, look at the poison, read the epoch
    STORE = 1  # a store into a slot sets out; it lands at any time
    DRAIN = 2  # until the stores that threads `of` made before their step `value` have landed
    WORD = 3  # a store into a word sets out
    WAIT = 4  # until a word is at least `value`
    READ = 5  # a slot, which must be of this operation
    USE = 6  # the same by a kernel of the user's: the half is that of the dispatch it belongs to
    JOIN = 7  # until threads `of` have ended: the ticket
    EPOCH = 8  # store the epoch
    DARE = 9  # fail, or go on for good


class Step(NamedTuple):
    act: Act
    at: int = 0  # place in memory; of the even half, for a slot
    stride: int = 0  # from the even half to the odd one
    value: int = 0
    scale: int = 0  # what the epoch adds to `value`
    of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Thread:
    rank: int
    place: int  # of its launch in the program
    role: str
    steps: tuple[Step, ...]


class Memory:
    """Names of all places: slots first, then words that cross ranks, then words of a rank's own."""

    def __init__(self, case: Case) -> None:
        ranks, lanes = range(case.ranks), range(case.senders * case.lanes)
        both = [(owner, writer) for owner in ranks for writer in ranks if owner != writer]
        single = case.fault is Fault.SINGLE_BUFFER
        self.names: list[str] = []
        self._index: dict[tuple[object, ...], int] = {}
        for kind in ("dispatch", "combine"):
            for owner, writer in both:
                parts = [("row", token) for token in range(case.tokens)]
                parts += [("told", router) for router in range(case.routers)]
                for part, number in parts:
                    for half in (0, 1):
                        key = (kind, part, owner, writer, number, half)
                        name = f"{kind} {part} {number} of rank {writer} at rank {owner}, half {half}"
                        self._index[key] = self._index[(*key[:-1], 0)] if single and half else self._add(name)
        self.words_from = len(self.names)
        for kind in ("dispatch", "combine"):
            for owner, writer in both:
                self._index[kind, "head", owner, writer] = self._add(f"{kind} head of rank {writer} at rank {owner}")
                for lane in lanes:
                    name = f"{kind} word of rank {writer}, lane {lane}, at rank {owner}"
                    self._index[kind, owner, writer, lane] = self._add(name)
        for rank in ranks:
            for kind in ("dispatch", "combine"):
                shared = case.fault is Fault.SHARED_EPOCH and kind == "combine"
                epoch = self._index["epoch", rank, "dispatch"] if shared else self._add(f"{kind} epoch of rank {rank}")
                self._index["epoch", rank, kind] = epoch
            for what in ("oldest", "failed", "poison"):
                self._index[what, rank] = self._add(f"{what} of rank {rank}")
            for launch in case.launches():
                if launch.kind == "dispatch" and launch.receives:
                    self._index["used", rank, launch.number] = self._add(f"half of dispatch {launch.number}")

    def _add(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def __getitem__(self, key: tuple[object, ...]) -> int:
        return self._index[key]

    def slot(self, *key: object) -> tuple[int, int]:
        """Where the even half is, and how far the odd one is from it."""
        return self._index[(*key, 0)], self._index[(*key, 1)] - self._index[(*key, 0)]


class Kernel:
    """The threads of one launch on one rank; `first` is the number of the first."""

    def __init__(self, case: Case, memory: Memory, launch: Launch, rank: int, first: int) -> None:
        self.case, self.memory, self.launch, self.rank, self.first = case, memory, launch, rank, first
        self.peers = [peer for peer in range(case.ranks) if peer != rank]
        self.routing = case.routing(launch.dispatch) if launch.dispatch else ()
        # Number of the operation: what a slot must hold. It is known to the model alone; kernels know epochs.
        self.tag = launch.number

    def roles(self) -> dict[str, tuple[Step, ...]]:
        if self.launch.kind == "other":
            return {"other": (Step(Act.ENTER),)}
        if self.launch.kind == "use":
            return {"use": (Step(Act.ENTER), *self._uses())}
        roles: dict[str, list[Step]] = {}
        if self.launch.sends:
            for sender in range(self.case.senders):
                self._add_sender(roles, sender)
            self._add_tellers(roles)
        if self.launch.receives:
            role = "placer" if self.launch.kind == "dispatch" else "summer"
            for peer in self.peers:
                roles[f"{role} of {peer}"] = list(self._reader(peer))
        roles["out"] = list(self._out(len(roles)))
        return {name: (Step(Act.ENTER), *self._dared(steps)) for name, steps in roles.items()}

    def _dared(self, steps: list[Step]) -> Iterator[Step]:
        """With the places at which a thread may fail: before each wait and, where it begins late, at once."""
        for number, step in enumerate(steps):
            begins = number == 0 and not (step.act is Act.JOIN and step.of)  # who joins others has begun with them
            if self.case.timeouts and (step.act is Act.WAIT or (begins and self.case.late)):
                yield Step(Act.DARE)
            yield step

    def rows(self, sender: int, receiver: int) -> list[int]:
        """Tokens whose rows `sender` stores at `receiver`; a combined row goes back to where its token came from."""
        source, other = (sender, receiver) if self.launch.kind == "dispatch" else (receiver, sender)
        return [token for token, to in enumerate(self.routing[source]) if other in to]

    def _faulty(self, *faults: Fault) -> bool:
        return self.case.fault in faults

    def _listeners(self) -> list[int]:
        silent = self._faulty(Fault.SILENT, Fault.SILENT_UNAWAITED)
        return [peer for peer in self.peers if not silent or self.rows(self.rank, peer)]

    def _store(self, part: str, peer: int, number: int) -> Step:
        at, stride = self.memory.slot(self.launch.kind, part, peer, self.rank, number)
        return Step(Act.STORE, at, stride, self.tag)

    def _read(self, part: str, peer: int, number: int, act: Act = Act.READ) -> Step:
        kind = "dispatch" if act is Act.USE else self.launch.kind
        at, stride = self.memory.slot(kind, part, self.rank, peer, number)
        return Step(act, at, stride, self.launch.dispatch if act is Act.USE else self.tag)

    def _words(self, lane: int, done: int) -> list[Step]:
        at = [self.memory[self.launch.kind, peer, self.rank, lane] for peer in self._listeners()]
        return [Step(Act.WORD, each, value=done, scale=SCALE) for each in at]

    def _add_sender(self, roles: dict[str, list[Step]], sender: int) -> None:
        """The lanes of a block, and what says behind one fence that all of them are done."""
        lanes = tuple(range(sender * self.case.lanes, (sender + 1) * self.case.lanes))
        of = tuple(self.first + len(roles) + each for each in range(len(lanes)))
        early = self._faulty(Fault.ROWS_AFTER_WORD)
        alone = len(lanes) == 1 or self._faulty(Fault.LANES_APART)
        for lane, thread in zip(lanes, of, strict=True):
            drain = Step(Act.DRAIN, of=(thread,), value=EVER)
            last = self._released(drain, self._words(lane, ALL_DONE), early) if alone else [] if early else [drain]
            roles[f"lane {lane}"] = self._pushes(lane, thread) + last
        if not alone:
            words = [word for lane in lanes for word in self._words(lane, ALL_DONE)]
            drain = Step(Act.DRAIN, of=of, value=EVER)
            roles[f"sender {sender}"] = [Step(Act.JOIN, of=of), *self._released(drain, words, early)]

    def _pushes(self, lane: int, thread: int) -> list[Step]:
        early = self._faulty(Fault.ROWS_AFTER_WORD)
        steps: list[Step] = []
        begins = []  # the step at which each token's stores begin
        for done, token in enumerate(range(lane, self.case.tokens, self._lanes())):
            begins.append(len(steps) + 1 + (self.case.timeouts and self.case.late))  # behind ENTER and DARE
            steps += [self._store("row", peer, token) for peer in self.peers if token in self.rows(self.rank, peer)]
            if done >= YOUNGER:
                before = begins[done - YOUNGER + 1]
                steps += self._released(Step(Act.DRAIN, of=(thread,), value=before), self._words(lane, done), early)
        return steps

    def _lanes(self) -> int:
        return self.case.senders * self.case.lanes

    def _released(self, drain: Step, words: list[Step], early: bool) -> list[Step]:
        return [*words, drain] if early else [drain, *words]

    def _add_tellers(self, roles: dict[str, list[Step]]) -> None:
        """Routers of a dispatch; in a combine the one thread that tells why its rank refuses the data, if it does."""
        tellers = tuple(self.first + len(roles) + each for each in range(self._parts()))
        name = "router" if self.launch.kind == "dispatch" else "teller"
        for number in range(len(tellers)):
            roles[f"{name} {number}"] = [self._store("told", peer, number) for peer in self.peers]
        heads = [
            Step(Act.WORD, self.memory[self.launch.kind, "head", peer, self.rank], scale=1)
            for peer in self._listeners()
        ]
        released = tellers[:1] if self._faulty(Fault.RELAXED_TICKET) else tellers
        drain = Step(Act.DRAIN, of=released, value=EVER)
        early = self._faulty(Fault.HEAD_BEFORE_COUNTS)
        roles[f"last {name}"] = [Step(Act.JOIN, of=tellers), *self._released(drain, heads, early)]

    def _parts(self) -> int:
        """Of what is told beside the rows."""
        return self.case.routers if self.launch.kind == "dispatch" else min(self.case.routers, 1)

    def _wait(self, peer: int, lane: int, done: int) -> Step:
        at = self.memory[self.launch.kind, self.rank, peer, lane]
        return Step(Act.WAIT, at, value=done, scale=SCALE)

    def _arrived(self, peer: int, token: int) -> Step:
        lanes = 1 if self._faulty(Fault.UNEQUAL_LANES) else self._lanes()
        return self._wait(peer, token % lanes, token // lanes + 1)

    def _heads(self, peers: list[int]) -> list[Step]:
        return [Step(Act.WAIT, self.memory[self.launch.kind, "head", self.rank, peer], scale=1) for peer in peers]

    def _awaited(self) -> list[int]:
        careless = self._faulty(Fault.EARLY_END, Fault.SILENT_UNAWAITED)
        return [peer for peer in self.peers if not careless or self.rows(peer, self.rank)]

    def _reader(self, peer: int) -> Iterator[Step]:
        yield from self._heads(self._awaited())
        if peer in self._awaited():
            yield from (self._read("told", peer, number) for number in range(self._parts()))
        for token in self.rows(peer, self.rank):
            if self.launch.kind == "combine" or self.case.layout == "expert":
                yield self._arrived(peer, token)
                yield self._read("row", peer, token)

    def _out(self, others: int) -> Iterator[Step]:
        join = Step(Act.JOIN, of=tuple(range(self.first, self.first + others)))
        epoch = Step(Act.EPOCH, self.memory["epoch", self.rank, self.launch.kind])
        if self._faulty(Fault.EPOCH_BY_FIRST_OUT):
            yield epoch
        yield join
        if self.launch.receives:
            for peer in self._awaited():
                if self.launch.kind == "combine":
                    yield from self._heads([peer])
                    yield from (self._read("told", peer, number) for number in range(self._parts()))
                if self.launch.kind == "combine" or not self._faulty(Fault.NO_LAST_WORDS):
                    # The word of a sender's first lane stands for all of them.
                    firsts = range(0, self._lanes(), self.case.lanes)
                    yield from (self._wait(peer, lane, ALL_DONE) for lane in firsts)
        stores = self.launch.sends if self._faulty(Fault.EPOCH_BY_SEND) else self.launch.receives
        if stores and not self._faulty(Fault.EPOCH_BY_FIRST_OUT):
            yield epoch

    def _uses(self) -> Iterator[Step]:
        for peer in self.peers:
            sent = [token for token, to in enumerate(self.routing[peer]) if self.rank in to]
            yield from (self._read("row", peer, token, Act.USE) for token in sent)


def threads(case: Case, memory: Memory) -> list[Thread]:
    """Of all ranks, by rank and launch."""
    found: list[Thread] = []
    for rank in range(case.ranks):
        for place, launch in enumerate(case.launches()):
            roles = Kernel(case, memory, launch, rank, len(found)).roles()
            found += [Thread(rank, place, role, steps) for role, steps in roles.items()]
    return found
