"""A private NCCL communicator of a world, by NCCL's own C functions: the process-wide default group is the user's.

NCCL bounds no wait and cannot name the rank that did not come. So each rank writes how many exchanges it has entered
with a peer into a word at that peer; a wait that took too long names the first peer whose word lags behind.
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

from raymoe.device.current import capturing, on
from raymoe.errors import ConfigError, RaymoeError, WiringError
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World

# NCCL by its own C functions, in the library that torch brings.
#
# Torch's process group does the same calls behind checks, events and a watchdog: an all-to-all of two ranks kept the
# host for about 100 us there. Its watchdog also ends the process when a wait takes too long, where ours raises.

ID_BYTES = 128
_UINT8, _SUM = 1, 0
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * ID_BYTES),)


@functools.cache
def library() -> Any:
    """`libnccl.so.2`: the one that torch has loaded, or the one that is installed beside it."""
    beside = Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnccl.so.2")
    reasons = []
    for name in ("libnccl.so.2", *map(str, beside)):
        try:
            found = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        return _declared(found)
    raise WiringError(
        f"NCCL was asked for and its library cannot be loaded ({'; '.join(reasons)}); install torch with it"
    )


def _declared(found: Any) -> Any:
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
        function = getattr(found, name)
        function.argtypes, function.restype = types, number
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = [number], ctypes.c_char_p
    found.ncclGetLastError.argtypes, found.ncclGetLastError.restype = [pointer], ctypes.c_char_p
    return found


def new_id() -> bytes:
    """What the ranks of one communicator meet by; one of them makes it."""
    identity = _Id()
    _check("ncclGetUniqueId", library().ncclGetUniqueId(ctypes.byref(identity)))
    return bytes(identity.bytes)


class Communicator:
    """One rank's end. Addresses are of this GPU; everything is enqueued on the stream that is given."""

    def __init__(self, identity: bytes, rank: int, size: int) -> None:
        """Returns when all ranks have come. The GPU is torch's current device."""
        self._nccl = library()
        made = ctypes.c_void_p()
        given = _Id((ctypes.c_uint8 * ID_BYTES).from_buffer_copy(identity))
        _check("ncclCommInitRank", self._nccl.ncclCommInitRank(ctypes.byref(made), size, given, rank))
        self._made: ctypes.c_void_p | None = made

    def exchange(
        self, sends: Iterable[tuple[int, int, int]], receives: Iterable[tuple[int, int, int]], stream: int
    ) -> None:
        """One group of sends and receives: (rank, address, bytes) each."""
        nccl, made = self._nccl, self._made
        _check("ncclGroupStart", nccl.ncclGroupStart())
        codes = [nccl.ncclSend(address, nbytes, _UINT8, rank, made, stream) for rank, address, nbytes in sends]
        codes += [nccl.ncclRecv(address, nbytes, _UINT8, rank, made, stream) for rank, address, nbytes in receives]
        codes.append(nccl.ncclGroupEnd())
        for code in codes:
            _check("a group of ncclSend and ncclRecv", code, made)

    def all_gather(self, out: int, mine: int, nbytes: int, stream: int) -> None:
        """`mine` of all ranks, in rank order, into `out`, of which it may be this rank's part."""
        code = self._nccl.ncclAllGather(mine, out, nbytes, _UINT8, self._made, stream)
        _check("ncclAllGather", code, self._made)

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor, stream: int) -> None:
        """The sum over ranks of block r of `blocks` into `out` of rank r."""
        kind, count = _TYPES[out.dtype], out.numel()
        code = self._nccl.ncclReduceScatter(blocks.data_ptr(), out.data_ptr(), count, kind, _SUM, self._made, stream)
        _check("ncclReduceScatter", code, self._made)

    def abort(self) -> None:
        """End the kernels of this rank, also those that wait for ever."""
        made, self._made = self._made, None
        if made is not None:
            _check("ncclCommAbort", self._nccl.ncclCommAbort(made))

    def close(self) -> None:
        """By all ranks, when their streams are done."""
        made, self._made = self._made, None
        if made is not None:
            _check("ncclCommDestroy", self._nccl.ncclCommDestroy(made))


def _check(what: str, code: int, communicator: ctypes.c_void_p | None = None) -> None:
    if code == 0:
        return
    nccl = library()
    said = [nccl.ncclGetErrorString(code), nccl.ncclGetLastError(communicator)]
    reason = "; ".join(text.decode(errors="replace").strip() for text in said if text)
    raise WiringError(f"{what} failed: {reason}; NCCL_DEBUG=INFO tells more")


# A private NCCL communicator of a world: the process-wide default group is the user's.
#
# NCCL bounds no wait and cannot tell who did not come, so each rank writes how many exchanges it has entered with a
# peer into a word at that peer; a wait that took too long names the first peer whose word lags behind.

CONNECT_S = 60.0  # at least: it takes seconds, however short the waits are that follow


class OtherThread:
    """A wait that nothing can bound, made where it holds nobody up."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="raymoe device wait", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        """Whether it has ended; raises what it ended with."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._wait()
        except Exception as error:  # noqa: BLE001  raised by `over`
            self._error = error


