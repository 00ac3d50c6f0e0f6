"""Messages between GPU ranks by the copy engine. No SM is used: signals and waits are stream memory operations.

Stream memory operations cannot read a count on the device, so the words are 0 or 1. Each word has one writer, which
sets it to 1. The reader waits for 1 and sets it back to 0 before it allows the writer to set it again:

- `sent`, at the receiver    The sender sets it to 1 after the bytes. The receiver sets it to 0 before it sets `taken`.
- `taken`, at the sender     The receiver sets it to 1 when it has read the message, and the sender once, when the
                             channels are made: the slot is free. The sender sets it to 0 before it sets `sent`.

So a word is never set while it is 1, and never set back while the set is in flight: at any moment one of the two ends
holds the mailbox. `tests/unit/transport/test_transport_words.py` explores every interleaving.

A stream memory operation fences at system scope before it stores. This orders the bytes of the copy before `sent` and
the reader's loads before `taken`. The operations of a batch run in its order.

- send      wait taken = 1, taken := 0 | copy to the slot | peer's sent := 1
- receive   wait sent = 1, sent := 0 [| with get: copy from the slot | peer's taken := 1]
- release   peer's taken := 1

All operations between two copies are one batch. A captured transfer holds its size and both addresses: a replay moves
the bytes that are then there. A watchdog on the host bounds the waits.
"""

from __future__ import annotations

from typing import Any

from raymoe.cuda.driver import bindings, call
from raymoe.memory.watchdog import Watchdog, WatchedWord
from raymoe.memory.world import World
from raymoe.transport.gpu_mover import GpuMover, OrderedBatch
from raymoe.transport.spec import ChannelSpec

MAX_BATCH = 255
"""The driver takes at most this many stream memory operations in one batch."""


class CopyEngineMover(GpuMover):
    """Moves messages by the copy engine. The stream memory operations of a mailbox are made once."""

    name = "copy_engine"
    capturable = True

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        super().__init__(world, spec)
        self.sms: int | None = 0
        watched: list[WatchedWord] = []
        waits: dict[tuple[str, int], int] = {}
        for mailbox in spec.mailboxes:
            if mailbox.source == world.rank:
                waits["taken", mailbox.number] = len(watched)
                watched.append(WatchedWord("send", mailbox.destination, self.word("taken", mailbox, world.rank)))
                with world.gpu.current():
                    call("cuMemsetD32", self.word("taken", mailbox, world.rank), 1, 1)
            if mailbox.destination == world.rank:
                waits["sent", mailbox.number] = len(watched)
                watched.append(WatchedWord("receive", mailbox.source, self.word("sent", mailbox, world.rank)))
        world.gpu.synchronise()
        self._watchdog = Watchdog(world, watched)
        self._waits: dict[tuple[str, int], list[Any]] = {}
        self._signals: dict[tuple[str, int], list[Any]] = {}
        for (name, number), index in waits.items():
            self._waits[name, number] = _wait(watched[index].address, self._watchdog.host_address(index))
        for mailbox in spec.mailboxes:
            self._signals["sent", mailbox.number] = [_write(self.word("sent", mailbox, mailbox.destination), 1)]
            self._signals["taken", mailbox.number] = [_write(self.word("taken", mailbox, mailbox.source), 1)]

    def enqueue(self, batch: OrderedBatch, stream: int) -> None:
        """Enqueue all in one stream: copies side by side, each on its own engine, are slower (`turn_of`)."""
        pending: list[Any] = []  # operations for the next batch, which is one node of a graph

        def copy(into: int, source: int) -> None:
            if self.spec.nbytes and into != source:
                self._flush(pending, stream)
                call("cuMemcpyAsync", into, source, self.spec.nbytes, stream)

        for mailbox in batch.releases:
            pending += self._signals["taken", mailbox.number]
        for mailbox, message in batch.sends:
            pending += self._waits["taken", mailbox.number]
            copy(self.slot(mailbox), message)
            pending += self._signals["sent", mailbox.number]
        for mailbox in batch.receives:
            pending += self._waits["sent", mailbox.number]
            if self.spec.protocol == "get":
                copy(self.received(mailbox).data_ptr(), self.slot(mailbox))
                pending += self._signals["taken", mailbox.number]
        self._flush(pending, stream)

    def check(self) -> None:
        self._watchdog.check()

    def close(self) -> None:
        super().close()
        self._watchdog.close()

    def _flush(self, pending: list[Any], stream: int) -> None:
        for start in range(0, len(pending), MAX_BATCH):
            part = pending[start : start + MAX_BATCH]
            call("cuStreamBatchMemOp", stream, len(part), part, 0)
        pending.clear()


def _wait(word: int, watchdog_pair: int) -> list[Any]:
    """Announce the wait to the watchdog, wait for 1, set the word back to 0, clear the watchdog's pair."""
    return [_write(watchdog_pair, 1), _await(word, 1), _write(word, 0), _write(watchdog_pair, 0, is_64_bit=True)]


def _write(address: int, value: int, is_64_bit: bool = False) -> Any:
    drv = bindings()
    kinds = drv.CUstreamBatchMemOpType
    operation = drv.CUstreamBatchMemOpParams()
    kind = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64 if is_64_bit else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
    operation.operation = kind
    operation.writeValue.operation = kind
    operation.writeValue.address = drv.CUdeviceptr(address)
    if is_64_bit:
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
