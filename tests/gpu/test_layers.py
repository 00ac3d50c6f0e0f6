"""Test a model's layers on GPU ranks: one workspace and one block of rows for all of them, in one CUDA graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda.graph import Graph  # noqa: E402
from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.exchange import Exchange  # noqa: E402
from raymoe.exchange.peer.workspace import Workspace  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU, RANKS  # noqa: E402

pytestmark = NEEDS_GPU

LAYERS, GIB = 58, 2**30
ERROR = 1e-2
"""The largest error allowed for bfloat16 sums, relative to the row; an exchange alone rounds twice."""


def deepseek(ranks: int) -> ExchangeSpec:
    """Return the spec of DeepSeek-V3 (three ranks: 255 experts), for 1.25 times the mean rows of uniform routing."""
    experts = 256 // ranks * ranks
    rows = 4096 * 8 * 5 // 4 + experts // ranks * 16
    return ExchangeSpec(tokens=4096, hidden=7168, experts=experts, topk=8, alignment=16, capacity=rows, depth=0)


def run_layers(world: World) -> tuple[list[float], bool, int, int]:
    """Run all layers twice in one graph.

    Return the error of each layer, whether the second replay gives the same bits, the bytes of the workspace, and the
    bytes that 58 exchanges take besides.
    """
    spec, device = deepseek(world.size), world.device
    generator = torch.Generator(device=device)
    generator.manual_seed(world.rank)
    x = torch.randn(spec.tokens, spec.hidden, device=device, generator=generator).bfloat16()
    ids = [
        torch.rand(spec.tokens, spec.experts, device=device, generator=generator).topk(spec.topk).indices
        for _ in range(LAYERS)
    ]
    weights = torch.rand(LAYERS, spec.tokens, spec.topk, device=device, generator=generator)
    y = torch.empty(LAYERS, *x.shape, dtype=x.dtype, device=device)
    rows = torch.empty(spec.rows(world.size), spec.hidden, dtype=x.dtype, device=device)
    space = Workspace(world, spec)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layers = [Exchange(world, spec, "fused", workspace=space) for _ in range(LAYERS)]

    def model() -> None:
        for layer, exchange in enumerate(layers):
            got = exchange.dispatch(x, ids[layer], weights[layer], out=rows)
            exchange.combine(got.x, got, out=y[layer])

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph = Graph.capture(world.gpu, stream.cuda_stream, model, *layers)
        y.fill_(torch.nan)
        graph.replay(stream.cuda_stream)
        layers[-1].check()
        first = y.clone()
        y.fill_(torch.nan)
        graph.replay(stream.cuda_stream)
        layers[-1].check()
    taken = torch.cuda.memory_allocated() - before - first.nbytes
    errors = []
    for layer in range(LAYERS):  # experts change nothing: y is x times the sum of the weights
        want = x.double() * weights[layer].double().sum(1, keepdim=True)
        errors.append(float(((y[layer].double() - want).abs() / want.abs().amax(1, keepdim=True)).max()))
    same = torch.equal(first, y)
    graph.close()
    for exchange in layers:
        exchange.close()
    nbytes = space.nbytes
    space.close()
    return errors, same, nbytes, taken


def test_58_layers_of_deepseek_v3_share_a_workspace(ranks) -> None:
    if torch.cuda.get_device_capability() < FUSED_CAPABILITY:
        pytest.skip(f"needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    size = min(RANKS, 4)
    for errors, same, space, taken in ranks.run(size, run_layers):
        assert max(errors) <= ERROR and same, errors
        assert space < size * GIB / 4, "the slots of one layer: both parities, both ways"
        assert taken < LAYERS * 4 * 2**20, "a layer keeps the metadata that its combine needs, not rows"
