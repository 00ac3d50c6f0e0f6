"""Messages between GPU ranks by the copy kernel, which waits for the credit, moves the bytes and signals by itself.

The words `sent` and `taken` are 64-bit counts that only grow, one writer each, compared by >=; what they carry is the
number of a run, which each rank counts in its own memory (kernels/copy.cu). So a captured operation is as good as an
eager one, in any mixture.

- send      waits for `taken` of the message before the last (lag 1: the slot is free at first), moves the message to
            the slot, signals `sent`
- receive   waits for `sent`; with get it then moves the slot's bytes to the landing and signals `taken`
- release   signals `taken`

All of a batch goes out in one launch, up to 32 operations; more take more launches.

A message need not be aligned: where it lies differently from its slot mod 16 the kernel moves it without bulk copies,
which is right and slower.
"""

from __future__ import annotations

from collections import OrderedDict

from raymoe.device.copy import LANES, CopyLane, Ring, Spread, copy_launch
from raymoe.device.error_word import ErrorWord
from raymoe.device.kernels import Kernels, Launch
from raymoe.memory.watchdog import Watchdog
from raymoe.memory.world import World
from raymoe.transport.device_lanes import Enqueuing, Ordered
from raymoe.transport.spec import ChannelSpec, Lane

SMS, RING = 16, Ring(12, 16384)
"""SMs that a rank's large messages take, and the ring of each. Pulls by 16 SMs reach 370 GB/s one way, 333 both ways
and among four, and no more than 372 and 335 by any number (4x H200, 64 and 256 MiB, 2026-11-21)."""

FEW, RING_OF_FEW = 12, Ring(6, 32768)
"""Fewer SMs than this take larger stages: one thread handles them all. An experiment whose thread took 0.5 us for each
stage pushed 341 GB/s by 8 SMs with stages of 32 KiB and 247 with 16 KiB."""

PUSH_GBPS = 365
"""What a rank's SMs are paced to while they push large messages. A link that is offered more than it takes gives less:
where the SMs offered just enough they pushed 359 to 369 GB/s one way, both ways and among four GPUs, with a third more
of them 305 to 312, with 131 of them 360 to 369 again. Paced to 360 they pushed 356, to 370 361 to 367, to 380 322 to
360, with 16, 20 or 32 SMs alike (4x H200, 64 and 256 MiB, 2026-11-21; benchmarks/links_h200x4.txt)."""

SMALL = 16
"""SMs for each message that is not large. One more does not help, and half of them cost a tenth (64 KiB to 1 MiB to
each of three, 4x H200, 2026-11-21)."""

LARGE_BYTES = 8 << 20
"""From here on messages of a batch go one after another, each by all SMs, and pushes are paced (`turn_of` says why).
Smaller ones are through before the links fill, and go side by side."""

FINE_BYTES, FINE, COARSE = 128 << 10, Ring(4, 4096), Ring(4, 16384)

MOST_SMS = 96
"""For what goes side by side, unless a number is given."""

MOST_KEPT = 256
"""Launches that are kept for batches like earlier ones."""


