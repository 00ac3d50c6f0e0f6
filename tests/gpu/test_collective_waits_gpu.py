"""Test that backend `collective` with gradients waits for nothing on the device without a limit."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import PeerTimeout  # noqa: E402
from raymoe.exchange.exchange import Exchange  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe.differentiable import combine, dispatch  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402

pytestmark = NEEDS_GPU

TIMEOUT_S, SLOW_S, SHORT_S = 1.0, 4.0, 0.5
SPEC = ExchangeSpec(tokens=512, hidden=1024, experts=8, topk=2, depth=0)


def slow_kernel() -> None:
    """Enqueue a kernel of about SLOW_S: it stands for one of NCCL that waits for a peer that is gone."""
    torch.cuda._sleep(int(SLOW_S * 1.9e9))


def inputs(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=world.device)
    generator.manual_seed(world.rank)
    x = torch.randn(SPEC.tokens, SPEC.hidden, device=world.device, generator=generator).bfloat16()
    ids = torch.rand(SPEC.tokens, SPEC.experts, device=world.device, generator=generator).topk(SPEC.topk).indices
    return x.requires_grad_(), ids, torch.rand(ids.shape, device=world.device, generator=generator)


def step(exchange: Exchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    got = dispatch(exchange, x, ids, weights)
    return combine(exchange, torch.tanh(got.x), got)


def run_after_a_slow_kernel(world: World) -> dict[str, float]:
    """Return how many seconds each call kept the host while the device was busy, and check that none synchronises."""
    took = {}
    x, ids, weights = inputs(world)
    with Exchange(world, SPEC, backend="collective") as exchange:
        step(exchange, x, ids, weights).sum().backward()  # makes and loads what the calls need
        exchange.check()
        torch.cuda.set_sync_debug_mode("error")
        step(exchange, x, ids, weights).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
        exchange.check()

        for slow in (False, True):  # the first turn loads torch's kernels, which waits for kernels that run
            got = dispatch(exchange, x, ids, weights)
            rows = torch.tanh(got.x)
            dx = torch.ones_like(rows)
            torch.cuda.synchronize()
            if slow:
                slow_kernel()
            start = time.monotonic()
            combine(exchange, rows, got)
            took["combine"] = time.monotonic() - start
            start = time.monotonic()
            torch.autograd.grad(got.x, x, dx)
            took["gradients of dispatch"] = time.monotonic() - start
        start = time.monotonic()
        with pytest.raises(PeerTimeout):  # a dispatch waits for its counts
            dispatch(exchange, x, ids, weights)
        took["dispatch"] = time.monotonic() - start
        torch.cuda.synchronize()
    return took


def test_calls_with_gradients_do_not_wait_for_the_device(ranks: GpuRanks) -> None:
    (took,) = ranks.run(1, run_after_a_slow_kernel, timeout_s=TIMEOUT_S)
    assert took["combine"] < SHORT_S and took["gradients of dispatch"] < SHORT_S, took
    # NCCL's abort waits for the slow kernel too, because it cannot end that one as it ends its own.
    assert TIMEOUT_S <= took["dispatch"] < SLOW_S + SHORT_S, took


def run_beside_a_late_peer(world: World, when: str) -> tuple[str, float]:
    """Let rank 1 come too late; return the error of rank 0, and how long it took."""
    x, ids, weights = inputs(world)
    with Exchange(world, SPEC, backend="collective") as exchange:
        step(exchange, x, ids, weights).sum().backward()
        exchange.check()
        got = dispatch(exchange, x, ids, weights)
        y = combine(exchange, torch.tanh(got.x), got) if when == "backward" else None
        world.barrier("test: both are here")
        if world.rank == 1:
            time.sleep(SLOW_S)
            exchange.close(together=False)
            return "", 0.0
        start = time.monotonic()
        with pytest.raises(PeerTimeout) as raised:
            if y is None:
                combine(exchange, torch.tanh(got.x), got)
            else:
                y.sum().backward()
        return str(raised.value), time.monotonic() - start


@pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each rank; {GPUS} here")
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_peer_that_does_not_come_is_named_in_time(ranks: GpuRanks, when: str) -> None:
    (says, took), _ = ranks.run(2, run_beside_a_late_peer, when, timeout_s=TIMEOUT_S)
    assert "rank 1" in says, says
    assert took < TIMEOUT_S + 2 * SHORT_S
