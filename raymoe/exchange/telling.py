"""How ranks that tell one another everything know of all refusals: what `collective` and `allgather` on GPUs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.refusal import raise_first
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.tensor_plan import Heard, refusals_of, tell, told_length
from raymoe.memory.world import World


class Rounds(Protocol):
    """What is asked of those who move rows here; `nccl_rounds.py` says it."""

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None: ...

    def all_to_all(self, out: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None: ...

    def wait(self, op: str) -> None: ...

    def wait_for_all(self, op: str) -> None: ...


class Telling:
    """Ids, weights and refusals of all ranks."""

    def __init__(self, world: World, spec: ExchangeSpec, rounds: Rounds) -> None:
        self._size, self._spec, self._rounds = world.size, spec, rounds
        # The refusals of all ranks of the first step that was refused since `check` last told of one.
        self._refused = torch.zeros(world.size, 2, dtype=torch.int64, device=world.device)

    def hear(self, tokens: Tokens) -> Heard:
        """Tell all ranks this rank's ids and weights, and hear theirs."""
        told = tell(tokens, self._spec)
        heard = torch.empty(self._size, told_length(self._spec), dtype=told.dtype, device=told.device)
        self._rounds.all_gather(heard, told)
        return Heard.of(heard, self._spec)

    def judge(self, heard: Heard, y: torch.Tensor) -> None:
        """The end of a combine: NaN on all ranks where any refuses the step, which is remembered for `check`."""
        y.masked_fill_(heard.any_refused, torch.nan)
        known = (self._refused[:, 0] != 0).any()
        self._refused.copy_(torch.where(known, self._refused, heard.status))

    def check(self) -> None:
        """Wait for the device, then raise for the first refused step, the same on all ranks."""
        self._rounds.wait_for_all("check")
        refusals = refusals_of(self._refused.cpu())
        if any(refusals):
            self._refused.zero_()
            raise_first(refusals, self._spec)