def spread_of(nbytes: int, messages: int, sms: int | None, pushes: bool) -> Spread:
    """Blocks, each on an SM of its own, and the ring of each, for messages that are moved together.

    >>> spread_of(0, 3, None, True) == Spread()
    True
    >>> spread_of(4096, 3, None, True)
    Spread(blocks=1, ring=Ring(stages=4, stage_bytes=4096), in_turn=False, gbps=0)
    >>> spread_of(1 << 20, 3, None, True)
    Spread(blocks=16, ring=Ring(stages=4, stage_bytes=16384), in_turn=False, gbps=0)
    >>> spread_of(1 << 30, 3, None, True)
    Spread(blocks=16, ring=Ring(stages=12, stage_bytes=16384), in_turn=True, gbps=365)
    >>> [spread_of(nbytes, 3, 8, False).blocks for nbytes in (4096, 1 << 20, 1 << 30)]  # in turn it is all eight
    [1, 2, 8]
    >>> spread_of(1 << 20, 8, 4, True).in_turn  # never more SMs than were given
    True
    """
    if nbytes == 0 or messages == 0:
        return Spread()
    if nbytes >= LARGE_BYTES:
        blocks = sms or SMS
        return Spread(blocks, RING_OF_FEW if blocks < FEW else RING, messages > 1, PUSH_GBPS if pushes else 0)
    ring = FINE if nbytes < FINE_BYTES else COARSE
    useful, most = min(SMALL, -(-nbytes // ring.stage_bytes)), sms or MOST_SMS
    in_turn = messages > most
    return Spread(min(useful, most if in_turn else most // messages), ring, in_turn)


class TmaMover(Enqueuing):
    """Launches are made once for a batch and its addresses, and kept for a while."""

    name = "tma"
    capturable = True

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        super().__init__(world, spec)
        full = spread_of(spec.nbytes, spec.movers(), spec.sms, spec.protocol == "put")
        self.sms: int | None = full.blocks * (1 if full.in_turn else spec.movers())
        """SMs that move bytes; one more waits for what others move."""
        self._kernels = Kernels(world.gpu)
        self._error = ErrorWord(world.gpu, world.rank)
        self._watch = self._error.watch(world.timeout_s)
        self._watchdog = Watchdog(world, on_abort=self._error.abort)
        self._numbers = {name: self._error.number(name) for name in ("send", "receive", "release")}
        self._kept: OrderedDict[Ordered, list[Launch]] = OrderedDict()
        copy_launch(self._kernels, [CopyLane(0, 0, 0)])  # the kernel is there before any capture

    def enqueue(self, batch: Ordered, stream: int) -> None:
        launches = self._kept.get(batch)
        if launches is None:
            launches = self._kept[batch] = self._launches(batch)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(batch)
        for launch in launches:
            launch(stream)

    def check(self) -> None:
        self._error.check()

    def close(self) -> None:
        super().close()
        self._watchdog.close()
        self._error.close()
        self._kernels.close()

    def _launches(self, batch: Ordered) -> list[Launch]:
        lanes = [self._releasing(lane) for lane in batch.releases]
        lanes += [self._sending(lane, message) for lane, message in batch.sends]
        lanes += [self._receiving(lane) for lane in batch.receives]
        launches = []
        for start in range(0, len(lanes), LANES):
            together = lanes[start : start + LANES]
            moved = sum(lane.bytes > 0 for lane in together)
            spread = spread_of(self.spec.nbytes, moved, self.spec.sms, self.spec.protocol == "put")
            launches.append(copy_launch(self._kernels, together, spread, self._watch))
        return launches

    def _sending(self, lane: Lane, message: int) -> CopyLane:
        slot = self.lanes.slot(lane)
        return CopyLane(
            dst=slot,
            src=message,
            bytes=self.spec.nbytes if message != slot else 0,  # 0: it lies in its slot already, or is empty
            operation=self.lanes.word("sends", lane, self.world.rank),
            credit=self.lanes.word("taken", lane, lane.source),
            lag=1,
            signal=self.lanes.word("sent", lane, lane.destination),
            op=self._numbers["send"],
            peer=lane.destination,
        )

    def _receiving(self, lane: Lane) -> CopyLane:
        fetches = self.spec.protocol == "get" and self.spec.nbytes > 0
        return CopyLane(
            dst=self.lanes.received(lane).data_ptr() if fetches else 0,
            src=self.lanes.slot(lane) if fetches else 0,
            bytes=self.spec.nbytes if fetches else 0,
            operation=self.lanes.word("receives", lane, self.world.rank),
            credit=self.lanes.word("sent", lane, lane.destination),
            signal=self.lanes.word("taken", lane, lane.source) if self.spec.protocol == "get" else 0,
            op=self._numbers["receive"],
            peer=lane.source,
        )

    def _releasing(self, lane: Lane) -> CopyLane:
        return CopyLane(
            dst=0,
            src=0,
            bytes=0,
            operation=self.lanes.word("releases", lane, self.world.rank),
            signal=self.lanes.word("taken", lane, lane.source),
            op=self._numbers["release"],
            peer=lane.source,
        )
