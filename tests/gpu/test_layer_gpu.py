"""Test gradients of the exchange, and whole layers, on GPU ranks: eager, captured, and against a layer on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe.layer import LayerForm, MoELayer  # noqa: E402
from raymoe.moe.router_formulas import RouterForm  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS, GpuRanks  # noqa: E402
from tests.unit.exchange_cases import ROUTINGS, Case  # noqa: E402
from tests.unit.gradient_cases import judge_gradients, run_gradients  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("backend", ["fused", "staged"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_gradients_equal_autograd_in_float64(
    ranks: GpuRanks, backend: str, layout: str, dtype: str, bound: float
) -> None:
    size = min(RANKS, 4)
    spec = ExchangeSpec(tokens=40, hidden=64, experts=4 * size, topk=3, dtype=dtype, layout=layout, padding="zero")
    for weighted in (True, False):
        case = Case(size, spec, backend, ROUTINGS, seed=3, weighted=weighted, prefix=True)
        judge_gradients(case, ranks.run(size, run_gradients, case), bound)


def spec_of(size: int, dtype: str) -> ExchangeSpec:
    return ExchangeSpec(tokens=64, hidden=256, experts=4 * size, topk=2, dtype=dtype, depth=0)


def form_of(size: int) -> LayerForm:
    return LayerForm(128, RouterForm(4 * size, 2, score="sigmoid", groups=size, topk_groups=1), shared=64)


def batch_of(rank: int) -> torch.Tensor:
    """A rank's tokens, in bfloat16: 64 of rank 0, fewer of others."""
    return torch.randn(64 - 9 * rank, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()


def results(layer: MoELayer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(y.float().square().sum(), [x, *parameters])
    return {"y": y.detach().float().cpu()} | {
        name: g.float().cpu() for name, g in zip(("x", *names), found, strict=True)
    }


def run_layer(world: World) -> dict[str, float]:
    """Return the largest differences from a layer of one CPU rank, relative to the largest element."""
    layer = MoELayer(world, spec_of(world.size, "bfloat16"), form_of(world.size), seed=1)
    found = results(layer, batch_of(world.rank).to(world.device))
    alone = World.open(0, 1, name="reference")
    alone.wire([alone.descriptor()])
    with alone:
        reference = MoELayer(alone, spec_of(world.size, "float32"), form_of(world.size), seed=1)
        wanted = [results(reference, batch_of(rank).float()) for rank in range(world.size)]
    errors = {}
    for name, have in found.items():
        want = wanted[world.rank][name]
        if name.startswith("experts."):
            want = torch.stack([each[name] for each in wanted]).sum(dim=0).chunk(world.size)[world.rank]
        errors[name] = float((have - want).abs().max() / want.abs().max())
    return errors


def test_a_layer_equals_one_on_the_cpu(ranks: GpuRanks) -> None:
    for errors in ranks.run(min(RANKS, 4), run_layer):
        assert max(errors.values()) <= 5e-2, errors


def run_captured(world: World) -> list[bool]:
    """Capture a forward pass, and replay it with other tokens, which go to other experts."""
    layer = MoELayer(world, spec_of(world.size, "bfloat16"), form_of(world.size), seed=1)
    x = batch_of(0).to(world.device)
    side, same = torch.cuda.Stream(world.device), []
    side.wait_stream(torch.cuda.current_stream(world.device))
    with torch.no_grad(), torch.cuda.stream(side):
        layer(x)  # libraries allocate at a first call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            y = layer(x)
        for seed in range(3):
            x.copy_(batch_of(0).roll(seed, dims=1).to(world.device))
            graph.replay()
            replayed = y.clone()
            same.append(torch.equal(replayed, layer(x)))
        layer.exchange.check()
    del graph
    return same


def test_a_captured_layer_is_replayed_with_other_routing(ranks: GpuRanks) -> None:
    for same in ranks.run(min(RANKS, 4), run_captured):
        assert same == [True, True, True]
