"""The NCCL backends of GPU ranks, on CPU ranks: Gloo replaces NCCL, and the emulator replaces the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch

from raymoe.errors import PeerTimeout
from raymoe.exchange.backend import Backend
from raymoe.exchange.choice import Choice
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu, RailParts
from raymoe.exchange.nccl.nccl_backends import NcclAllgather, NcclCollective
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.token_rows import TokenBackend
from raymoe.memory.world import World
from raymoe.net.gloo import Gloo
from raymoe.net.gloo_rail import GlooRail
from raymoe.net.nccl_rounds import Lagging
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher


class GlooRounds:
    def __init__(self, world: World) -> None:
        self._world, self._gloo = world, Gloo(world)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        self._gloo.all_gather("dispatch", out.view(-1), own.reshape(-1).clone())()

    def exchange(self, receives: Mapping[int, torch.Tensor], sends: Mapping[int, torch.Tensor]) -> None:
        ranks, nothing = range(self._world.size), torch.empty(0, dtype=torch.uint8)
        blocks = [sends.get(rank, nothing).flatten() for rank in ranks]
        sent_rows, received_sizes = torch.cat(blocks), [receives.get(rank, nothing).numel() for rank in ranks]
        received_rows = torch.empty(sum(received_sizes), dtype=torch.uint8)
        self._gloo.all_to_all("rows", received_rows, sent_rows, received_sizes, [block.numel() for block in blocks])()
        for rank, rows in enumerate(torch.split(received_rows, received_sizes)):
            if rank in receives:
                receives[rank].copy_(rows.view(receives[rank].shape))

    def wait(self, op: str, is_done: Callable[[], bool], lagging: Lagging | None = None) -> None:
        """Wait for the ranks' hosts; Gloo and the kernels have already waited."""
        start = time.monotonic()
        if not self._world.waiter.until(op, lagging()[0] if lagging else 0, is_done, self._world.timeout_s):
            assert lagging is not None
            peer, seen, expected = lagging()
            raise PeerTimeout(op, expected, peer, expected, seen, time.monotonic() - start, self._world.rank)

    def wait_for_all(self, op: str) -> None:
        """Do nothing: Gloo has already waited."""

    def read(self, op: str, memory: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return memory.clone()

    def close(self, together: bool) -> None:
        self._gloo.close(together)


class TensorRail(GlooRail):
    """A rail that replaces that of GPU ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._me = world.rank // world.domain.size
        self.aborted = torch.zeros(1, dtype=torch.int64)

    def swap_all(self, op: str, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Swap one after another. This rank's own blocks get bytes that mean nothing."""
        for into, blocks in zip(received, sent, strict=True):
            own_block = into[self._me].clone()
            self.swap(op, into, blocks)()
            if op == "combine" and into.dtype != torch.int64:
                into[self._me].view(torch.uint8).fill_(255)
            else:
                into[self._me] = own_block
        return lambda: None


def on_tensors(choice: Choice, world: World, spec: ExchangeSpec, workspace: None) -> Backend:
    """Make an NCCL backend over Gloo and the emulator; tests patch `choice.make_backend` with it.

    Between domains it is the backend of GPU ranks there, around such a backend inside the domain.
    """
    if spec.by_token:
        parts = zip(choice.parts, spec.parts(world.size), strict=True)
        return TokenBackend(world, spec, [on_tensors(part, world, its, workspace) for part, its in parts], None)
    if world.domains > 1:
        launcher, rail = world.shared(EmulatedLauncher), world.shared(TensorRail)
        inside = on_tensors(choice, world.domain, spec.inside(world.domains), workspace)
        assert isinstance(inside, NcclAllgather)
        return HierarchicalGpu(world, spec, RailParts(launcher, rail, inside))
    backend = {"collective": NcclCollective, "allgather": NcclAllgather}[choice.backend]
    with mock.patch("raymoe.exchange.nccl.nccl_kernels.ENTRIES_A_RUN", 8):
        return backend(world, spec, world.shared(GlooRounds), world.shared(EmulatedLauncher))
