"""Messages between GPU ranks by the copy engine. No SM is used: signals and waits are stream memory operations.

These cannot read a count on the device, so the words are 0 or 1. Each is set to 1 by its one writer and set back to 0
by its reader, after the wait for it and before anything that could make the writer set it again:

- `sent`, at the receiver    1 by the sender, after the bytes; 0 by the receiver, before it gives `taken`
- `taken`, at the sender     1 by the receiver, once it has done with the message (and once by its owner, when the
                             channels are made: the slot is free); 0 by the sender, before it gives `sent`

So a word is never set while it is 1, and never set back while the set is under way: at any moment one of the two ends
holds the lane. `tests/unit/test_transport_words.py` explores every interleaving. A store by a stream memory operation
is preceded by a system-wide fence, which orders the bytes of the copy before `sent` and the reader's loads before
`taken`; operations of a batch are carried out in its order.

- send      wait taken = 1, taken := 0 | copy to the slot | peer's sent := 1
- receive   wait sent = 1, sent := 0 [| with get: copy from the slot | peer's taken := 1]
- release   peer's taken := 1

What stands between two copies is one batch of operations. A captured transfer has its size and both addresses baked: a
replay moves that fixed block, whatever it then holds. Waits are bounded by a watchdog on the host.
"""

from __future__ import annotations

from typing import Any

from raymoe.device.driver import bindings, call
from raymoe.memory.watchdog import Watchdog, WatchedWord
from raymoe.memory.world import World
from raymoe.transport.device_lanes import Enqueuing, Ordered
from raymoe.transport.spec import ChannelSpec

MOST_TOGETHER = 255
"""Stream memory operations in one batch, which is what the driver takes."""


class CopyEngineMover(Enqueuing):
    """Batches of stream memory operations are made once for a lane."""

    name = "copy_engine"
    capturable = True

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        super().__init__(world, spec)
        self.sms: int | None = 0
        watched: list[WatchedWord] = []
        waits: dict[tuple[str, int], int] = {}
        for lane in spec.lanes:
            if lane.source == world.rank:
                waits["taken", lane.number] = len(watched)
                watched.append(WatchedWord("send", lane.destination, self.lanes.word("taken", lane, world.rank)))
                with world.gpu.current():
                    call("cuMemsetD32", self.lanes.word("taken", lane, world.rank), 1, 1)
            if lane.destination == world.rank:
                waits["sent", lane.number] = len(watched)
                watched.append(WatchedWord("receive", lane.source, self.lanes.word("sent", lane, world.rank)))
        world.gpu.synchronise()
        self._watchdog = Watchdog(world, watched)
        self._waits: dict[tuple[str, int], list[Any]] = {}
        self._signals: dict[tuple[str, int], list[Any]] = {}
        for (name, number), index in waits.items():
            self._waits[name, number] = _wait(watched[index].address, self._watchdog.host_address(index))
        for lane in spec.lanes:
            self._signals["sent", lane.number] = [_write(self.lanes.word("sent", lane, lane.destination), 1)]
            self._signals["taken", lane.number] = [_write(self.lanes.word("taken", lane, lane.source), 1)]

    def enqueue(self, batch: Ordered, stream: int) -> None:
        """One after another, in one stream: the engines would work on copies side by side, each at its own pace."""
        pending: list[Any] = []  # operations that go with the next ones as one batch, which is one node of a graph

        def copy(into: int, source: int) -> None:
            if self.spec.nbytes and into != source:
                self._flush(pending, stream)
                call("cuMemcpyAsync", into, source, self.spec.nbytes, stream)

        for lane in batch.releases:
            pending += self._signals["taken", lane.number]
        for lane, message in batch.sends:
            pending += self._waits["taken", lane.number]
            copy(self.lanes.slot(lane), message)
            pending += self._signals["sent", lane.number]
        for lane in batch.receives:
            pending += self._waits["sent", lane.number]
            if self.spec.protocol == "get":
                copy(self.lanes.received(lane).data_ptr(), self.lanes.slot(lane))
                pending += self._signals["taken", lane.number]
        self._flush(pending, stream)

    def check(self) -> None:
        self._watchdog.check()

    def close(self) -> None:
        super().close()
        self._watchdog.close()

    def _flush(self, pending: list[Any], stream: int) -> None:
        for start in range(0, len(pending), MOST_TOGETHER):
            together = pending[start : start + MOST_TOGETHER]
            call("cuStreamBatchMemOp", stream, len(together), together, 0)
        pending.clear()


def _wait(word: int, told: int) -> list[Any]:
    """Tell the watchdog, wait for 1, set back to 0, tell the watchdog that it is over."""
    return [_write(told, 1), _await(word, 1), _write(word, 0), _write(told, 0, whole=True)]


def _write(address: int, value: int, whole: bool = False) -> Any:
    drv = bindings()
    kinds = drv.CUstreamBatchMemOpType
    operation = drv.CUstreamBatchMemOpParams()
    kind = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64 if whole else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
    operation.operation = kind
    operation.writeValue.operation = kind
    operation.writeValue.address = drv.CUdeviceptr(address)
    if whole:
        operation.writeValue.value64 = drv.cuuint64_t(value)
    else:
        operation.writeValue.value = drv.cuuint32_t(value)
    operation.writeValue.flags = int(drv.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    return operation


def _await(address: int, value: int) -> Any:
    drv = bindings()
    operation = drv.CUstreamBatchMemOpParams()
    operation.operation = drv.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    operation.waitValue.operation = drv.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    operation.waitValue.address = drv.CUdeviceptr(address)
    operation.waitValue.value = drv.cuuint32_t(value)
    operation.waitValue.flags = int(drv.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    return operation
