"""The rail of GPU ranks, by NCCL: a communicator of the ranks with one place in each domain.

Operations are sends and receives in one NCCL group, enqueued on the current stream, so a CUDA graph can hold them. The
connections are made with the rail, because a capture cannot make them.

NCCL bounds no wait. `settle` does on the host, and so does every abort of the world: both end NCCL's kernels. `settle`
names the peer that is late by the numbers in the world's store (`published.py`); replays of graphs do not count. A call
after NCCL has lost a peer's connection raises the same error. While graphs hold the rail, `close` and `abort` return
before NCCL has freed its memory (`Communicator`).

A kernel of NCCL that is ended has not received its data, and the work after it on the stream runs all the same. So
every abort first sets a word in host memory, `aborted`, which that work can read. After that NCCL stores
its own flag with a release. Its kernel ends when it has read the flag, so the kernel after it finds the word set.

Its kernels have at most `RAIL_BLOCKS` blocks, because a dispatch that waits for rows leaves so many SMs free
(raymoe/exchange/domains/chunks.py).

**Pretended domains.** Ranks of two domains on one machine would find shared memory and NVLink between them, and NCCL
refuses two ranks on one GPU of a host. So the rail then sets NCCL_HOSTID in this process, and NCCL_SOCKET_IFNAME=lo
where ranks meet at the loopback address. NCCL then takes sockets between domains. Ranks that share a GPU get a host id
each. Both variables are set only where they are missing, and stay: NCCL reads them once in a process, and programs
that this one starts inherit them. If the process used NCCL before, its host id stays that of the machine. NCCL then
may take faster ways between the domains, and refuses ranks that share a GPU.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from raymoe.cuda.current import capturing, on
from raymoe.cuda.gpu import HostWords
from raymoe.errors import ConfigError, PeerTimeout, RaymoeError, WiringError
from raymoe.memory.address import LOOPBACK
from raymoe.memory.world import CLOSING_S, SpanningWorld, World
from raymoe.net.nccl import BackgroundWait, Communicator, connect, current_stream
from raymoe.net.published import PublishedNumbers
from raymoe.net.rail import RAIL_BLOCKS

_Blocks = tuple[torch.Tensor, ...]
"""The blocks that go to one domain, or come from it."""
MARGIN_S = 1.0
"""A wait of the host lasts so much longer than those of kernels: a kernel that waits in vain names its peer better."""
_LONG_S = 0.05  # a longer wait asks the store which rank is late


class NcclRail:
    """A `Rail` of a world of several domains of GPU ranks. The ranks of all rails make theirs together."""

    capturable = True

    def __init__(self, world: World) -> None:
        if not isinstance(world, SpanningWorld):
            raise ConfigError(f"a rail was asked for in a world of {world.domains} domain; rails are between domains")
        self._world, self._me = world, world.domain_index
        self._numbers, self._entered = PublishedNumbers(world), 0
        self._failure: RaymoeError | None = None
        self._connected: Communicator | None = None
        self._forget: Callable[[], None] = lambda: None
        self._check_nccl(world)
        for name, value in environment(world).items():
            os.environ.setdefault(name, value)
        members = [domain * world.domain.size + world.place for domain in range(world.domains)]
        self._word, self._word_lock = HostWords(world.gpu, 1), threading.Lock()
        self.aborted = self._word.device_address()
        """The address of a 64-bit word that kernels read: 0, then 1 for ever.

        An abort sets it before it ends an operation on the device without its data. A kernel after the operation, on
        the same stream, finds it set. The word stays where it is until the rail is closed.
        """
        try:
            self._connected = connect(world, members, RAIL_BLOCKS)
        except BaseException:
            self._word.close()
            raise
        self._forget = world.waiter.on_abort(lambda _: self.abort())

    def gather(self, op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        """Enqueue a gather. `own` may be this rank's block of `out`."""
        blocks = out.view(self._world.domains, -1)
        own_block = blocks[self._me]
        with on(out.device):
            if own_block.data_ptr() != own.data_ptr():
                own_block.copy_(own.view(-1))
            self._exchange(op, [(own_block,)] * len(blocks), [(block,) for block in blocks])
        return _nothing

    def swap(self, op: str, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        """Enqueue a swap. It copies this rank's own block too."""
        with on(sent.device):
            received[self._me].copy_(sent[self._me])
            self._exchange(op, [(block,) for block in sent], [(block,) for block in received])
        return _nothing

    def swap_all(self, op: str, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Enqueue swaps of the blocks of several tensors, as one NCCL group.

        This rank's own blocks stay where they are: its own blocks of `received` mean nothing then.
        """
        with on(sent[0].device):
            self._exchange(op, list(zip(*sent, strict=True)), list(zip(*received, strict=True)))
        return _nothing

    def settle(self, op: str) -> None:
        """Wait for the device, with a limit. Raises `PeerTimeout` and ends NCCL's work where it runs out."""
        self._entered += 1
        number, start = self._entered, time.monotonic()
        background = BackgroundWait(self._world.gpu.synchronise)

        def is_done() -> bool:
            if background.done():
                return True
            if time.monotonic() - start > _LONG_S:
                self._world.waiter.waiting = (op, self._numbers.lagging(number)[0])
            return False

        limit_s = self._world.timeout_s + MARGIN_S
        try:
            if self._world.waiter.until(op, self._numbers.lagging(number)[0], is_done, limit_s):
                self._open(op)  # an abort ends the device's work too
                return
            peer, seen = self._numbers.lagging(number)
            raise PeerTimeout(op, number, peer, number, seen, time.monotonic() - start, self._world.rank)
        except RaymoeError as error:
            self._failure = self._failure or copy.copy(error)
            self.abort()  # ends NCCL's waits on the device
            raise

    def lagging(self) -> int:
        return self._numbers.lagging(self._entered)[0]

    def fail(self, reason: str) -> None:
        """Publish the reason, which ranks that wait for this rail or another read, and abort."""
        self._failure = self._failure or RaymoeError(reason)
        try:
            self._numbers.fail(reason)
        finally:
            self.abort()

    def check_failed(self) -> None:
        self._numbers.check_failed()

    def abort(self) -> None:
        """Set the word `aborted`, then end NCCL's kernels, also those that wait without end. Any thread may call it."""
        with self._word_lock:  # `close` frees the word
            self._word.words[0] = 1
        communicator, self._connected = self._connected, None
        if communicator is not None:
            communicator.abort()

    def close(self, together: bool) -> None:
        """Close with the world; `together` if all ranks close now. A rank that has left already delays it by 2 s."""
        self._forget()
        if not together:
            self.abort()
        try:
            if self._connected is not None:
                self.settle("close")
                self._world.barrier("rail: idle", min(self._world.timeout_s, CLOSING_S))
                communicator, self._connected = self._connected, None
                if communicator is not None:
                    communicator.close()
        except RaymoeError:
            self.abort()
            raise
        finally:
            self._free_word()

    def _free_word(self) -> None:
        """Free the word when no kernel can read it any more. Where the device does not get idle, it stays."""
        if BackgroundWait(self._world.gpu.synchronise).done(CLOSING_S):
            with self._word_lock:
                self._word.close()

    def _exchange(self, op: str, sent: list[_Blocks], received: list[_Blocks]) -> None:
        """Enqueue one NCCL group: blocks d of `sent` go to domain d, whose blocks become blocks d of `received`."""
        communicator, device = self._open(op), sent[0][0].device
        if capturing(device):
            communicator.hold()
        else:
            self._entered += 1
        peers = [domain for domain in range(self._world.domains) if domain != self._me]
        sends, receives = (
            [(domain, block.data_ptr(), block.nbytes) for domain in peers for block in blocks[domain]]
            for blocks in (sent, received)
        )
        try:
            communicator.exchange(sends, receives, current_stream(device))
        except WiringError as error:  # NCCL refuses every call after a connection of it was closed
            self._failure = self._failure or self._lost(op)
            self.abort()
            raise copy.copy(self._failure) from error

    def _lost(self, op: str) -> RaymoeError:
        """Return the error that names the peer that is gone. The other peers get time to publish their numbers."""
        number, start = self._entered, time.monotonic()
        try:
            peer, seen = self._numbers.lagging(number)
            while time.monotonic() - start < MARGIN_S:
                time.sleep(_LONG_S)
                peer, seen = self._numbers.lagging(number)
        except RaymoeError as error:  # a rank has published why it failed
            return error
        return PeerTimeout(op, number, peer, number, seen, time.monotonic() - start, self._world.rank)

    def _open(self, op: str) -> Communicator:
        """Return the communicator, or raise why there is none any more."""
        self._world.waiter.check()
        if self._connected is None:
            raise copy.copy(self._failure) if self._failure else WiringError(f"{op}: this rail is aborted or closed")
        return self._connected

    @staticmethod
    def _check_nccl(world: World) -> None:
        problem: RaymoeError | None = None
        if world.device.type != "cuda":
            problem = ConfigError(f"a rail by NCCL was asked for between ranks on {world.device}; it is for GPU ranks")
        elif not dist.is_available() or not dist.is_nccl_available():
            problem = ConfigError("GPU ranks in several domains need NCCL, and this torch was built without it")
        world.agree(problem, "rail: possible")


def environment(world: SpanningWorld) -> dict[str, str]:
    """Return the variables that NCCL needs between pretended domains; none where each domain has a machine."""
    if not world.pretended:
        return {}
    host = f"rank{world.rank}-{os.getpid()}" if world.member.share_gpu else f"domain{world.domain_index}"
    variables = {"NCCL_HOSTID": f"raymoe-{world.name}-{host}"}
    if world.address == LOOPBACK:
        variables["NCCL_SOCKET_IFNAME"] = "lo"
    return variables


def _nothing() -> None:
    """Wait for nothing: later work of the stream is ordered after the operation."""