class NcclGroup:
    """Made and closed by all ranks of a world, used by its members: all of them, unless `members` names some.

    After `abort` it is of no further use. Whoever exchanges with nobody for long should be no member: where two of four
    members sent one way, NCCL stood still at the ninth message (NCCL 2.28.9, 4 KiB, 4x H200, 2026-11-21); all four to
    all four, or two between themselves, went on.
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
        self._communicator: Communicator | None = self._connect()

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """One NCCL group of sends and receives, by peer, on the current stream. Peers that are not named do nothing."""
        communicator = self._enter(sends.keys() | receives.keys())
        with on(self.world.device):
            communicator.exchange(self._given(sends), self._given(receives), self._stream())

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`mine` of all members, in rank order, into `out`, on the current stream; it may be a part of `out`."""
        communicator = self._enter(self.members)
        with on(self.world.device):
            communicator.all_gather(out.data_ptr(), mine.data_ptr(), mine.nbytes, self._stream())

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor) -> None:
        """The sum over members of block r of `blocks` into `out` of member r, on the current stream."""
        communicator = self._enter(self.members)
        with on(self.world.device):
            communicator.reduce_scatter(out, blocks, self._stream())

    def lagging(self, peers: Sequence[int]) -> tuple[int, int, int]:
        """The first peer that has entered fewer exchanges with us than we with it, or the first; its and our count."""
        found = [(peer, self._words[self.world.rank][peer], self._entered[peer]) for peer in peers]
        return next((each for each in found if each[1] < each[2]), found[0])

    def abort(self) -> None:
        """End NCCL's kernels, also those that wait for ever."""
        communicator, self._communicator, self._aborted = self._communicator, None, True
        if communicator is not None:
            communicator.abort()

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for its members, as long as the world's waits may take unless said."""
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
        if not capturing(self.world.device):  # a replay enters nothing
            for peer in peers:
                self._entered[peer] += 1
                self._words[peer][self.world.rank] = self._entered[peer]
        return self._communicator

    def _given(self, rows: Mapping[int, torch.Tensor]) -> list[tuple[int, int, int]]:
        """Member, address and bytes of each that has any."""
        return [(self._places[rank], each.data_ptr(), each.nbytes) for rank, each in rows.items() if each.nbytes]

    def _stream(self) -> int:
        stream: int = torch._C._cuda_getCurrentRawStream(self.world.device.index)
        return stream

    def _connect(self) -> Communicator | None:
        """Meet by an identity of the first member, and send once between every two: a capture could not connect."""
        world, made, problem = self.world, None, None
        me = self._places.get(world.rank)
        try:
            identity = new_id() if me == 0 else b""
        except WiringError as error:
            problem, identity = error, b""
        first = self.members[0]
        told = world.swap(identity, "nccl: identity")[first]
        world.agree(problem, "nccl: identity made")
        try:
            if me is not None:
                assert isinstance(told, bytes)
                made = self._meet(told, me)
        except (RaymoeError, RuntimeError) as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            problem = WiringError(f"NCCL did not connect: {reason}")
        world.agree(problem, "nccl: connected")
        return made

    def _meet(self, identity: bytes, me: int) -> Communicator:
        """A communicator that has sent and received. NCCL waits without end for a member that has died."""
        world, made = self.world, []

        def meet() -> None:
            with torch.cuda.device(world.device):
                made.append(Communicator(identity, me, len(self.members)))
                self._touch(made[0])

        others = [rank for rank in self.members if rank != world.rank]
        longest, met = max(CONNECT_S, world.timeout_s), OtherThread(meet)
        if not world.waiter.until("nccl: connect", (others or self.members)[0], met.over, longest):
            raise WiringError(f"its ranks {', '.join(map(str, self.members))} did not all come within {longest:g} s")
        return made[0]

    def _touch(self, made: Communicator) -> None:
        """A byte to every member and from it."""
        size, device = len(self.members), self.world.device
        out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        peers = [place for place in range(size) if self.members[place] != self.world.rank]
        bytes_to, bytes_from = ([(place, each.data_ptr() + place, 1) for place in peers] for each in (out, into))
        made.exchange(bytes_to, bytes_from, self._stream())
        torch.cuda.synchronize(device)


def _refuse_what_nccl_cannot(world: World) -> None:
    problem: RaymoeError | None = None
    if not dist.is_available() or not dist.is_nccl_available():
        problem = ConfigError("collective asked for and this torch was built without NCCL; take tma or copy_engine")
    gpus = [str(uuid) for uuid in world.swap(world.gpu.uuid, "nccl: gpus")]
    for rank, uuid in enumerate(gpus):
        if gpus.index(uuid) != rank and problem is None:
            problem = ConfigError(
                f"collective asked for and ranks {gpus.index(uuid)} and {rank} share GPU {uuid}; NCCL wants one GPU a "
                "rank, so take tma or copy_engine, or leave share_gpu out"
            )
    world.agree(problem, "nccl: possible")
