"""Messages between GPU ranks by the copy kernel, which waits for the credit, moves the bytes and signals by itself.

The words `sent` and `taken` are 64-bit counts that only grow, one writer each, compared by >=. They hold the number of
the operation, which each rank counts in its own memory (copy.cu). So captured and eager calls can be mixed.

- send      waits for `taken` of the mailbox's previous message (lag 1: at first the slot is free), moves the message to
            the slot, signals `sent`
- receive   waits for `sent`; with get it then moves the slot's bytes to the receive buffer and signals `taken`
- release   signals `taken`

A launch takes up to 32 operations. A larger batch takes more launches.

A message need not be aligned. If its address and its slot's differ mod 16, the kernel moves it without bulk copies,
which is slower.
"""

from __future__ import annotations

from collections import OrderedDict

from raymoe.cuda.error_word import ErrorWord
from raymoe.cuda.launch import Kernels, Launch
from raymoe.memory.world import World
from raymoe.transport.copy_kernel import MOST_TRANSFERS, Ring, Spread, Transfer, copy_launch
from raymoe.transport.gpu_mover import GpuMover, OrderedBatch
from raymoe.transport.spec import ChannelSpec, Mailbox

SMS, RING = 16, Ring(12, 16384)
"""SMs for the large messages of a rank, and the ring of each SM. Pulls by 16 SMs reach 370 GB/s one way, and 333 both
ways and among four. By any number of SMs they reach at most 372 and 335 (4x H200, 64 and 256 MiB, 2026-11-21)."""

FEW_SMS, RING_OF_FEW_SMS = 12, Ring(6, 32768)
"""Fewer SMs than this use larger stages, because one thread of a block handles all its stages. In an experiment that
thread took 0.5 us for each stage: 8 SMs pushed 341 GB/s with stages of 32 KiB and 247 with 16 KiB."""

PUSH_GBPS = 365
"""Pace of a rank's SMs while they push large messages. A link that is offered more than it can carry carries less.
Measured in GB/s (4x H200, 64 and 256 MiB, 2026-11-21; benchmarks/links_h200x4.txt):

- One way, both ways and among four GPUs: 359 to 369 with just enough SMs, 305 to 312 with a third more, 360 to 369 with
  131 SMs.
- With 16, 20 or 32 SMs alike: 356 paced to 360, 361 to 367 paced to 370, 322 to 360 paced to 380.
"""

SMS_OF_SMALL = 16
"""SMs for each message that is not large. One more does not help, and half as many cost a tenth (64 KiB to 1 MiB to
each of three peers, 4x H200, 2026-11-21)."""

LARGE_BYTES = 8 << 20
"""The least bytes of a large message. Large messages of a batch go one after another, each by all SMs, and pushes are
paced (see `turn_of`). Smaller messages are sent before the links fill, so they go side by side."""

FINE_RING_BYTES, FINE_RING, COARSE_RING = 128 << 10, Ring(4, 4096), Ring(4, 16384)
"""Messages below this size use the fine ring."""

MAX_SMS = 96
"""SMs for all messages that go side by side, unless a number is given."""

MAX_CACHED_LAUNCHES = 256
"""Batches whose launches are kept for later batches that are equal."""


