"""A private NCCL communicator of a world, by the C functions of the NCCL library that torch brings.

It is private because the process-wide default group belongs to the user. Torch's process group is not used:

- It adds checks, events and a watchdog to each call. An all-to-all of two ranks kept the host for about 100 us there.
- Its watchdog ends the process when a wait takes too long. Here a late wait raises.

NCCL bounds no wait and cannot name a rank that is missing. So each rank writes into a word at each peer how many
exchanges it has entered with that peer. A wait that takes too long names the first peer whose word lags behind.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raymoe.cuda.current import capturing, on
from raymoe.errors import ConfigError, RaymoeError, WiringError
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World

# The C functions

ID_BYTES = 128
_UINT8, _SUM = 1, 0
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.17. Later versions take it too, because it has its size and its version."""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)),
        *((name, ctypes.c_int) for name in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")),
        ("net_name", ctypes.c_char_p),
    )


_CONFIG_MAGIC, _CONFIG_VERSION, _UNDEFINED = 0xCAFEBEEF, 21700, -(2**31)


def _config(most_blocks: int) -> _Config:
    """Bound the blocks of each of NCCL's kernels.

    Without clusters: one would need free SMs of one GPC, and find none where another kernel leaves single SMs free.
    """
    sizes = _UNDEFINED, 0, _UNDEFINED, most_blocks
    return _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, *sizes, None)


@functools.cache
def library() -> Any:
    """Load `libnccl.so.2`: the one that torch has loaded, or the one that is installed beside torch."""
    beside_torch = Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnccl.so.2")
    reasons = []
    for name in ("libnccl.so.2", *map(str, beside_torch)):
        try:
            nccl = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        return _with_signatures(nccl)
    raise WiringError(
        f"NCCL was asked for and its library cannot be loaded ({'; '.join(reasons)}); install a torch with NCCL"
    )


def _with_signatures(nccl: Any) -> Any:
    """Declare the types of the functions in the library."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arguments = {
        "ncclGetUniqueId": [ctypes.POINTER(_Id)],
        "ncclCommInitRank": [ctypes.POINTER(pointer), number, _Id, number],
        "ncclCommAbort": [pointer],
        "ncclCommDestroy": [pointer],
        "ncclGroupStart": [],
        "ncclGroupEnd": [],
        "ncclSend": [pointer, size, number, number, pointer, pointer],
        "ncclRecv": [pointer, size, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, number, pointer, pointer],
        "ncclReduceScatter": [pointer, pointer, size, number, number, pointer, pointer],
    }
    for name, types in arguments.items():
        function = getattr(nccl, name)
        function.argtypes, function.restype = types, number
    if hasattr(nccl, _WITH_CONFIG):
        function = getattr(nccl, _WITH_CONFIG)
        function.argtypes = [ctypes.POINTER(pointer), number, _Id, number, ctypes.POINTER(_Config)]
        function.restype = number
    nccl.ncclGetVersion.argtypes, nccl.ncclGetVersion.restype = [ctypes.POINTER(number)], number
    nccl.ncclGetErrorString.argtypes, nccl.ncclGetErrorString.restype = [number], ctypes.c_char_p
    nccl.ncclGetLastError.argtypes, nccl.ncclGetLastError.restype = [pointer], ctypes.c_char_p
    return nccl


_WITH_CONFIG = "ncclCommInitRankConfig"


def bounds_blocks() -> bool:
    """Whether NCCL can be loaded, and can be told how many blocks its kernels may have."""
    try:
        nccl = library()
    except WiringError:
        return False
    version = ctypes.c_int()
    return (
        hasattr(nccl, _WITH_CONFIG)
        and nccl.ncclGetVersion(ctypes.byref(version)) == 0
        and version.value >= _CONFIG_VERSION
    )


def new_id() -> bytes:
    """Make the id by which the ranks of one communicator find one another; one of them makes it."""
    identity = _Id()
    _check("ncclGetUniqueId", library().ncclGetUniqueId(ctypes.byref(identity)))
    return bytes(identity.bytes)


GRAPHS_S = 1.0
"""Longest wait of `abort` and `close` for NCCL where graphs may hold the communicator."""


class Communicator:
    """One rank's end. Addresses are on this GPU; every call enqueues on the given stream.

    A CUDA graph with NCCL's operations holds the communicator. NCCL's abort ends its kernels at once, but then waits
    without a limit until all such graphs are freed, and so does its destroy. So after a capture both run on a thread of
    their own.
    """

    def __init__(self, identity: bytes, rank: int, size: int, most_blocks: int | None = None) -> None:
        """Connect on torch's current device. Returns after all ranks have called it.

        `most_blocks` bounds the blocks of a kernel, if this NCCL can (`bounds_blocks`). NCCL's variables, such as
        NCCL_MAX_CTAS, take precedence.
        """
        self._nccl = library()
        handle = ctypes.c_void_p()
        unique_id = _Id((ctypes.c_uint8 * ID_BYTES).from_buffer_copy(identity))
        if most_blocks is not None and bounds_blocks():
            config = _config(most_blocks)
            code = self._nccl.ncclCommInitRankConfig(ctypes.byref(handle), size, unique_id, rank, ctypes.byref(config))
            _check(_WITH_CONFIG, code)
        else:
            _check("ncclCommInitRank", self._nccl.ncclCommInitRank(ctypes.byref(handle), size, unique_id, rank))
        self._handle: ctypes.c_void_p | None = handle
        self._held = False

    def hold(self) -> None:
        """Note that the next call is captured, so a graph holds the communicator."""
        self._held = True

    def exchange(
        self, sends: Iterable[tuple[int, int, int]], receives: Iterable[tuple[int, int, int]], stream: int
    ) -> None:
        """Enqueue one group of sends and receives, each a (rank, address, bytes)."""
        nccl, handle = self._nccl, self._handle
        _check("ncclGroupStart", nccl.ncclGroupStart())
        codes = [nccl.ncclSend(address, nbytes, _UINT8, rank, handle, stream) for rank, address, nbytes in sends]
        codes += [nccl.ncclRecv(address, nbytes, _UINT8, rank, handle, stream) for rank, address, nbytes in receives]
        codes.append(nccl.ncclGroupEnd())
        for code in codes:
            _check("a group of ncclSend and ncclRecv", code, handle)

    def all_gather(self, out: int, mine: int, nbytes: int, stream: int) -> None:
        """Gather `mine` of all ranks, in rank order, into `out`. `mine` may be this rank's part of `out`."""
        code = self._nccl.ncclAllGather(mine, out, nbytes, _UINT8, self._handle, stream)
        _check("ncclAllGather", code, self._handle)

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor, stream: int) -> None:
        """Add block r of `blocks` over all ranks, into `out` of rank r."""
        kind, count = _TYPES[out.dtype], out.numel()
        code = self._nccl.ncclReduceScatter(blocks.data_ptr(), out.data_ptr(), count, kind, _SUM, self._handle, stream)
        _check("ncclReduceScatter", code, self._handle)

    def abort(self) -> None:
        """End the kernels of this rank, also those that wait without end."""
        self._end("ncclCommAbort")

    def close(self) -> None:
        """Destroy the communicator. All ranks call this, after their streams are done."""
        self._end("ncclCommDestroy")

    def _end(self, function: str) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return

        def end() -> None:
            _check(function, getattr(self._nccl, function)(handle))

        if not self._held:
            end()
            return
        BackgroundWait(end).done(GRAPHS_S)


