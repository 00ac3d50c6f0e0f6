"""Routes are recorded and replayed in CUDA graphs, and a token has the same bits in any batch, on GPU ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import (  # noqa: E402
    LayerForm,
    MoELayer,
    RouterForm,
    count_routes,
    expert_load,
    record_routes,
    replay_routes,
    rms_norm,
)
from raymoe.moe.router import route  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS, GpuRanks  # noqa: E402
from tests.unit.moe.bits import same_bits  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
H, K, T = 512, 4, 700


def layer_of(world: World, backend: str, dtype: str, tokens: int = T, **more: Any) -> MoELayer:
    experts = 8 * world.size
    spec = ExchangeSpec(tokens=tokens, hidden=H, experts=experts, topk=K, dtype=dtype, depth=0)
    router = RouterForm(experts, K, score="sigmoid", scale=2.5)
    form = LayerForm(256, router, shared=128, norm=1e-6, residual=True, deterministic="batch")
    return MoELayer(world, replace(spec, **more), form, backend=backend, seed=0)


def drawn(tokens: int, seed: int, dtype: str, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)).to(device, getattr(torch, dtype))


# Batch invariance.


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_and_choice_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    source = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(4096, 7168, device="cuda", generator=source).to(dtype)
    weight, logits = x[0].clone(), torch.randn(4096, 256, device="cuda", generator=source).to(dtype)
    form = RouterForm(256, 8, score="sigmoid", groups=8, topk_groups=4)
    norm, (ids, weights) = rms_norm(x, weight, 1e-6), route(logits, form)
    for count in (1, 2, 7, 128, 511, 512, 513, 4000):
        own = slice(3, 3 + count)
        assert same_bits(rms_norm(x[own].clone(), weight, 1e-6), norm[own])
        own_ids, own_weights = route(logits[own].clone(), form)
        assert torch.equal(own_ids, ids[own]) and same_bits(own_weights, weights[own])


def results_of_layers(world: World, backend: str, dtype: str) -> list[str]:
    """Return the ways in which three tokens have other bits than in a batch of their own."""
    own, wrong = drawn(3, 10 + world.rank, dtype, world.device), []
    with torch.no_grad():
        alone = layer_of(world, backend, dtype)(own)
    for name, more in (("as it is", {}), ("few tokens", {"tokens": 64}), ("alignment", {"alignment": 128})):
        layer = layer_of(world, backend, dtype, **more)
        for count in (3, 5, 17, 64, 300, 700):
            if count > layer.exchange.spec.tokens:
                continue
            for first in (0, count - 3):
                x = drawn(count, 100 + count + world.rank, dtype, world.device)
                x[first : first + 3] = own
                for grad in (False, True):
                    with torch.set_grad_enabled(grad):
                        y = layer(x)
                    if not same_bits(y[first : first + 3], alone):
                        wrong.append(f"{name}, {count} tokens, from {first}, gradients {grad}")
        layer.exchange.check()
    return wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["fused", "staged", "collective"])
def test_tokens_of_a_layer_have_the_same_bits_in_any_batch(ranks: GpuRanks, backend: str, dtype: str) -> None:
    size = min(RANKS, 4)
    assert ranks.run(size, results_of_layers, backend, dtype) == [[]] * size


# Routes in CUDA graphs.


def captured_routes(world: World) -> list[bool]:
    layer = layer_of(world, "fused", "bfloat16", tokens=64)
    x, others = (drawn(64, seed + world.rank, "bfloat16", world.device) for seed in (1, 50))
    checks, static = [], x.clone()
    side: Any = torch.cuda.Stream(world.device)
    side.wait_stream(torch.cuda.current_stream(world.device))
    with torch.no_grad(), torch.cuda.stream(side):
        wanted = [layer.gate(layer.norm(rows)).topk_idx for rows in (x, others)]
        layer(static)  # loads the kernels
        with record_routes(layer, tokens=128) as routes, count_routes(layer) as counted:
            layer(static)
            graph: Any = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                layer(static)
        routes.clear()
        counted.clear()
        for rows in (x, others):
            static.copy_(rows)
            graph.replay()
        both = torch.cat(wanted)
        checks.append(torch.equal(routes.ids()[0].long(), both.cpu()))
        checks.append(torch.equal(counted.load()[0], expert_load(both, layer.exchange.spec.experts)))
        given = both.view(2, 64, K)
        with (
            replay_routes(layer, given[1:].cpu().to(torch.int16)) as replayed,
            record_routes(layer, tokens=64) as taken,
        ):
            layer(static)
            taken.clear()
            replay: Any = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(replay, stream=side, capture_error_mode="thread_local"):
                y = layer(static)
        static.copy_(x)
        for ids in (given[1:], given[:1]):
            taken.clear()
            replayed.load(ids)
            replay.replay()
            checks.append(torch.equal(taken.ids()[0].long(), ids[0].cpu()))
        checks.append(same_bits(y, layer(x)))  # the routes of x itself
        layer.exchange.check()
    return checks


def test_captured_layers_record_count_and_replay(ranks: GpuRanks) -> None:
    size = min(RANKS, 4)
    for checks in ranks.run(size, captured_routes):
        assert checks == [True] * 5
