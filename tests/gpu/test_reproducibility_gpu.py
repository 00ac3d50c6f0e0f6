"""Routes are recorded and replayed in CUDA graphs, and a token has the same bits in any batch, on GPU ranks."""

from __future__ import annotations

from collections.abc import Callable
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
    add_rms_norm,
    count_routes,
    expert_load,
    layer_norm,
    record_routes,
    replay_routes,
    rms_norm,
)
from raymoe.moe.layer_form import Mlp  # noqa: E402
from raymoe.moe.router import replay_route, route  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS, GpuRanks  # noqa: E402
from tests.unit.moe.bits import same_bits  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
H, K, T = 512, 4, 700
COLLECTIVE = pytest.param(
    "collective",
    marks=pytest.mark.skipif(GPUS < 2, reason=f"collective uses NCCL, which needs a GPU for each rank: {GPUS} here"),
)


def layer_of(world: World, backend: str, dtype: str, tokens: int = T, **more: Any) -> MoELayer:
    experts = 8 * world.size
    spec = ExchangeSpec(tokens=tokens, hidden=H, experts=experts, topk=K, dtype=dtype, depth=0)
    router = RouterForm(experts, K, score="sigmoid", scale=2.5)
    form = LayerForm(256, router, shared=128, norm=1e-6, residual=True, deterministic="batch")
    return MoELayer(world, replace(spec, **more), form, backend=backend, seed=0)


def drawn(tokens: int, seed: int, dtype: str, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)).to(device, getattr(torch, dtype))


# Batch invariance.


COUNTS = (1, 2, 7, 128, 132, 133, 511, 512, 513, 1000, 1024, 1025, 4000)
"""Numbers of rows on both sides of those at which the fastest kernel of a norm changes."""
NORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, **how: rms_norm(x, weight, 1e-6, **how),
    "add_rms_norm": lambda x, weight, **how: add_rms_norm(x, x.flip(-1), weight, 1e-6, **how),
    "layer_norm": lambda x, weight, **how: layer_norm(x, weight, weight, 1e-6, **how),
}


def counts_with_other_bits(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[int]:
    """Return the numbers of rows in which a row has other bits than among all of them."""
    whole, others = flat(function(x)), []
    for count in COUNTS:
        own = slice(3, 3 + count)
        if not all(
            same_bits(part, rows[own]) for part, rows in zip(flat(function(x[own].clone())), whole, strict=True)
        ):
            others.append(count)
    return others


def flat(results: Any) -> list[torch.Tensor]:
    return [results] if torch.is_tensor(results) else [tensor for each in results for tensor in flat(each)]


def rows_on_gpu(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator("cuda").manual_seed(1)
    return torch.randn(4096, hidden, device="cuda", generator=source).to(dtype)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [512, 4096, 7168, 16384])
def test_a_batch_invariant_norm_gives_a_row_the_same_bits_in_any_batch(hidden: int, dtype: torch.dtype) -> None:
    x = rows_on_gpu(hidden, dtype)
    weight = x[0].clone()
    assert counts_with_other_bits(lambda rows: rms_norm(rows, weight, 1e-6, batch_invariant=True), x) == []
    leaf = weight.clone().requires_grad_()  # a call with gradients
    assert counts_with_other_bits(lambda rows: rms_norm(rows, leaf, 1e-6, batch_invariant=True), x) == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("sms", [None, 48])
@pytest.mark.parametrize("output", [None, "float8_e4m3"])
@pytest.mark.parametrize("name", NORMS)
def test_other_batch_invariant_norms_do_too(name: str, output: str | None, sms: int | None) -> None:
    x = rows_on_gpu(7168, torch.bfloat16)
    weight = x[0].clone()
    how = {"output": output, "sms": sms, "batch_invariant": True}
    assert counts_with_other_bits(lambda rows: NORMS[name](rows, weight, **how), x) == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "chosen"])
