"""An exchange between domains on one GPU: the rail gives each rank its own blocks back in place of those of its peers.

So the ranks of all domains have the same tokens. The rail moves bytes no faster than a network would: it copies a piece
and then waits on the device. So the time is that of one rank whose peers are never late.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.domains.chunks import sms_beside
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu, RailParts
from raymoe.exchange.nccl.nccl_kernels import SharedLauncher
from raymoe.exchange.peer.fused import FUSED
from raymoe.exchange.peer.fused_chunks import CHUNKS, ChunksBackend
from raymoe.exchange.peer.peer_backend import PeerBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock
from tests.unit.exchange.domains.domain_reference import ids_inside

PIECE = 1 << 20
"""Bytes that arrive at once."""
SAMPLES = 11


class MirrorRail:
    """A rail of several domains. `cycles` may change between operations; a graph keeps those of its capture."""

    capturable = True

    def __init__(self, domains: int) -> None:
        self._domains = domains
        self.aborted = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.cycles: int | None = 0
        """To wait after each piece. None: nothing moves, and what has arrived before stays."""

    def gather(self, op: str, out: torch.Tensor, mine: torch.Tensor) -> Callable[[], None]:  # noqa: ARG002
        self._move(list(out.view(self._domains, -1)[1:]), mine)
        return lambda: None

    def swap_all(self, op: str, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Callable[[], None]:  # noqa: ARG002
        for into, given in zip(received, sent, strict=True):
            self._move(list(into[1:]), given[0])
        return lambda: None

    def settle(self, op: str) -> None:  # noqa: ARG002
        torch.cuda.synchronize()

    def lagging(self) -> int:
        return 0

    def fail(self, reason: str) -> None:  # noqa: ARG002  there is no other rank
        self.abort()

    def check_failed(self) -> None: ...

    def abort(self) -> None:
        self.aborted.fill_(1)

    def close(self, together: bool) -> None: ...

    def _move(self, blocks: list[torch.Tensor], mine: torch.Tensor) -> None:
        if self.cycles is None:
            return
        wait: Any = torch.cuda._sleep
        given = mine.view(-1).view(torch.uint8)
        for block in blocks:
            into = block.view(-1).view(torch.uint8)
            for begin in range(0, len(given), PIECE):
                piece = slice(begin, begin + PIECE)
                into[piece].copy_(given[piece])
                if self.cycles:
                    wait(self.cycles * len(given[piece]) // PIECE)


class OneRank:
    """One rank of `domains` domains of one rank each, and the exchanges whose time is asked for."""

    def __init__(self, world: World, spec: ExchangeSpec, domains: int) -> None:
        self._world, self.spec = world, spec
        self._spec_inside = spec.inside(domains)
        self.rail = MirrorRail(domains)
        self._spanning: Any = SimpleNamespace(
            domains=domains, size=domains, rank=0, device=world.device, domain=world, waiter=world.waiter
        )
        self._spanning.swap = lambda value, _: [value] * domains
        self._launcher = SharedLauncher(world)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
        self._clock = TorchGraphClock(world, self._stream, torch.cuda.synchronize, captured=True)
        generator = torch.Generator(world.device).manual_seed(1)
        T, K = spec.tokens, spec.topk
        self.x = torch.randn(T, spec.hidden, device=world.device, generator=generator).bfloat16()
        chances = torch.rand(T, spec.experts, device=world.device, generator=generator)
        self.tokens = Tokens(self.x, chances.topk(K).indices, torch.rand(T, K, device=world.device), None)

    def inside(self) -> PeerBackend:
        """Make an exchange as there is one inside each domain."""
        return PeerBackend(self._world, self._spec_inside, None, self._world.gpu.sms, FUSED)

    def tokens_inside(self) -> Tokens:
        """The tokens of all domains, as the exchange inside this one gets them."""
        N, T = self._spanning.domains, self.spec.tokens
        shape = DomainShape(N, 1, 0, T, self.spec.local_experts(N))
        ids, weights = self.tokens.topk_idx, self.tokens.topk_weights
        return Tokens(self.x.repeat(N, 1), ids_inside(ids.expand(N, *ids.shape), shape), weights.repeat(N, 1), None)

    def between(self, chunk: int = 0) -> HierarchicalGpu:
        """Make an exchange between the domains."""
        sms = self._world.gpu.sms
        if chunk:
            beside = sms_beside(None, sms)
            inside: PeerBackend = ChunksBackend(self._world, self._spec_inside, None, beside, CHUNKS)
        else:
            inside = self.inside()
        return HierarchicalGpu(self._spanning, self.spec, RailParts(self._launcher, self.rail, inside, chunk))

    def at(self, cycles: int | None, work: Callable[[], object]) -> Callable[[], object]:
        """Return `work` with a rail of this pace."""

        def run() -> None:
            self.rail.cycles = cycles
            work()

        return run

    def us(self, works: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median time of each work, captured, on a cold L2 cache. Samples take turns."""
        with torch.cuda.stream(self._stream):
            for work in works.values():
                work()
            torch.cuda.synchronize()
            ready = {name: self._clock.timed(work) for name, work in works.items()}  # type: ignore[arg-type]
            samples = [{name: self._clock.us_cold(each) for name, each in ready.items()} for _ in range(SAMPLES)]
        return {name: statistics.median(sample[name] for sample in samples) for name in works}

    def cycles_at(self, gbps: float) -> tuple[int, float]:
        """Return the cycles by which the rail moves so many GB/s each way, and the rate that it then has."""
        blocks = torch.empty(self._spanning.domains, 64 * PIECE, dtype=torch.uint8, device=self._world.device)
        nbytes = blocks[1:].nbytes

        def us_at(cycles: int) -> float:
            gather = self.at(cycles, lambda: self.rail.gather("pace", blocks.flatten(), blocks[0]))
            return self.us({"gather": gather})["gather"]

        wanted, guess = nbytes / gbps / 1e3, 20_000
        us, without = us_at(guess), us_at(1)
        for _ in range(3):
            guess = max(1, round(guess * (wanted - without) / (us - without)))
            us = us_at(guess)
        return guess, nbytes / us / 1e3

    def close(self) -> None:
        self._clock.close()
        self._launcher.close(True)
