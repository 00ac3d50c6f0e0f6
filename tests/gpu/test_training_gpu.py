"""Test the calls of a training step on a GPU rank: captured with the step, replayed, and beside torch's own norm."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import (  # noqa: E402
    LayerForm,
    MoELayer,
    RouterForm,
    average_expert_gradients,
    clip_grad_norm,
    expert_load,
    routing_stats,
    update_router_bias,
)
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
TOKENS, EXPERTS, REPLAYS, SPEED, MAX_NORM = 64, 8, 3, 0.25, 0.01
SPEC = ExchangeSpec(tokens=TOKENS, hidden=256, experts=EXPERTS, topk=2, dtype="bfloat16", depth=0)
FORM = LayerForm(128, RouterForm(EXPERTS, 2, score="sigmoid"), shared=64, norm=1e-6, residual=True)


def captured(world: World) -> tuple[list[list[float]], list[int], list[int], list[list[float]]]:
    """Capture a step with all its calls; return its norms beside torch's, the loads, and the bias before and after."""
    layer = MoELayer(world, SPEC, FORM, seed=1)
    x = torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(world.device)
    bias, parameters = layer.gate.e_score_correction_bias, list(layer.parameters())

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        y, routing = layer(x, return_routing=True)
        with torch.autograd.set_multithreading_enabled(False):  # all on this thread, which may be capturing
            y.float().square().mean().backward()
        average_expert_gradients(layer)
        squares = torch.stack([parameter.grad.float().square().sum() for parameter in parameters])
        norm = clip_grad_norm(layer, MAX_NORM)
        update_router_bias(layer, SPEED)
        return norm, squares.sum().sqrt(), expert_load(routing.topk_idx, EXPERTS)

    side = torch.cuda.Stream(world.device)
    side.wait_stream(torch.cuda.current_stream())
    norms, biases = [], []
    with torch.cuda.stream(side):
        step()
        routing_stats(layer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            norm, wanted, load = step()
        counted = torch.zeros_like(load)
        for _ in range(REPLAYS):
            before = bias.clone()
            graph.replay()
            norms.append([float(norm), float(wanted)])
            counted += load
            biases.append((bias - before - SPEED * torch.sign(load.sum() - EXPERTS * load)).tolist())
        stats = routing_stats(layer)[""]
        layer.exchange.check()
    del graph
    return norms, stats.load, counted.tolist(), biases


def test_the_calls_of_a_step_are_captured_with_it(ranks: GpuRanks) -> None:
    for norms, load, counted, biases in ranks.run(1, captured):
        assert load == counted and sum(load) == REPLAYS * TOKENS * 2
        assert all(norm == pytest.approx(wanted, rel=1e-5) and norm > MAX_NORM for norm, wanted in norms)
        assert all(abs(error) < 1e-6 for errors in biases for error in errors)
