"""A pool device whose copies take as long as a test says: host memory in the place of a GPU's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raymoe.errors import CaptureError
from raymoe.memory.host_shm import HostSegment
from raymoe.memory.pool_devices import HostPoolDevice, Mark, PeerPiece


@dataclass(eq=False)
class Work:
    """A mark that a test lets go."""

    handle: bytes | None
    done: bool = False
    error: Exception | None = None
    pieces: Sequence[PeerPiece] = field(default_factory=list)

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


class SlowDevice(HostPoolDevice):
    """Marks are done when `finish` says so. A copy happens when its mark is done, as late as on a GPU."""

    has_streams = True

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Work] = []
        self.copies: list[Work] = []
        self.recycled: list[Mark] = []
        self.mapped: Counter[object] = Counter()
        self.opened: Counter[object] = Counter()
        self.synchronised = 0
        self.is_capturing = False

    def mark(self) -> Mark:
        self.writes.append(Work(b"%d" % len(self.writes)))
        return self.writes[-1]

    def recycle(self, mark: Mark) -> None:
        self.recycled.append(mark)

    def open_mark(self, handle: bytes | None) -> Mark:
        assert handle is not None
        self.opened[handle] += 1
        return self.writes[int(handle)]

    def map_peer(self, descriptor: dict[str, object]) -> HostSegment:
        self.mapped[descriptor["inode"]] += 1
        return super().map_peer(descriptor)

    def copy(self, pieces: Sequence[PeerPiece]) -> Mark:
        self.copies.append(Work(None, pieces=pieces))
        return self.copies[-1]

    def check_can_enqueue(self) -> None:
        if self.is_capturing:
            raise CaptureError("the stream is captured")

    def synchronise(self) -> None:
        self.synchronised += 1

    def finish(self, work: Work) -> None:
        super().copy(work.pieces)
        work.done = True