def _check(what: str, code: int, communicator: ctypes.c_void_p | None = None) -> None:
    if code == 0:
        return
    nccl = library()
    texts = [nccl.ncclGetErrorString(code), nccl.ncclGetLastError(communicator)]
    reason = "; ".join(text.decode(errors="replace").strip() for text in texts if text)
    raise WiringError(f"{what} failed: {reason}; NCCL_DEBUG=INFO tells more")


# The group of a world

CONNECT_S = 60.0
"""Least time limit to connect, which takes seconds. The world's timeout may be far shorter."""


class BackgroundWait:
    """A wait that cannot be bounded, made on a thread of its own, so that the caller can give up."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="raymoe device wait", daemon=True)
        self._thread.start()

    def done(self, within_s: float = 0.0) -> bool:
        """Whether the wait has ended, or does `within_s`. Raises its exception if it raised one."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._wait()
        except Exception as error:  # noqa: BLE001  raised by `done`
            self._error = error


class NcclGroup:
    """A communicator between the members of a world. All ranks make and close it, the members use it.

    All ranks are members unless `members` names some. After `abort` it cannot be used any more.

    A rank that exchanges with no member for long should not be one. NCCL stopped at the ninth message when two of four
    members sent one way. All four to all four, or two in a group of their own, went on (NCCL 2.28.9, 4 KiB, 4x H200,
    2026-11-21).
    """

    def __init__(self, world: World, members: Sequence[int] | None = None) -> None:
        _refuse_what_nccl_cannot(world)
        self.world = world
        self.members = tuple(range(world.size)) if members is None else tuple(sorted(members))
        self._heap = world.allocate(Layout.of([Region.words("entered", world.size)]), "nccl words")
        self._words = [self._heap.words("entered", peer) for peer in range(world.size)]
        self._entered = [0] * world.size
        self._places = {rank: place for place, rank in enumerate(self.members)}
        self._aborted = False
        self._communicator = connect(world, self.members)

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Enqueue one NCCL group of sends and receives, by peer, on the current stream. Other peers take no part."""
        communicator = self._enter(sends.keys() | receives.keys())
        with on(self.world.device):
            communicator.exchange(self._operations(sends), self._operations(receives), self._stream())

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather `mine` of all members, in rank order, into `out`, on the current stream. It may be a part of `out`."""
        communicator = self._enter(self.members)
        with on(self.world.device):
            communicator.all_gather(out.data_ptr(), mine.data_ptr(), mine.nbytes, self._stream())

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor) -> None:
        """Add block r of `blocks` over all members, into `out` of member r, on the current stream."""
        communicator = self._enter(self.members)
        with on(self.world.device):
            communicator.reduce_scatter(out, blocks, self._stream())

    def lagging(self, peers: Sequence[int]) -> tuple[int, int, int]:
        """Return the peer that holds up this rank, its count of exchanges with this rank, and this rank's count.

        It is the first peer with the lower count, or the first of all if none has one.
        """
        counts = [(peer, self._words[self.world.rank][peer], self._entered[peer]) for peer in peers]
        return next((count for count in counts if count[1] < count[2]), counts[0])

    def abort(self) -> None:
        """End NCCL's kernels, also those that wait without end."""
        communicator, self._communicator, self._aborted = self._communicator, None, True
        if communicator is not None:
            communicator.abort()

    def close(self, timeout_s: float | None = None) -> None:
        """Meet all ranks and destroy the communicator. The wait takes at most the world's timeout unless given."""
        torch.cuda.synchronize(self.world.device)
        if not self._aborted:
            self.world.barrier("nccl: idle", timeout_s)
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.close()
        self._heap.close()

    def _enter(self, peers: Iterable[int]) -> Communicator:
        if self._communicator is None:
            why = "is aborted or closed" if self.world.rank in self.members else f"is of ranks {self.members} alone"
            raise WiringError(f"rank {self.world.rank} was to exchange by an NCCL group that {why}; make a new one")
        if capturing(self.world.device):  # a replay does not count
            self._communicator.hold()
            return self._communicator
        for peer in peers:
            self._entered[peer] += 1
            self._words[peer][self.world.rank] = self._entered[peer]
        return self._communicator

    def _operations(self, rows: Mapping[int, torch.Tensor]) -> list[tuple[int, int, int]]:
        """List member, address and bytes of each tensor that is not empty."""
        return [(self._places[rank], block.data_ptr(), block.nbytes) for rank, block in rows.items() if block.nbytes]

    def _stream(self) -> int:
        return current_stream(self.world.device)


