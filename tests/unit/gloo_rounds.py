"""The backends of GPU ranks that are made of tensor operations, on CPU ranks: Gloo takes NCCL's place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymoe.exchange.backend import Backend
from raymoe.exchange.choice import Wish
from raymoe.exchange.gloo import Gloo
from raymoe.exchange.nccl_allgather import NcclAllgather
from raymoe.exchange.nccl_collective import NcclCollective
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World


class GlooRounds:
    def __init__(self, world: World) -> None:
        self._gloo = Gloo(world)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        self._gloo.all_gather("dispatch", out.view(-1), mine.view(-1))()

    def all_to_all(self, out: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None:
        leaving, taking = torch.cat(list(blocks)).flatten(), [block.numel() for block in out]
        came = torch.empty(sum(taking), dtype=leaving.dtype)
        self._gloo.all_to_all("rows", came, leaving, taking, [block.numel() for block in blocks])()
        for into, rows in zip(out, torch.split(came, taking), strict=True):
            into.copy_(rows.view(into.shape))

    def wait(self, op: str) -> None:
        """Gloo has waited."""

    def wait_for_all(self, op: str) -> None:
        """Gloo has waited."""

    def close(self, together: bool) -> None:
        self._gloo.close(together)


def on_tensors(name: str, world: World, spec: ExchangeSpec, wish: Wish) -> Backend:
    """Takes the place of `choice.make`."""
    backend = {"collective": NcclCollective, "allgather": NcclAllgather}[name]
    return backend(world, spec, world.shared(GlooRounds))