def spread_of(nbytes: int, messages: int, sms: int | None, pushes: bool) -> Spread:
    """Choose the number of blocks, each on its own SM, and their rings, for messages that are moved together.

    >>> spread_of(0, 3, None, True) == Spread()
    True
    >>> spread_of(4096, 3, None, True)
    Spread(blocks=1, ring=Ring(stages=4, stage_bytes=4096), in_turn=False, gbps=0)
    >>> spread_of(1 << 20, 3, None, True)
    Spread(blocks=16, ring=Ring(stages=4, stage_bytes=16384), in_turn=False, gbps=0)
    >>> spread_of(1 << 30, 3, None, True)
    Spread(blocks=16, ring=Ring(stages=12, stage_bytes=16384), in_turn=True, gbps=365)
    >>> [spread_of(nbytes, 3, 8, False).blocks for nbytes in (4096, 1 << 20, 1 << 30)]  # large messages: all eight
    [1, 2, 8]
    >>> spread_of(1 << 20, 8, 4, True).in_turn  # never more SMs than given
    True
    """
    if nbytes == 0 or messages == 0:
        return Spread()
    if nbytes >= LARGE_BYTES:
        blocks = sms or SMS
        ring = RING_OF_FEW_SMS if blocks < FEW_SMS else RING
        return Spread(blocks, ring, messages > 1, PUSH_GBPS if pushes else 0)
    ring = FINE_RING if nbytes < FINE_RING_BYTES else COARSE_RING
    useful, available = min(SMS_OF_SMALL, -(-nbytes // ring.stage_bytes)), sms or MAX_SMS
    in_turn = messages > available
    return Spread(min(useful, available if in_turn else available // messages), ring, in_turn)


class TmaMover(GpuMover):
    """Moves messages by the copy kernel. Launches are made once for a batch and its addresses, and cached."""

    name = "tma"
    capturable = True

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        super().__init__(world, spec)
        channels = spec.busiest_channels()
        spread = spread_of(spec.nbytes, channels, spec.sms, spec.protocol == "put")
        self.sms: int | None = spread.blocks * (1 if spread.in_turn else channels)
        """SMs that move bytes. One more serves transfers without bytes."""
        self._kernels = Kernels(world.gpu)
        self._error = ErrorWord(world.gpu, world.rank)
        self._watch = self._error.watch(world.timeout_s)
        self._forget_aborts = world.waiter.on_abort(self._error.abort)
        self._numbers = {name: self._error.number(name) for name in ("send", "receive", "release")}
        self._cache: OrderedDict[OrderedBatch, list[Launch]] = OrderedDict()
        copy_launch(self._kernels, [Transfer(0, 0, 0)])  # loads the kernel before any capture

    def enqueue(self, batch: OrderedBatch, stream: int) -> None:
        launches = self._cache.get(batch)
        if launches is None:
            launches = self._cache[batch] = self._launches(batch)
            if len(self._cache) > MAX_CACHED_LAUNCHES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(batch)
        for launch in launches:
            launch.enqueue(stream)

    def check(self) -> None:
        self._error.check()

    def close(self) -> None:
        super().close()
        self._forget_aborts()
        self._error.close()
        self._kernels.close()

    def _launches(self, batch: OrderedBatch) -> list[Launch]:
        transfers = [self._release(mailbox) for mailbox in batch.releases]
        transfers += [self._send(mailbox, message) for mailbox, message in batch.sends]
        transfers += [self._receive(mailbox) for mailbox in batch.receives]
        launches = []
        for start in range(0, len(transfers), MOST_TRANSFERS):
            part = transfers[start : start + MOST_TRANSFERS]
            messages = sum(transfer.bytes > 0 for transfer in part)
            spread = spread_of(self.spec.nbytes, messages, self.spec.sms, self.spec.protocol == "put")
            launches.append(copy_launch(self._kernels, part, spread, self._watch))
        return launches

    def _send(self, mailbox: Mailbox, message: int) -> Transfer:
        slot = self.slot(mailbox)
        return Transfer(
            dst=slot,
            src=message,
            bytes=self.spec.nbytes if message != slot else 0,  # 0: the message is in its slot already, or is empty
            operation=self.word("sends", mailbox, self.world.rank),
            credit=self.word("taken", mailbox, mailbox.source),
            lag=1,
            signal=self.word("sent", mailbox, mailbox.destination),
            op=self._numbers["send"],
            peer=mailbox.destination,
        )

    def _receive(self, mailbox: Mailbox) -> Transfer:
        fetches = self.spec.protocol == "get" and self.spec.nbytes > 0
        return Transfer(
            dst=self.received(mailbox).data_ptr() if fetches else 0,
            src=self.slot(mailbox) if fetches else 0,
            bytes=self.spec.nbytes if fetches else 0,
            operation=self.word("receives", mailbox, self.world.rank),
            credit=self.word("sent", mailbox, mailbox.destination),
            signal=self.word("taken", mailbox, mailbox.source) if self.spec.protocol == "get" else 0,
            op=self._numbers["receive"],
            peer=mailbox.source,
        )

    def _release(self, mailbox: Mailbox) -> Transfer:
        return Transfer(
            dst=0,
            src=0,
            bytes=0,
            operation=self.word("releases", mailbox, self.world.rank),
            signal=self.word("taken", mailbox, mailbox.source),
            op=self._numbers["release"],
            peer=mailbox.source,
        )
