"""The slots of experts of all ranks: some of them gathered, and moved when a placement changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from raymoe.memory.board import MAX_MESSAGE
from raymoe.memory.world import World
from raymoe.moe.experts import local

Slot = tuple[int, int]
"""A rank, and the number of a slot there."""
_PIECE = MAX_MESSAGE - 1024
"""Bytes of a message between ranks without a process group."""


def gather_slots(world: World, part: torch.Tensor, wanted: Sequence[Slot]) -> dict[Slot, torch.Tensor]:
    """Return some slots of a tensor [S, ...] that each rank has of its own. All ranks want the same ones.

    By an all-gather of as many slots as the rank that has most of them.
    """
    by_rank = [sorted(slot for rank, slot in set(wanted) if rank == its) for its in range(world.size)]
    most = max(map(len, by_rank))
    own = part.new_zeros(most, *part.shape[1:])
    for place, slot in enumerate(by_rank[world.rank]):
        own[place] = part[slot]
    gathered = _all_gather(world, own)
    return {
        (rank, slot): gathered[rank][place] for rank, slots in enumerate(by_rank) for place, slot in enumerate(slots)
    }


def _all_gather(world: World, own: torch.Tensor) -> list[torch.Tensor]:
    if world.size == 1 or not own.numel():
        return [own] * world.size
    if world.process_group is not None:
        gathered = [torch.empty_like(own) for _ in range(world.size)]
        dist.all_gather(gathered, own, group=world.process_group)
        return gathered
    mail = own.flatten().view(torch.uint8).cpu().numpy().tobytes()
    pieces: list[Any] = [
        world.swap(mail[begin : begin + _PIECE], "experts in slots") for begin in range(0, len(mail), _PIECE)
    ]
    whole = (bytearray(b"".join(piece[rank] for piece in pieces)) for rank in range(world.size))
    return [torch.frombuffer(mails, dtype=own.dtype).view(own.shape).to(own.device) for mails in whole]


@torch.no_grad()
def move_slots(world: World, part: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    """Bring the slots of a tensor [S, ...], such as an optimizer's state, from one placement to the next, in place.

    `before` and `after` are int32[ranks, slots], `Exchange.placement` before and after. All ranks call it. A slot that
    holds its expert already stays, another one takes it from this rank if it can, else from the first rank that has it.
    Slots that get empty keep what they have. Of a DTensor this rank's part is taken.
    """
    own_part = local(part)
    assert own_part is not None
    part = own_part
    sources = _sources(before, after)
    crossing = [source for (rank, _), source in sources.items() if source[0] != rank]
    parts = gather_slots(world, part, crossing) if crossing else {}
    own = {slot: source for (rank, slot), source in sources.items() if rank == world.rank}
    values = {
        slot: part[source[1]].clone() if source[0] == world.rank else parts[source] for slot, source in own.items()
    }
    for slot, value in values.items():
        part[slot] = value


def _sources(before: torch.Tensor, after: torch.Tensor) -> dict[Slot, Slot]:
    """Return the slot from which each slot that changes takes its expert.

    >>> _sources(torch.tensor([[0, 1], [2, -1]]), torch.tensor([[1, 0], [2, 0]]))
    {(0, 0): (0, 1), (0, 1): (0, 0), (1, 1): (0, 0)}
    """
    first: dict[int, Slot] = {}
    on_rank: dict[tuple[int, int], int] = {}
    for rank, held in enumerate(before.tolist()):
        for slot, expert in enumerate(held):
            first.setdefault(expert, (rank, slot))
            on_rank.setdefault((rank, expert), slot)
    changed = (after != before) & (after >= 0)
    sources = {}
    for rank, slot in changed.nonzero().tolist():
        expert = int(after[rank, slot])
        here = on_rank.get((rank, expert))
        sources[rank, slot] = first[expert] if here is None else (rank, here)
    return sources
