"""Messages between GPU ranks by the copy kernel, which waits for the credit, moves the bytes and signals by itself.

The words `sent` and `taken` are 64-bit counts that only grow, one writer each, compared by >=; what they carry is the
number of a run, which each rank counts in its own memory (kernels/copy.cu). So a captured operation is as good as an
eager one, in any mixture.

- send      waits for `taken` of the message before the last (lag 1: the slot is free at first), moves the message to
            the slot, signals `sent`
- receive   waits for `sent`; with get it then moves the slot's bytes to the landing and signals `taken`
- release   signals `taken`

A message need not be aligned: where it lies differently from its slot mod 16 the kernel moves it without bulk copies,
which is right and slower.
"""

from __future__ import annotations

import torch

from raymoe.device.copy import CopyParams, copy_launch
from raymoe.device.error_word import ErrorWord
from raymoe.device.kernels import Kernels
from raymoe.device.launch import Launch
from raymoe.device.ring import Ring
from raymoe.memory.world import World
from raymoe.transport.device_lanes import Enqueuing
from raymoe.transport.spec import ChannelSpec, Lane
from raymoe.transport.watchdog import Watchdog

ONE_WAY_PUSH_SMS, BEST_SMS = 10, 20
"""Of 12 stages of 16 KiB each. What a rank pushes while nothing comes back is paced best by few: 10 SMs 365 GB/s, 12 to
16 361, 20 357. Where bytes flow both ways 12 to 16 SMs reach only 333, 20 reach 352; pulls want 20 for 370 one way and
334 both ways, and no more after that (2x H200, 256 MiB, 2026-11-21). Pulls gave the same on each of three machines;
pushes by 10 SMs gave 322 to 365."""

SMALL_BYTES, BYTES_PER_SM = 1 << 20, 16 << 10
_NOTHING = Ring(1, 16)


def shape_of(nbytes: int, sms: int) -> tuple[int, Ring]:
    """Blocks, each on an SM of its own, and the ring of each for one message; at most `sms` blocks.

    >>> shape_of(0, 12), shape_of(4096, 12)
    ((1, Ring(stages=1, stage_bytes=16)), (1, Ring(stages=4, stage_bytes=4096)))
    >>> shape_of(100_000, 12)[0], shape_of(2**30, 12)
    (7, (12, Ring(stages=12, stage_bytes=16384)))
    """
    if nbytes == 0:
        return 1, _NOTHING
    blocks = max(1, min(sms, -(-nbytes // BYTES_PER_SM)))
    return blocks, Ring(4, 4096) if nbytes < SMALL_BYTES else Ring(12, 16384)


def share_of(spec: ChannelSpec) -> int:
    """SMs for each of the transfers that a rank does at a time: never more in all than were given, but one each.

    >>> ring = ((0, 1), (1, 2), (2, 0))
    >>> [share_of(ChannelSpec(pairs, (8,), transport="tma")) for pairs in (((0, 1),), ((0, 1), (0, 2)), ring)]
    [10, 5, 20]
    >>> share_of(ChannelSpec(((0, 1), (0, 2), (0, 3)), (8,), transport="tma", sms=8))
    2
    """
    sharing = spec.movers()
    if spec.sms is not None:
        return max(1, spec.sms // sharing)
    both_ways = {source for source, _ in spec.pairs} & {destination for _, destination in spec.pairs}
    best = ONE_WAY_PUSH_SMS if spec.protocol == "put" and not both_ways else BEST_SMS
    return -(-best // sharing)


class TmaMover(Enqueuing):
    """Launches are made once for a lane and an address, and made anew where a message lies elsewhere."""

    name = "tma"
    capturable = True

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        super().__init__(world, spec)
        sharing = spec.movers()
        blocks, self._ring = shape_of(spec.nbytes, share_of(spec))
        self._blocks = blocks
        self.sms: int | None = blocks * sharing
        self._kernels = Kernels(world.gpu)
        self._error = ErrorWord(world.gpu, world.rank)
        self._watch = self._error.watch(world.timeout_s)
        self._watchdog = Watchdog(world, on_abort=self._error.abort)
        self._sends: dict[int, tuple[int, Launch]] = {}  # with where the message lies
        self._receives: dict[int, Launch] = {}
        self._releases: dict[int, Launch] = {}
        for lane in spec.lanes:
            if lane.destination == world.rank:
                self._receives[lane.number] = self._receiving(lane)
                self._releases[lane.number] = self._releasing(lane)

    def send(self, lane: Lane, message: torch.Tensor, stream: int) -> None:
        address = message.data_ptr()
        source = 0 if address == self.lanes.slot(lane) else address
        known = self._sends.get(lane.number)
        if known is None or known[0] != source:
            known = self._sends[lane.number] = source, self._sending(lane, source)
        known[1](stream)

    def receive(self, lane: Lane, stream: int) -> None:
        self._receives[lane.number](stream)

    def release(self, lane: Lane, stream: int) -> None:
        self._releases[lane.number](stream)

    def check(self) -> None:
        self._error.check()

    def close(self) -> None:
        super().close()
        self._watchdog.close()
        self._error.close()
        self._kernels.close()

    def _sending(self, lane: Lane, source: int) -> Launch:
        return self._launch(
            CopyParams(
                dst=self.lanes.slot(lane),
                src=source,
                bytes=self.spec.nbytes if source else 0,  # 0: it lies in its slot already, or is empty
                operation=self.lanes.word("sends", lane, self.world.rank),
                credit=self.lanes.word("taken", lane, lane.source),
                lag=1,
                signal=self.lanes.word("sent", lane, lane.destination),
                watch=self._watch,
                op=self._error.number("send"),
                peer=lane.destination,
            )
        )

    def _receiving(self, lane: Lane) -> Launch:
        fetches = self.spec.protocol == "get" and self.spec.nbytes > 0
        return self._launch(
            CopyParams(
                dst=self.lanes.received(lane).data_ptr() if fetches else 0,
                src=self.lanes.slot(lane) if fetches else 0,
                bytes=self.spec.nbytes if fetches else 0,
                operation=self.lanes.word("receives", lane, self.world.rank),
                credit=self.lanes.word("sent", lane, lane.destination),
                signal=self.lanes.word("taken", lane, lane.source) if self.spec.protocol == "get" else 0,
                watch=self._watch,
                op=self._error.number("receive"),
                peer=lane.source,
            )
        )

    def _releasing(self, lane: Lane) -> Launch:
        return self._launch(
            CopyParams(
                dst=0,
                src=0,
                bytes=0,
                operation=self.lanes.word("releases", lane, self.world.rank),
                signal=self.lanes.word("taken", lane, lane.source),
                watch=self._watch,
                op=self._error.number("release"),
                peer=lane.source,
            )
        )

    def _launch(self, params: CopyParams) -> Launch:
        blocks, ring = (self._blocks, self._ring) if params.bytes else (1, _NOTHING)
        return copy_launch(self._kernels, params, blocks, ring)
