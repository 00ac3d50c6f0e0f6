"""`raymoe.Channel`: messages of one size between this rank and one peer, both ways. It uses `Channels`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from raymoe.cuda.current import capturing
from raymoe.errors import CaptureError, ConfigError
from raymoe.memory.world import World
from raymoe.transport.channels import Channels
from raymoe.transport.spec import ChannelSpec

if TYPE_CHECKING:
    from raymoe.net.nccl import NcclGroup

MAX_BYTES = 1 << 40
"""The most bytes of one message: more than the memory of any GPU, and so few that no size overflows."""


class Channel:
    """Sends messages of exactly `nbytes` bytes to one peer, and receives messages of that size from it, in order.

    - **Making one is collective.** All ranks of the world make it, with the same `nbytes`, `protocol` and `transport`.
      Each names its own `peer`, which names it in turn. A rank that takes no part names None. Only the two ends send
      and receive. Each rank has memory for one message.
    - **`protocol`.** With `put` the sender writes into the receiver's memory. With `get` the receiver reads from the
      sender's.
    - **`transport`.** Between GPUs `tma` (a kernel, sm_90 and newer), `copy_engine` (no SM), `collective` (NCCL) or
      `auto`. Between CPU ranks `host` or `auto`, which mean the same.
    - **One message a direction.** A `send` waits until the peer has released the previous message. So a receiver calls
      `release` after it has read a message. A rank that sends and receives in one step does both `together`.
    - **On GPUs nothing waits on the host.** Calls are enqueued on the current stream, and `check` raises failures. All
      operations of one direction follow one another in one stream; a caller that uses another stream orders it after
      the first.
    - **Capturable.** Calls can be captured in a CUDA graph, which may be replayed until `close`. The graph holds the
      address of the message. A message that a graph receives by `put` must be released in a graph too.

    One thread at a time uses a channel. `world.close` closes it too.

    The program of one rank, here run by two threads with a CPU rank each:

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> def program(world):
    ...     world.wire(descriptors)
    ...     with world, Channel(world, peer=1 - world.rank, nbytes=16) as channel:
    ...         mine = torch.arange(4, dtype=torch.float32) + 10 * world.rank
    ...         with channel.together():
    ...             channel.send(mine)
    ...             theirs = channel.receive(mine.shape, mine.dtype)
    ...         seen = theirs.tolist()
    ...         channel.release()
    ...         return seen
    >>> worlds = [World.open(rank, size=2) for rank in range(2)]
    >>> descriptors = [world.descriptor() for world in worlds]
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     list(ranks.map(program, worlds))
    [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]
    """

    @torch.inference_mode(False)  # tensors that are made in inference mode could not be written to outside of it
    def __init__(
        self, world: World, peer: int | None, nbytes: int, protocol: str = "put", transport: str = "auto"
    ) -> None:
        if capturing(world.device):
            raise CaptureError("a channel was to be made inside a capture; make it before, its calls can be captured")
        pairs = _agreed_pairs(world, peer, nbytes, protocol, transport)
        spec = ChannelSpec(pairs, (nbytes,), protocol=protocol, transport=transport)
        spec.check(world.size, world.device.type)  # all ranks gave the same, so all raise
        self.world, self.peer, self.nbytes, self.protocol = world, peer, nbytes, protocol
        self._closed = False
        self._held_in_capture: bool | None = None
        """Whether the held message was received inside a capture; None if no message is held."""
        self._captured_messages: list[torch.Tensor] = []
        self._receive_buffer: torch.Tensor | None = None
        """The memory of received messages; None before the first."""
        self._is_together = False
        with ExitStack() as undo:
            self._groups = _communicators(world, pairs, undo) if transport == "collective" else []
            own = [group for group in self._groups if world.rank in group.members]
            self._channels = Channels(world, spec, next(iter(own or self._groups), None))
            undo.pop_all()
        self._open_channels = world.shared(_OpenChannels)
        self._open_channels.add(self, self._groups)

    @property
    def transport(self) -> str:
        """The transport in use, also if `auto` was asked for."""
        return self._channels.transport

    def send(self, message: torch.Tensor) -> None:
        """Send a contiguous tensor of `nbytes` bytes, of any dtype and shape, on the device of the world.

        On a GPU, operations that follow on the same stream may overwrite the message.
        """
        peer = self._ready("send")
        flat = self._bytes_of(message)
        if self._is_together and self._receive_buffer is not None and _overlap(flat, self._receive_buffer):
            raise ConfigError(
                "the message is in the memory of received messages, which the peer may overwrite before a send in "
                "together() has read it; send a copy: call .clone()"
            )
        self._channels.send(peer, flat)
        if capturing(self.world.device):
            self._captured_messages.append(flat)  # a replay reads it again

    def receive(self, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Receive the next message, as a tensor of this dtype and shape; one dimension unless a shape is given.

        All messages are received into the same memory. The tensor is valid until `release`, or until the next
        `receive`, which releases the previous message. Copy the data to keep it longer.
        """
        peer = self._ready("receive")
        view = self._view(shape, dtype)
        self._refuse_mixed("receive")
        received = self._receive_buffer = self._channels.receive(peer)
        if self.protocol == "put":
            self._held_in_capture = capturing(self.world.device)
        return received.view(dtype).view(view)

    def release(self) -> None:
        """Release the last received message, so that the peer may send the next.

        With `get` the message is a copy, and this does nothing. It does nothing either if no message is held.
        """
        peer = self._ready("release")
        self._refuse_mixed("release")
        self._channels.release(peer)
        self._held_in_capture = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do all calls made inside at the end, in an order that cannot block: both ends may receive first.

        A message that is received inside is there after the block, and is released after it. To send a message that was
        received before, send a copy, because the next message overwrites it. After an exception none of the calls
        happens.
        """
        self._refuse_if_closed("together")
        held = self._held_in_capture
        try:
            with self._channels.together():
                self._is_together = True
                try:
                    yield
                finally:
                    self._is_together = False
        except BaseException:
            self._held_in_capture = held
            raise

    def check(self) -> None:
        """Wait for the current stream, then raise if a call has failed. `PeerTimeout` names the peer."""
        self._refuse_if_closed("check")
        if capturing(self.world.device):
            raise CaptureError("check waits for the device, which a capture cannot; call it after the replay")
        self._channels.synchronise()

    def close(self, together: bool = True) -> None:
        """Free memory and connections. With `collective` all ranks close, unless one has failed (`together=False`).

        Received tensors, and graphs with this channel's calls, are invalid from then on.
        """
        if self._closed:
            return
        self._closed = True
        self._open_channels.remove(self, self._groups)
        with ExitStack() as cleanup:  # runs from the last to the first, all of them even if one raises
            for group in self._groups:
                cleanup.callback(group.close)
            cleanup.callback(self._captured_messages.clear)
            cleanup.callback(self._channels.close)
            if not together or self._channels.broken is not None or self.world.waiter.reason is not None:
                for group in self._groups:
                    group.abort()  # else closing it would wait for peers that do not come
            elif self._groups:
                self._channels.synchronise()  # this wait is bounded, NCCL's own is not

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _refuse_if_closed(self, call: str) -> None:
        if self._closed:
            raise ConfigError(f"{call} on rank {self.world.rank}: this channel is closed; make a new one")

    def _ready(self, call: str) -> int:
        """Return the peer. Raises if the call cannot be made."""
        self._refuse_if_closed(call)
        if self._channels.broken is not None:
            raise self._channels.broken
        if self.peer is None:
            raise ConfigError(
                f"{call} on rank {self.world.rank}, which named no peer; only the two ends of a channel use it"
            )
        return self.peer

    def _bytes_of(self, message: torch.Tensor) -> torch.Tensor:
        """Return the message as flat bytes, after a check that it can be sent."""
        if not isinstance(message, torch.Tensor):
            raise ConfigError(f"the message is a {type(message).__name__}; a tensor is needed")
        if type(message).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or not _has_memory(message):
            raise ConfigError(
                f"the message is a {type(message).__name__} without memory of its own; send a plain tensor, outside "
                "torch.compile and torch.func transforms"
            )
        if message.device != self.world.device:
            raise ConfigError(f"the message is on {message.device}; this world's ranks are on {self.world.device}")
        nbytes = message.numel() * message.element_size()
        if nbytes != self.nbytes:
            raise ConfigError(
                f"the message has {nbytes} bytes ({message.dtype} {list(message.shape)}); this channel was made for "
                f"messages of exactly {self.nbytes}"
            )
        if not message.is_contiguous():
            raise ConfigError(f"the message has strides {message.stride()}; it must be contiguous: call .contiguous()")
        if message.is_neg() or message.is_conj():
            raise ConfigError("the message is a lazy negative or conjugate; call .resolve_neg().resolve_conj()")
        return message.detach().view(-1).view(torch.uint8)

    def _view(self, shape: Sequence[int] | None, dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape of a received message."""
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype is {dtype!r}; a torch.dtype is needed")
        if shape is not None and not isinstance(shape, Sequence):
            raise ConfigError(
                f"a message of shape {shape!r}; a sequence of whole numbers is needed, for example ({shape!r},)"
            )
        wanted = (self.nbytes // dtype.itemsize,) if shape is None else tuple(shape)
        if any(type(extent) is not int or extent < 0 for extent in wanted):
            raise ConfigError(f"a message of shape {list(wanted)}; whole numbers of at least 0 are needed")
        if prod(wanted) * dtype.itemsize != self.nbytes:
            raise ConfigError(
                f"a message to be received as {dtype} {list(wanted)}, {prod(wanted) * dtype.itemsize} bytes; this "
                f"channel was made for messages of exactly {self.nbytes}"
            )
        return wanted

    def _refuse_mixed(self, call: str) -> None:
        """Refuse to receive and release a message partly inside a capture and partly outside.

        A graph with the release alone would release at every replay, and so free slots before they were read.
        """
        held, now = self._held_in_capture, capturing(self.world.device)
        if held is None or held == now:
            return
        if now:
            raise ConfigError(
                f"{call} was called inside a capture while a message is held that was received before it; call "
                "release() before the capture begins"
            )
        raise ConfigError(
            f"{call} was called outside a capture while a message is held that was received inside one; capture its "
            "release() with it, or make a new channel"
        )


class _OpenChannels:
    """The channels of a world that are not closed. The world closes them before it frees their memory."""

    def __init__(self, _world: World) -> None:
        self._channels: list[weakref.ref[Channel]] = []  # weak, so that a dropped channel is collected
        self._groups: list[NcclGroup] = []

    def add(self, channel: Channel, groups: list[NcclGroup]) -> None:
        self._channels.append(weakref.ref(channel))
        self._groups += groups

    def remove(self, channel: Channel, groups: list[NcclGroup]) -> None:
        self._channels = [reference for reference in self._channels if reference() not in (channel, None)]
        self._groups = [group for group in self._groups if group not in groups]

    def close(self, together: bool) -> None:
        with ExitStack() as cleanup:  # runs from the last to the first, all of them even if one raises
            cleanup.callback(self._abandon_groups)
            for reference in self._channels:
                if (channel := reference()) is not None:
                    cleanup.callback(channel.close, together)

    def _abandon_groups(self) -> None:
        """Abort the groups of dropped channels: other ranks may have closed theirs."""
        with ExitStack() as cleanup:
            for group in self._groups:
                cleanup.callback(group.close)
                cleanup.callback(group.abort)


def pairs_of(peers: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """Return both directions between all ranks that name one another. `peers[r]` is the peer that rank r named.

    >>> pairs_of([1, 0, None, 4, 3])
    ((0, 1), (1, 0), (3, 4), (4, 3))
    >>> pairs_of([1, 2, 1])
    Traceback (most recent call last):
    raymoe.errors.ConfigError: rank 0 names rank 1 as its peer and rank 1 names rank 2; both ends must name one another
    """
    ranks = range(len(peers))
    for rank, peer in enumerate(peers):
        if peer is None:
            continue
        if peer not in ranks or peer == rank:
            raise ConfigError(
                f"rank {rank} names rank {peer} as its peer in a world of {len(peers)}; a peer is another rank of it, "
                "or None"
            )
        if peers[peer] != rank:
            theirs = "none" if peers[peer] is None else f"rank {peers[peer]}"
            raise ConfigError(
                f"rank {rank} names rank {peer} as its peer and rank {peer} names {theirs}; both ends must name one "
                "another"
            )
    pairs = tuple((rank, peer) for rank, peer in enumerate(peers) if peer is not None)
    if not pairs:
        raise ConfigError("no rank names a peer; a channel needs two ends")
    return pairs


def _agreed_pairs(world: World, peer: object, nbytes: object, *kind: object) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks. Raises on all ranks unless their arguments fit together."""
    problem: str | None = None
    if peer is not None and type(peer) is not int:
        problem = f"peer is {peer!r}; the number of a rank, or None, is needed"
    elif type(nbytes) is not int or not 0 <= nbytes <= MAX_BYTES:
        problem = f"nbytes is {nbytes!r}; a whole number from 0 to {MAX_BYTES} is needed"
    elif any(type(name) is not str for name in kind):
        problem = f"protocol and transport are {kind[0]!r} and {kind[1]!r}; names are needed"
    own = (peer, {"nbytes": nbytes, "protocol": kind[0], "transport": kind[1]})
    everywhere = world.swap(own if problem is None else problem, "channel: peers")
    if problem is not None:
        raise ConfigError(problem)
    peers = []
    for rank, other in enumerate(everywhere):
        if isinstance(other, str):
            raise ConfigError(f"rank {rank}: {other}")
        assert isinstance(other, tuple)
        peers.append(other[0])
        for name, value in own[1].items():
            if other[1][name] != value:
                raise ConfigError(
                    f"{name} is {other[1][name]!r} on rank {rank} and {value!r} on rank {world.rank}; all ranks must "
                    "give the same"
                )
    return pairs_of(peers)


def _communicators(world: World, pairs: Sequence[tuple[int, int]], undo: ExitStack) -> list[NcclGroup]:
    """Make an NCCL communicator for each pair of ranks: in a common one, idle pairs hold up the others (`NcclGroup`).

    All ranks of the world make all of them, in one order.
    """
    from raymoe.net.nccl import NcclGroup

    groups = []
    for pair in pairs:
        if pair[0] < pair[1]:
            groups.append(NcclGroup(world, pair))
            undo.callback(groups[-1].close)
            undo.callback(groups[-1].abort)
    return groups


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat tensors of bytes share memory.

    >>> flat = torch.zeros(8, dtype=torch.uint8)
    >>> _overlap(flat[:4], flat[3:]), _overlap(flat[:4], flat[4:]), _overlap(flat[4:4], flat)
    (True, False, False)
    """
    start, end = max(a.data_ptr(), b.data_ptr()), min(a.data_ptr() + a.numel(), b.data_ptr() + b.numel())
    return start < end


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own. A sparse, vmapped or freed tensor has none."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0 or tensor.device.type == "meta"
    except RuntimeError:
        return False