def test_the_choice_gives_a_row_the_same_bits_in_any_batch(score: Any, dtype: torch.dtype) -> None:
    """Also where recorded ids, which are another choice, take its place."""
    logits = rows_on_gpu(256, dtype)
    form = RouterForm(256, 8, score=score, groups=8, topk_groups=4) if score != "chosen" else RouterForm(256, 8, score)
    assert counts_with_other_bits(lambda rows: route(rows, form), logits) == []
    recorded = torch.cat((logits.float(), torch.arange(4096.0, device="cuda")[:, None]), dim=1)

    def replayed(rows: torch.Tensor) -> Any:
        ids = (rows[:, -1:].long() * 17 + torch.arange(8, device="cuda") * 31) % 256
        return replay_route(rows[:, :-1].contiguous(), form, ids)

    assert counts_with_other_bits(replayed, recorded) == []


def shared_expert(rows: int, dtype: torch.dtype, ffn: int) -> tuple[Mlp, torch.Tensor]:
    source = torch.Generator("cuda").manual_seed(2)
    sizes = (2 * ffn, H), (H, ffn), (rows, H)
    gate_up, down, x = (torch.randn(*size, device="cuda", generator=source) / size[1] ** 0.5 for size in sizes)
    mlp = Mlp(gate_up.to(dtype), down.to(dtype))
    mlp.by_row = True
    return mlp, (x * H**0.5).to(dtype).requires_grad_()


def exact_results(mlp: Mlp, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of a SwiGLU expert, in float64."""
    leaves = [each.detach().double().requires_grad_() for each in (x, mlp.gate_up_proj, mlp.down_proj)]
    gate, up = (leaves[0] @ leaves[1].T).chunk(2, dim=1)
    y = (torch.nn.functional.silu(gate) * up) @ leaves[2].T
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ffn", [256, 264, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 128, 700])
def test_a_shared_expert_is_right_and_has_the_same_bits_compiled_and_in_any_batch(
    rows: int, dtype: torch.dtype, ffn: int
) -> None:
    """product.cu takes 256 of ffn; 264 and 40 go in tiles."""
    mlp, x = shared_expert(rows, dtype, ffn)
    dy = torch.randn(rows, H, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).to(dtype)
    torch.compiler.reset()
    found = []
    for function in (mlp, torch.compile(mlp, fullgraph=True)):
        y = function(x)
        found.append([y.detach(), *torch.autograd.grad(y, (x, mlp.gate_up_proj, mlp.down_proj), dy)])
        with torch.no_grad():
            assert same_bits(function(x), y.detach())
    eager, compiled = found
    assert same_bits(eager[0], compiled[0])
    for number, results in enumerate(zip(eager, compiled, exact_results(mlp, x, dy), strict=True)):
        *results, exact = (each.double() for each in results)
        errors = [float((each - exact).norm() / exact.norm()) for each in results]
        assert max(errors) < (0.01 if dtype == torch.bfloat16 else 0.002), (number, errors)
    with torch.no_grad():
        assert counts_with_other_bits(mlp, shared_expert(4096, dtype, ffn)[1].detach()) == []


@pytest.mark.usefixtures("gpu")
def test_a_shared_expert_whose_weights_begin_at_an_odd_address_goes_in_tiles() -> None:
    mlp, x = shared_expert(700, torch.bfloat16, 256)
    shifted = torch.empty(mlp.down_proj.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(mlp.down_proj)
    with torch.no_grad():
        near = mlp(x)
        mlp.down_proj = torch.nn.Parameter(shifted.copy_(mlp.down_proj))
        assert counts_with_other_bits(mlp, shared_expert(4096, torch.bfloat16, 256)[1].detach()) == []
        torch.testing.assert_close(mlp(x), near)


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
@pytest.mark.parametrize("backend", ["fused", "staged", COLLECTIVE])
def test_tokens_of_a_layer_have_the_same_bits_in_any_batch(ranks: GpuRanks, backend: str, dtype: str) -> None:
    size = min(GPUS if backend == "collective" else RANKS, 4)
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
