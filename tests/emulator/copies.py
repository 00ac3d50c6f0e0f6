"""Messages between two emulated ranks by kernels/copy/copy.cu; each transfer has a credit, a signal and a count.

Put: a rank says that it is ready; its peer writes into its target and says that the message has come. Get: a rank says
that its source is ready; its peer reads it and says that it has. The words are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from raymoe.cuda.launch import Shape
from raymoe.cuda.structs import Watch
from raymoe.transport.copy_kernel import COPY, THREADS, Spread, Transfer, copy_params
from tests.emulator.machine import RED_ZONE_BYTES, Emulator, Memory
from tests.emulator.ranks import LONG_S, EmulatedErrorWord, EmulatedGpu

_WORD_BYTES = 128
_WORDS = ("move", "ready", "wait", "may begin", "done")
"""Three counts of this rank's runs; then the words that the peer writes."""


@dataclass(frozen=True)
class Message:
    """A message; `source` and `target` are its offsets from a multiple of 128 bytes on either rank."""

    nbytes: int
    source: int = 0
    target: int = 0


@dataclass
class Mail:
    """Sends every message from rank 0 to rank 1, or both ways, again and again; the receiver checks what came."""

    emulator: Emulator
    messages: tuple[Message, ...]
    spread: Spread
    protocol: str = "put"
    both_ways: bool = True
    timeout_s: float = LONG_S
    absent: frozenset[int] = frozenset()
    heaps: list[Memory] = field(init=False)
    errors: list[EmulatedErrorWord] = field(init=False)
    seen: list[int] = field(default_factory=lambda: [0, 0])
    """Messages that each rank has found right."""

    def __post_init__(self) -> None:
        self._offsets: dict[tuple[str, int], int] = {}
        end = _WORD_BYTES * len(_WORDS) * len(self.messages)
        regions = [("words", 0, end)]
        for number, message in enumerate(self.messages):
            for kind, offset in (("source", message.source), ("target", message.target)):
                begin = -(-(end + RED_ZONE_BYTES) // 128) * 128 + offset
                self._offsets[kind, number] = begin
                if message.nbytes:
                    regions.append((f"{kind} of message {number}", begin, message.nbytes))
                end = begin + message.nbytes
        self.heaps = [self.emulator.heap(rank, regions, end + RED_ZONE_BYTES) for rank in range(2)]
        self.errors = [EmulatedErrorWord(EmulatedGpu(self.emulator, rank), rank) for rank in range(2)]

    def enqueue(self, epochs: int) -> None:
        for epoch in range(1, epochs + 1):
            for rank in {0, 1} - self.absent:
                self._step(rank, epoch)

    def bytes(self, rank: int, kind: str, number: int) -> np.ndarray:
        begin = self._offsets[kind, number]
        return self.heaps[rank].bytes[begin : begin + self.messages[number].nbytes]

    def _step(self, rank: int, epoch: int) -> None:
        """Enqueue a step of a rank.

        Both ways: one launch moves and waits. One way: each message is awaited by a launch of its own, so that it is
        checked as soon as it is announced.
        """
        numbers = range(len(self.messages))
        sends, gets = self.both_ways or rank == 0, self.both_ways or rank == 1
        moves = sends if self.protocol == "put" else gets
        if sends:
            self.emulator.call(rank, lambda: self._fill(rank, epoch))
        if self.both_ways or not moves:
            self._launch(rank, [self._transfer(rank, "ready", number) for number in numbers])
        moving = [self._transfer(rank, "move", number) for number in numbers] if moves else []
        if self.both_ways:
            self._launch(rank, [*moving, *(self._transfer(rank, "wait", number) for number in numbers)])
        elif moves:
            self._launch(rank, moving)
        for number in numbers:
            if not self.both_ways and not moves:
                self._launch(rank, [self._transfer(rank, "wait", number)])
            if gets:
                self.emulator.call(rank, lambda number=number: self._look(rank, epoch, number))

    def _transfer(self, rank: int, kind: str, number: int) -> Transfer:
        """`ready` tells the peer that it may begin, `move` waits for that, and `wait` until the peer is done."""
        peer = 1 - rank
        transfer = Transfer(0, 0, 0, operation=self._word(rank, kind, number), op=_WORDS.index(kind), peer=peer)
        if kind == "ready":
            return replace(transfer, signal=self._word(peer, "may begin", number))
        if kind == "wait":
            return replace(transfer, credit=self._word(rank, "done", number))
        source, target = (rank, peer) if self.protocol == "put" else (peer, rank)
        return replace(
            transfer,
            dst=self.heaps[target].address + self._offsets["target", number],
            src=self.heaps[source].address + self._offsets["source", number],
            bytes=self.messages[number].nbytes,
            credit=self._word(rank, "may begin", number),
            signal=self._word(peer, "done", number),
        )

    def _word(self, rank: int, name: str, number: int) -> int:
        return self.heaps[rank].address + (number * len(_WORDS) + _WORDS.index(name)) * _WORD_BYTES

    def _launch(self, rank: int, transfers: list[Transfer]) -> None:
        watch: Watch = self.errors[rank].watch(self.timeout_s)
        params = copy_params(transfers, self.spread, watch)
        blocks = params.movers + any(not transfer.bytes for transfer in transfers)
        self.emulator.launch(rank, COPY, Shape(blocks, THREADS, self.spread.ring.shared_bytes), params)

    def _pattern(self, rank: int, epoch: int, number: int) -> np.ndarray:
        rng = np.random.default_rng((rank, epoch, number))
        return rng.integers(0, 256, self.messages[number].nbytes, dtype=np.uint8)

    def _fill(self, rank: int, epoch: int) -> None:
        for number in range(len(self.messages)):
            self.emulator.write(self.bytes(rank, "source", number), self._pattern(rank, epoch, number))

    def _look(self, rank: int, epoch: int, number: int) -> None:
        target = self.bytes(rank, "target", number)
        if self.errors[rank].record() is not None:
            return
        want = self._pattern(1 - rank, epoch, number)
        assert np.array_equal(target, want), f"message {number} of epoch {epoch} to rank {rank}"
        target[:] = 0xEE
        self.seen[rank] += 1
