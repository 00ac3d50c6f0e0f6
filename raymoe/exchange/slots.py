"""The slots of an exchange: which expert each slot of each rank holds, in a table that `Exchange.place` writes.

The protocol of an exchange with `ExchangeSpec(slots=S)` knows R*S experts, its slots. A dispatch turns the ids of
experts into numbers of slots before anything else. An expert in several slots has copies there, and a token takes one
by a fixed hash of its rank and its number, whatever the other tokens are.

The table is one tensor on the device, int32[1 + E + 1 + R*S], whose address stays. So a CUDA graph reads what was
placed last:

- the digest of the placement, 31 bits. Each rank's combine sends that of its dispatch, and all ranks compare it;
- for each expert the number of copies before its own ones, then the number of all copies;
- the slots of all copies, expert by expert, in ascending order.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

if TYPE_CHECKING:
    from raymoe.cuda.launcher import Launcher
    from raymoe.exchange.slot_kernel import TakeSlots

_LOW_32 = 2**32 - 1
_TOKEN_FACTOR, _RANK_FACTOR, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B1, 0x85EBCA6B, 0x7FEB352D, 0x846CA68B
"""Of `token_hash`, which kernels/slots/take_slots.cu computes too."""


class SlotExperts(Protocol):
    """A placement, such as that of `raymoe.moe.plan_placement`."""

    @property
    def experts(self) -> torch.Tensor:
        """int32[ranks, slots]: the expert of each slot; -1: the slot is empty."""


def even_experts(experts: int, ranks: int, slots: int) -> torch.Tensor:
    """Place experts one after another, each once, as evenly as it goes: the placement of an exchange at first.

    >>> even_experts(5, ranks=2, slots=3).tolist(), even_experts(4, ranks=2, slots=2).tolist()
    ([[0, 1, 2], [3, 4, -1]], [[0, 1], [2, 3]])
    """
    table = torch.full((ranks, slots), -1, dtype=torch.int32, device="cpu")
    first = 0
    for rank in range(ranks):
        count = experts // ranks + (rank < experts % ranks)
        table[rank, :count] = torch.arange(first, first + count, dtype=torch.int32, device="cpu")
        first += count
    return table


def token_hash(rank: int, tokens: int) -> torch.Tensor:
    """Return the hash of each of a rank's tokens, int64[tokens], 0 to 2^32 - 1.

    >>> hashes = token_hash(rank=3, tokens=4096)
    >>> abs(int((hashes < 2**31).sum()) - 2048) < 100, torch.equal(hashes[:5], token_hash(rank=3, tokens=5))
    (True, True)
    """
    token = torch.arange(tokens, dtype=torch.int64, device="cpu")
    mixed = (token * _TOKEN_FACTOR + rank * _RANK_FACTOR) & _LOW_32
    mixed = ((mixed ^ mixed >> 16) * _FIRST_FACTOR) & _LOW_32
    mixed = ((mixed ^ mixed >> 15) * _SECOND_FACTOR) & _LOW_32
    return mixed ^ mixed >> 16


class SlotTable:
    """The placement of one call site, on the device.

    >>> from raymoe import World
    >>> spec = ExchangeSpec(tokens=4, hidden=8, experts=3, topk=2, slots=5)
    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     table = SlotTable(world, spec)
    ...     table.write(torch.tensor([[2, 0, 1, 2, -1]]))
    ...     table.slots_of(torch.tensor([[0, 2], [0, 2], [0, 2], [3, -1]])).tolist()
    [[1, 0], [1, 0], [1, 3], [5, -1]]
    """

    def __init__(self, world: World, spec: ExchangeSpec, launcher: Launcher | None = None) -> None:
        """`launcher` launches the kernel that reads the table. By default GPU ranks have one, and CPU ranks none."""
        assert spec.slots is not None
        self._experts, self._shape = spec.experts, (world.size, spec.slots)
        self._every, self._rank = world.size * spec.slots, world.rank
        self.experts = even_experts(spec.experts, *self._shape)
        """int32[ranks, slots] on the CPU: the placement that was written last."""
        words = 1 + spec.experts + 1 + self._every
        self.words = torch.zeros(words, dtype=torch.int32, device=world.device)
        self.digest = self.words[:1]
        """int32[1] on the device."""
        self._kernel: TakeSlots | None = None
        if launcher is not None or world.device.type == "cuda":
            from raymoe.exchange.nccl.nccl_kernels import SharedLauncher
            from raymoe.exchange.slot_kernel import TakeSlots

            self._kernel = TakeSlots(launcher or world.shared(SharedLauncher), spec, world.rank, self.words)
        else:
            self._hashes = token_hash(world.rank, spec.tokens)
        self.write(self.experts)

    def write(self, placed: object) -> None:
        """Write a placement, a tensor of integers [ranks, slots], in the order of the current stream."""
        experts = self._checked(placed)
        self.words.copy_(self._packed(experts))
        self.experts = experts.to(torch.int32, copy=True)

    def slots_of(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return the slot of each id. -1 stays, and an id without an expert becomes one without a slot."""
        if self._kernel is not None:
            return self._kernel(topk_idx)
        ends, slots = self.words[1 : self._experts + 2].long(), self.words[self._experts + 2 :].long()
        beyond = self._every - self._experts
        ids = topk_idx.long().clamp(max=torch.iinfo(topk_idx.dtype).max - beyond)
        known = (ids >= 0) & (ids < self._experts)
        expert = torch.where(known, ids, 0)
        first = ends[expert]
        copy = self._hashes[: len(ids), None] * (ends[expert + 1] - first) >> 32
        unknown = torch.where(ids < 0, ids, ids + beyond)
        return torch.where(known, slots[first + copy], unknown).to(topk_idx.dtype)

    def _checked(self, experts: object) -> torch.Tensor:
        if not isinstance(experts, torch.Tensor) or experts.is_floating_point() or experts.device.type != "cpu":
            raise ConfigError("a placement is a tensor of integers on the CPU, or has one as `experts`")
        if tuple(experts.shape) != self._shape:
            raise ConfigError(
                f"a placement of shape {list(experts.shape)}; this exchange has {self._shape[1]} slots on each of "
                f"{self._shape[0]} ranks"
            )
        low, high = int(experts.min()), int(experts.max())
        if low < -1 or high >= self._experts:
            raise ConfigError(
                f"a placement has expert {low if low < -1 else high}; experts are 0 to {self._experts - 1}, and -1 is "
                "an empty slot"
            )
        copies = torch.bincount(experts[experts >= 0].long(), minlength=self._experts)
        if not copies.all():
            raise ConfigError(f"a placement leaves out expert {copies.tolist().index(0)}; every expert needs a slot")
        return experts

    def _packed(self, experts: torch.Tensor) -> torch.Tensor:
        flat = experts.flatten().to(torch.int32)
        # Empty slots, of expert -1, come first.
        by_expert = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]
        copies = torch.bincount(flat[flat >= 0].long(), minlength=self._experts)
        words = torch.zeros(len(self.words), dtype=torch.int32, device="cpu")
        words[0] = zlib.crc32(flat.numpy().tobytes()) & 0x7FFFFFFF
        words[2 : self._experts + 2] = copies.cumsum(0)
        words[self._experts + 2 :][: len(by_expert)] = by_expert
        return words
