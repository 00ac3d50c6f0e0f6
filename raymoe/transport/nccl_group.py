"""A private NCCL process group of a world: the process-wide default group is the user's.

NCCL bounds no wait and cannot tell who did not come, so each rank writes how many exchanges it has entered with a peer
into a word at that peer; a wait that took too long names the first peer whose word lags behind.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raymoe.device.current import capturing, on
from raymoe.job.errors import ConfigError, RaymoeError, WiringError
from raymoe.memory.heap import Layout, Region
from raymoe.memory.world import World

nccl: Any = dist  # torch's stubs leave out most of what a private group needs
_c10d: Any = distributed_c10d
_NEVER = timedelta(days=365)  # torch ends the process when NCCL's time is over; ours is over sooner and raises


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
        self._nothing = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._file = nameless_file() if world.rank == 0 else None
        self._aborted = False
        self._group: Any = self._connect()

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """One NCCL group of sends and receives, by peer, on the current stream. Peers that are not named do nothing."""
        self._enter(sends.keys() | receives.keys())
        out, into = ([each.get(rank, self._nothing) for rank in self.members] for each in (sends, receives))
        self._all_to_all(self._group, into, out)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`mine` of all members, in rank order, into `out`, on the current stream."""
        self._enter(self.members)
        options = _c10d.AllgatherOptions()
        if hasattr(options, "asyncOp"):
            options.asyncOp = False
        with on(self.world.device):  # torch asks the current device whether this is captured
            work = self._group._allgather_base(out, mine, options)
            if work is not None:
                work.wait()

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor) -> None:
        """The sum over members of block r of `blocks` into `out` of member r, on the current stream."""
        self._enter(self.members)
        options = _c10d.ReduceScatterOptions()
        if hasattr(options, "asyncOp"):
            options.asyncOp = False
        work = self._group._reduce_scatter_base(out, blocks, options)
        if work is not None:
            work.wait()

    def lagging(self, peers: Sequence[int]) -> tuple[int, int, int]:
        """The first peer that has entered fewer exchanges with us than we with it, or the first; its and our count."""
        found = [(peer, self._words[self.world.rank][peer], self._entered[peer]) for peer in peers]
        return next((each for each in found if each[1] < each[2]), found[0])

    def abort(self) -> None:
        """End NCCL's kernels, also those that wait for ever."""
        group, self._group, self._aborted = self._group, None, True
        if group is not None:
            group.abort()
            # Its destructor would wait for peers that are gone. The process has failed and is about to end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def close(self) -> None:
        torch.cuda.synchronize(self.world.device)
        if not self._aborted:
            self.world.barrier("nccl: idle")
            group, self._group = self._group, None
            if group is not None:
                group.shutdown()
            del group
            self.world.barrier("nccl: gone")  # every store writes to the file when it goes
            if self._file is not None:
                os.close(self._file)
        self._heap.close()

    def _enter(self, peers: Iterable[int]) -> None:
        if self._group is None:
            why = "is aborted or closed" if self.world.rank in self.members else f"is of ranks {self.members} alone"
            raise WiringError(f"rank {self.world.rank} was to exchange by an NCCL group that {why}; make a new one")
        if capturing(self.world.device):  # a replay enters nothing
            return
        for peer in peers:
            self._entered[peer] += 1
            self._words[peer][self.world.rank] = self._entered[peer]

    def _connect(self) -> Any:
        """Meet over a file of rank 0 that has no name, and make the communicator now: a capture could not."""
        world, group, problem = self.world, None, None
        path = world.swap(f"/proc/{os.getpid()}/fd/{self._file}", "nccl: store")[0]
        try:
            if world.rank in self.members:
                me, size = self.members.index(world.rank), len(self.members)
                options = nccl.ProcessGroupNCCL.Options()
                options._timeout = _NEVER
                group = nccl.ProcessGroupNCCL(nccl.FileStore(path, size), me, size, options)
                tokens = [torch.zeros(1, dtype=torch.uint8, device=world.device) for _ in range(2 * size)]
                self._all_to_all(group, tokens[:size], tokens[size:])
                torch.cuda.synchronize(world.device)
        except (RuntimeError, OSError) as error:
            problem = WiringError(f"NCCL did not connect: {(str(error).splitlines() or ['no reason given'])[0]}")
        world.agree(problem, "nccl: connected")
        return group

    def _all_to_all(self, group: Any, into: list[torch.Tensor], out: list[torch.Tensor]) -> None:
        options = nccl.AllToAllOptions()
        if hasattr(options, "asyncOp"):
            options.asyncOp = False  # on the current stream itself, not on one of its own between two events
        with on(self.world.device):
            work = group.alltoall(into, out, options)
            if work is not None:
                work.wait()


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


def nameless_file() -> int:
    """A file that is gone with its last user; peers reach it through /proc."""
    fd = os.memfd_create("raymoe-nccl-store", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd
