"""The memory of all ranks in the model: a byte for each slot, line and word."""

from __future__ import annotations

from tests.explorer.case import Case
from tests.explorer.fault import Fault

KINDS = ("dispatch", "combine")


class Memory:
    """Assigns addresses: first slots, then lines, then words that cross ranks, then words of one rank alone.

    An address is found by a key, with the parity last: ("dispatch", "row", owner, writer, token, 0).
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.names: list[str] = []
        self.owners: dict[int, int] = {}  # the rank whose threads wait for a word that crosses ranks
        self.writers: dict[int, int] = {}  # of slots and lines with two buffers
        self.chunk_words: list[int] = []  # words of chunks, and numbers of crossings
        self._index: dict[tuple[object, ...], int] = {}
        ranks = range(case.ranks)
        self._pairs = [
            (owner, writer) for owner in ranks for writer in case.domain_ranks(owner) if owner != writer or case.own
        ]
        launches = [launch for launch in case.launches() if launch.kind in KINDS]
        in_words = any(launch.path != "lines" for launch in launches)
        if in_words:
            self._add_slots()
        if any(launch.path == "blocks" for launch in launches):
            self._add_blocks()
        crossings = any(launch.kind == "crossing" for launch in case.launches())
        if crossings:
            self._add_x()
        beside = any(launch.beside for launch in launches)
        if beside:
            self._add_places()
        if case.fault is Fault.LINE_IN_GRANULES:
            self._add_buffers("dispatch", [("granule", token) for token in range(case.tokens)])
            self._add_buffers("combine", [("granule", token) for token in range(case.tokens)])
        self.lines_from = len(self.names)
        if any(launch.path == "lines" for launch in launches):
            self._add_lines()
        self.words_from = len(self.names)
        if in_words:
            self._add_words()
        if crossings:
            self._add_chunks()
        if beside:
            self._add_ready()
        self._add_own()

    def __getitem__(self, key: tuple[object, ...]) -> int:
        return self._index[key]

    def buffers(self, *key: object) -> tuple[int, int]:
        """The address for parity 0, and the distance from there to parity 1."""
        return self._index[(*key, 0)], self._index[(*key, 1)] - self._index[(*key, 0)]

    def taken(self, rank: int, kind: str) -> list[int]:
        """The addresses that hold the warp which has taken each row of a run; none where a rank has one warp."""
        places = [self._index.get(("taken", rank, kind, token)) for token in range(self._case.tokens)]
        return [at for at in places if at is not None]

    def _add(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def _add_buffers(self, kind: str, parts: list[tuple[str, int]]) -> None:
        single = self._case.fault is Fault.SINGLE_BUFFER
        for owner, writer in self._pairs:
            for part, number in parts:
                for parity in (0, 1):
                    key = (kind, part, owner, writer, number, parity)
                    name = f"{kind} {part} {number} of rank {writer} at rank {owner}, parity {parity}"
                    self._index[key] = at = self._index[(*key[:-1], 0)] if single and parity else self._add(name)
                    self.writers[at] = writer

    def _add_slots(self) -> None:
        for kind in KINDS:
            parts = [("row", token) for token in range(self._case.tokens)]
            blocks = range(max(self._case.counting_blocks, 1))
            self._add_buffers(kind, parts + [("published", block) for block in blocks])

    def _add_blocks(self) -> None:
        """Slots that copies write, and at their writer those that copies read. They have one buffer."""
        for owner in range(self._case.ranks):
            for writer in range(self._case.ranks):
                for token in range(self._case.tokens):
                    name = f"block row {token} of rank {writer} at rank {owner}"
                    self._index["block", owner, writer, token] = self._add(name)

    def _add_x(self) -> None:
        """The rows that come in chunks. They have one buffer."""
        for rank in range(self._case.ranks):
            for token in range(self._case.tokens):
                self._index["x", rank, token] = self._add(f"x row {token} of rank {rank}")

    def _add_places(self) -> None:
        """The pieces of rows that a product stores, one for each token. They have one buffer."""
        for rank in range(self._case.ranks):
            for token in range(self._case.tokens):
                self._index["place", rank, token] = self._add(f"piece {token} of the experts' rows of rank {rank}")

    def _add_ready(self) -> None:
        for rank in range(self._case.ranks):
            for token in range(self._case.tokens):
                self._add_word(rank, ("ready", rank, token), f"ready word of piece {token} of rank {rank}")

    def _add_chunks(self) -> None:
        """The words of chunks, of crossings, and those by which the ranks of a rail meet in each gather."""
        for rank in range(self._case.ranks):
            for chunk in range(self._case.chunks):
                self._add_word(rank, ("chunk", rank, chunk), f"word of chunk {chunk} of rank {rank}")
                self.chunk_words.append(self["chunk", rank, chunk])
            for other in self._case.rail(rank):
                self._add_word(rank, ("begun", rank, other), f"gathers that rank {other} has begun, at rank {rank}")
                self._add_word(rank, ("came", rank, other), f"gathers whose rows of rank {other} are at rank {rank}")
            self._index["crossing", rank] = self._add(f"crossings of rank {rank}")
            self.chunk_words.append(self["crossing", rank])
            for what in ("aborted", "ended"):  # the word that the host sets, and whether NCCL's kernels end at once
                self._index[what, rank] = self._add(f"{what}: the rail of rank {rank}")

    def _add_lines(self) -> None:
        lines = [("line", token) for token in range(self._case.tokens)]
        entries = [("routing entry", token) for token in range(self._case.tokens if self._case.counting_blocks else 0)]
        self._add_buffers("dispatch", [("count", 0), *entries, *lines])
        self._add_buffers("combine", [("status", 0), *lines])

    def _add_words(self) -> None:
        for kind in KINDS:
            for owner, writer in self._pairs:
                self._add_word(owner, (kind, "head", owner, writer), f"{kind} head of rank {writer} at rank {owner}")
                for token in range(self._case.tokens):
                    name = f"{kind} word of row {token} of rank {writer} at rank {owner}"
                    self._add_word(owner, (kind, "arrived", owner, writer, token), name)
                for sender in range(self._case.senders):
                    name = f"{kind} done word of rank {writer}, sender {sender}, at rank {owner}"
                    self._add_word(owner, (kind, "done", owner, writer, sender), name)

    def _add_word(self, owner: int, key: tuple[object, ...], name: str) -> None:
        self._index[key] = at = self._add(name)
        self.owners[at] = owner

    def _add_own(self) -> None:
        for rank in range(self._case.ranks):
            for kind in KINDS:
                shared = self._case.fault is Fault.SHARED_EPOCH and kind == "combine"
                epoch = self._index["epoch", rank, "dispatch"] if shared else self._add(f"{kind} epoch of rank {rank}")
                self._index["epoch", rank, kind] = epoch
                for token in range(self._case.tokens if self._case.senders * self._case.warps > 1 else 0):
                    self._index["taken", rank, kind, token] = self._add(f"taken row {token} of {kind}, rank {rank}")
            for what in ("oldest", "failed", "poison"):
                self._index[what, rank] = self._add(f"{what} of rank {rank}")
            for launch in self._case.launches():
                if launch.kind == "dispatch" and launch.receives:
                    self._index["used", rank, launch.number] = self._add(f"parity of dispatch {launch.number}")
                    if self._case.refused:
                        self._index["refusal", rank, launch.number] = self._add(f"refusal of dispatch {launch.number}")