def connect(world: World, members: Sequence[int], most_blocks: int | None = None) -> Communicator | None:
    """Connect these ranks of a world, in this order, by an id of the first. A rank that is no member gets None.

    `Communicator` explains `most_blocks`. All ranks of the world call this, each with the members of its own
    communicator. So several that share no rank can be made at once.
    """
    communicator, problem = None, None
    me = members.index(world.rank) if world.rank in members else None
    try:
        identity = new_id() if me == 0 else b""
    except WiringError as error:
        problem, identity = error, b""
    identity_of_first = world.swap(identity, "nccl: identity")[members[0]]
    world.agree(problem, "nccl: identity made")
    try:
        if me is not None:
            assert isinstance(identity_of_first, bytes)
            communicator = _connect_members(world, identity_of_first, members, most_blocks)
    except (RaymoeError, RuntimeError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        problem = WiringError(f"NCCL did not connect: {reason}")
    world.agree(problem, "nccl: connected")
    return communicator


def _connect_members(world: World, identity: bytes, members: Sequence[int], most_blocks: int | None) -> Communicator:
    """Make a communicator that is connected. Bounded, because NCCL waits without end for a member that has died."""
    communicators: list[Communicator] = []

    def connect_all() -> None:
        with torch.cuda.device(world.device):
            communicators.append(Communicator(identity, members.index(world.rank), len(members), most_blocks))
            _exchange_a_byte(communicators[0], world, members)

    peers = [rank for rank in members if rank != world.rank]
    limit_s, connection = max(CONNECT_S, world.timeout_s), BackgroundWait(connect_all)
    if not world.waiter.until("nccl: connect", (peers or members)[0], connection.done, limit_s):
        raise WiringError(f"its ranks {', '.join(map(str, members))} did not all come within {limit_s:g} s")
    return communicators[0]


def _exchange_a_byte(communicator: Communicator, world: World, members: Sequence[int]) -> None:
    """Send a byte to every member and receive one from it: connections cannot be made in a capture."""
    size, device = len(members), world.device
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    peers = [place for place in range(size) if members[place] != world.rank]
    bytes_to, bytes_from = ([(place, memory.data_ptr() + place, 1) for place in peers] for memory in (out, into))
    communicator.exchange(bytes_to, bytes_from, current_stream(device))
    torch.cuda.synchronize(device)


def current_stream(device: torch.device) -> int:
    """Return the driver's number of the current stream of a GPU."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _refuse_what_nccl_cannot(world: World) -> None:
    problem: RaymoeError | None = None
    if not dist.is_available() or not dist.is_nccl_available():
        problem = ConfigError("collective was asked for and this torch was built without NCCL; use tma or copy_engine")
    gpus = [str(uuid) for uuid in world.swap(world.gpu.uuid, "nccl: gpus")]
    for rank, uuid in enumerate(gpus):
        if gpus.index(uuid) != rank and problem is None:
            problem = ConfigError(
                f"collective was asked for and ranks {gpus.index(uuid)} and {rank} share GPU {uuid}; NCCL needs one "
                "GPU a rank: use tma or copy_engine, or leave share_gpu out"
            )
    world.agree(problem, "nccl: possible")
