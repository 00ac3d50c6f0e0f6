"""torch's `all_to_all_vdev_2d` over NVSHMEM: it sends rows that are sorted by expert to their experts, and back.

Its input is made off the clock: a copy of each token for each of its experts, sorted by expert, and the count of rows
for each. So it sends a row for each (token, expert), even if several of the experts are on one rank. Its way back,
`all_to_all_vdev_2d_offset`, returns rows without a weight or a sum.

It takes at most 15 groups of rows for a rank. So experts share groups; rows of a group and source are sorted by expert.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.inputs import Inputs
from raymoe.workload.measure import Line
from raymoe.workload.memory_needed import groups_of, most_rows_received

_symm: Any = _symmetric_memory
_dist: Any = dist
_ops: Any = torch.ops.symm_mem


@dataclass(frozen=True)
class SortedRows:
    """The rows of a rank's tokens, sorted by expert."""

    token: torch.Tensor
    """int64[N]: the token that each row copies."""
    splits: torch.Tensor
    """int64[G]: how many rows go to each group of experts, over all ranks."""

    @classmethod
    def of(cls, ids: torch.Tensor, experts: int, groups: int) -> SortedRows:
        """Sort the rows of these ids by expert; an id of -1 has no row.

        >>> rows = SortedRows.of(torch.tensor([[3, 0], [1, -1], [0, 2]]), experts=4, groups=2)
        >>> rows.token.tolist(), rows.splits.tolist()
        ([0, 2, 1, 2, 0], [3, 2])
        """
        flat = ids.flatten()
        chosen = (flat >= 0).nonzero().flatten()
        order = chosen[torch.sort(flat[chosen], stable=True).indices]
        splits = torch.bincount(flat[chosen] // (experts // groups), minlength=groups)
        return cls(order // ids.shape[1], splits)


class VdevAllToAll:
    """The operation with its memory in the symmetric heap, and its way back. All ranks make one."""

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs) -> None:
        self._world, self._spec, self._inputs = world, spec, inputs
        local = spec.local_experts(world.size)
        self._groups = groups_of(local)
        placement = (
            f"placed by groups of {local // self._groups} experts" if local > self._groups else "nothing of placement"
        )
        self.left_out: dict[str, str | None] = {
            "dispatch": f"routing, counts, sorting of rows before, one row a rank ({placement})",
            "combine": "weights, sum, one row a rank",
            "exchange": "routing, counts, sorting of rows before, weights, sum, one row a rank",
        }
        self._group = join_default_group(world)
        if not _symm.is_nvshmem_available():
            raise ConfigError(f"torch {torch.__version__} finds no NVSHMEM: libnvshmem_host.so.3 is missing")
        _symm.set_backend("NVSHMEM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.12 and later warn that they need no such call
            _symm.enable_symm_mem_for_group(self._group)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        leaving, arriving = spec.tokens * spec.topk, most_rows_received(spec, world.size)
        splits = world.size * self._groups
        self._sent = self._symmetric(leaving, spec.hidden, dtype=dtype)
        self._received = self._symmetric(arriving, spec.hidden, dtype=dtype)
        self._returned = self._symmetric(leaving, spec.hidden, dtype=dtype)
        self._splits = self._symmetric(splits, dtype=torch.int64)
        self._received_splits = self._symmetric(2, splits, dtype=torch.int64)
        self._returned_splits = self._symmetric(2, splits, dtype=torch.int64)
        self._rows = 0
        self._index = 0

    @property
    def keys(self) -> Line:
        return {}

    def take(self, index: int, *, fresh: bool) -> None:
        rows = self._sorted(self._world.rank, index)
        x = self._inputs.at(index, fresh=fresh).x
        self._rows, self._index = len(rows.token), index
        torch.index_select(x, 0, rows.token.to(x.device), out=self._sent[: self._rows])
        self._splits.copy_(rows.splits)
        if fresh:
            for poisoned in (self._received, self._returned):
                poisoned.fill_(torch.nan)
            for poisoned in (self._received_splits, self._returned_splits):
                poisoned.fill_(-1)

    def dispatch(self) -> None:
        _ops.all_to_all_vdev_2d(
            self._sent,
            self._received,
            self._splits,
            self._received_splits,
            self._group,
            major_align=self._spec.alignment,
        )

    def combine(self) -> None:
        _ops.all_to_all_vdev_2d_offset(
            self._received, self._returned, self._received_splits, self._returned_splits, self._group
        )

    def exchange(self) -> None:
        self.dispatch()
        self.combine()

    def wrong_dispatch(self) -> str | None:
        """Return what is wrong: each row of each source must lie where the offsets say, by group and then by source."""
        counts, offsets = self._received_splits.tolist()
        for source in range(self._world.size):
            rows = self._sorted(source, self._index)
            x = self._inputs.fresh_of(source, self._index)
            ends = rows.splits.cumsum(0).tolist()
            for group in range(self._groups):
                split = self._world.rank * self._groups + group
                start, count = ends[split] - int(rows.splits[split]), int(rows.splits[split])
                place = group * self._world.size + source
                if counts[place] != count:
                    return f"{counts[place]} rows from rank {source} for group {group} of experts, {count} were sent"
                want = x[rows.token[start : start + count].to(x.device)]
                if not torch.equal(self._received[offsets[place] : offsets[place] + count], want):
                    return f"rows from rank {source} for group {group} of experts are not those that were sent"
        return None

    def wrong_combine(self) -> str | None:
        """Return what is wrong: rows must return as they were sent, because no expert worked on them."""
        if torch.equal(self._returned[: self._rows], self._sent[: self._rows]):
            return None
        return "rows that came home are not those that were sent"

    def _sorted(self, rank: int, index: int) -> SortedRows:
        draws = self._inputs.draws
        step = index % len(draws)
        ids = draws[step].ids if rank == self._world.rank else self._inputs.routing.draw(rank, step).ids
        return SortedRows.of(ids, self._spec.experts, self._world.size * self._groups)

    def _symmetric(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        memory: torch.Tensor = _symm.empty(*shape, dtype=dtype, device=self._world.device)
        _symm.rendezvous(memory, self._group)
        return memory.zero_()


def join_default_group(world: World, *, connect: bool = False) -> str:
    """Make the process's default group, over NCCL, and return its name.

    NCCL connects when it is first used; `connect`: now, for a system that takes NCCL's communicator out of the group.

    Only the process of another system may call this: elsewhere the default group is the user's.
    """
    file = _nameless_file() if world.rank == 0 else None
    path = world.swap(None if file is None else f"/proc/{os.getpid()}/fd/{file}", "another system: store")[0]
    store = _dist.FileStore(path, world.size)
    torch.cuda.set_device(world.device)
    _dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size)
    world.barrier("another system: group")
    if connect:
        _dist.all_reduce(torch.zeros(1, device=world.device))
    return str(_dist.group.WORLD.group_name)


def _nameless_file() -> int:
    """Make a file that is gone with its last user; peers reach it through /proc."""
    fd = os.memfd_create("raymoe-nvshmem-store", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd
