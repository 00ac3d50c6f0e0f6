"""Test gradients of the exchange, and whole layers, on GPU ranks: eager, captured, and against a layer on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.backend import Dispatched  # noqa: E402
from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.exchange import Exchange  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe.expert_rows import Groups  # noqa: E402
from raymoe.moe.layer import LayerForm, MoELayer  # noqa: E402
from raymoe.moe.router_formulas import RouterForm  # noqa: E402
from raymoe.moe.weights import ExpertShape, expert_weights, generator, mlp_weights  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, RANKS, GpuRanks  # noqa: E402
from tests.unit.exchange.exchange_cases import MANY, ROUTINGS, Case, open_exchange  # noqa: E402
from tests.unit.moe.gradient_cases import judge_gradients, run_gradients  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("backend", ["fused", MANY, "staged"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_gradients_equal_autograd_in_float64(
    ranks: GpuRanks, backend: str, layout: str, dtype: str, bound: float
) -> None:
    size = min(RANKS, 4)
    spec = ExchangeSpec(tokens=40, hidden=64, experts=4 * size, topk=3, dtype=dtype, layout=layout, padding="zero")
    for weighted, exact in ((True, False), (False, False), (True, True), (False, True)):
        case = Case(size, spec, backend, ROUTINGS, seed=3, weighted=weighted, prefix=True, exact=exact)
        judge_gradients(case, ranks.run(size, run_gradients, case), bound)


def known_rows_differ(exchange: Exchange, got: Dispatched, x: torch.Tensor, rows: torch.Tensor) -> int:
    """Send -2 times the rows of a dispatch to its places; return how many of the places then hold another row."""
    exchange.dispatch_known(x, got, rows)
    experts = Groups(got.expert_offsets, got.expert_counts).expert_of_row(len(rows))
    there = (experts < len(got.expert_counts))[:, None]
    return int(((rows != -2 * got.x) & there).any(dim=1).sum())


def run_known(world: World, spec: ExchangeSpec, backend: str) -> list[int]:
    """Two dispatches are outstanding. Rows follow each of them, eagerly and in a graph that is replayed."""
    wrong = []
    with open_exchange(world, Case(world.size, spec, backend, ())) as exchange:
        assert exchange.keeps_places
        given, gots, outs = [], [], []
        for step in range(2):
            source = torch.Generator().manual_seed(10 * world.rank + step)
            tokens = spec.tokens - 37 * world.rank * step
            x = torch.randn(tokens, spec.hidden, generator=source).to(world.device, torch.bfloat16)
            scores = torch.rand(tokens, spec.experts, generator=source).to(world.device)
            given.append((x, *reversed(scores.topk(spec.topk))))
            outs.append(torch.empty(spec.rows(world.size), spec.hidden, dtype=x.dtype, device=world.device))
            gots.append(exchange.dispatch(*given[-1][:2], given[-1][2].float(), out=outs[-1]))
        for step in (0, 1, 1, 0):
            rows = torch.full_like(outs[step], torch.nan)
            wrong.append(known_rows_differ(exchange, gots[step], -2 * given[step][0], rows))
        rows, dy = torch.full_like(outs[0], torch.nan), -2 * given[0][0]
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(world.device)
        torch.cuda.synchronize()  # no eager operation may run on another stream than the capture's
        with torch.cuda.stream(side):
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                got = exchange.dispatch(*given[0][:2], given[0][2].float(), out=outs[0])
                exchange.dispatch_known(dy, got, rows)
                y = exchange.combine(rows, got)
            for _ in range(3):
                graph.replay()
                wrong.append(known_rows_differ(exchange, got, dy, torch.full_like(rows, torch.nan)))
            same = torch.equal(y, exchange.combine(rows, got))
        exchange.check()
        del graph
    return [*wrong, int(not same)]


@pytest.mark.parametrize("backend", [MANY, "staged"])
def test_rows_of_known_routing_go_to_the_places_of_their_dispatch(ranks: GpuRanks, backend: str) -> None:
    """With layout rank the gradients above cover them: rows in slots are gone with the next dispatch."""
    size = min(RANKS, 4)
    spec = ExchangeSpec(tokens=700, hidden=2048, experts=8 * size, topk=4, depth=0, padding="zero")
    for wrong in ranks.run(size, run_known, spec, backend):
        assert wrong == [0] * 8


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


def draw_on_the_gpu(layer: MoELayer, device: torch.device) -> None:
    """Give a layer on the CPU the weights that a GPU draws."""
    form, experts, hidden = form_of(1), layer.experts, layer.exchange.spec.hidden
    shared = mlp_weights(ExpertShape(hidden, form.shared, torch.bfloat16), generator("shared", 1, device=device))
    with torch.no_grad():
        for expert in range(len(experts.down_proj)):
            drawn = expert_weights(ExpertShape(hidden, form.ffn, torch.bfloat16), 1, expert, device)
            experts.gate_up_proj[expert], experts.down_proj[expert] = drawn.gate_up.cpu(), drawn.down.cpu()
        layer.gate.weight.copy_(layer.gate.weight.bfloat16())
        layer.shared_experts.gate_up_proj.copy_(shared.gate_up)
        layer.shared_experts.down_proj.copy_(shared.down)


def run_layer(world: World) -> dict[str, float]:
    """Return the largest differences from a layer of one CPU rank, relative to the largest element."""
    layer = MoELayer(world, spec_of(world.size, "bfloat16"), form_of(world.size), seed=1)
    found = results(layer, batch_of(world.rank).to(world.device))
    alone = World.open(0, 1, name="reference")
    alone.wire([alone.descriptor()])
    with alone:
        reference = MoELayer(alone, spec_of(world.size, "float32"), form_of(world.size), seed=1)
        draw_on_the_gpu(reference, world.device)
        wanted = [results(reference, batch_of(rank).float()) for rank in range(world.size)]
    errors = {}
    for name, have in found.items():
        want = wanted[world.rank][name]
        if name.startswith("experts."):
            want = torch.stack([each[name] for each in wanted]).sum(dim=0).chunk(world.size)[world.rank]
        errors[name] = float((have - want).abs().max() / want.abs().max())
    return errors


def run_float32_weights(world: World) -> tuple[float, list[bool]]:
    """Compare float32 weights with those of bfloat16 in an eager step; replay a captured step of the former."""
    spec, form = spec_of(world.size, "bfloat16"), replace(form_of(world.size), router=None)
    wide, narrow = (MoELayer(world, spec, replace(form, weights=name), seed=1) for name in ("float32", None))
    x = batch_of(world.rank).to(world.device)
    scores = torch.rand(len(x), spec.experts, generator=torch.Generator().manual_seed(world.rank))
    weights, ids = (each.to(world.device) for each in scores.topk(spec.topk))
    kinds, steps = {torch.float32: wide, torch.bfloat16: narrow}, []
    for dtype, layer in kinds.items():
        rows = x.clone().requires_grad_()
        parameters = [*layer.experts.parameters(), *layer.shared_experts.parameters()]
        y = layer.apply_experts(rows, ids, weights)
        gradients = torch.autograd.grad(y.float().square().sum(), [rows, *parameters])
        assert {each.dtype for each in gradients[1:]} == {dtype}
        steps.append([y.detach(), *gradients])
    rows, side, same = x.float().requires_grad_(), torch.cuda.Stream(world.device), []
    side.wait_stream(torch.cuda.current_stream(world.device))
    with torch.cuda.stream(side):
        wanted = step_of(wide, rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            found = step_of(wide, rows)
        for _ in range(2):
            graph.replay()
            same += [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
    wide.exchange.check()
    del graph
    return large_difference(*steps), same


def test_float32_weights_compute_what_bfloat16_ones_do(ranks: GpuRanks) -> None:
    for error, same in ranks.run(min(RANKS, 4), run_float32_weights):
        assert error <= 1e-2 and all(same)


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


def large_difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor; NaN counts as infinite."""
    errors = [
        (mine.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6)
        for mine, want in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())


def step_of(layer: MoELayer, x: torch.Tensor) -> list[torch.Tensor]:
    """Run forward and backward; return y and all gradients."""
    y = layer(x)
    with torch.autograd.set_multithreading_enabled(False):  # all on this thread, which may be capturing
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


SLEEP = 20_000_000
"""Clock cycles: about 10 ms, much longer than the other work of a step."""


def run_beside(world: World) -> list[float]:
    """Compare with the shared expert after the others, while either stream is late; return the differences."""
    layer = MoELayer(world, spec_of(world.size, "bfloat16"), form_of(world.size), seed=1)
    x, streams, asleep = batch_of(world.rank).to(world.device).requires_grad_(), set(), set()

    def late(where: str) -> None:
        if where in asleep:
            torch.cuda._sleep(SLEEP)

    shared = layer.shared_experts
    layer.gate.register_forward_hook(lambda *_: late("main"))
    shared.register_forward_pre_hook(lambda *_: streams.add(torch.cuda.current_stream()))
    shared.register_forward_pre_hook(lambda *_: late("side"))
    shared.register_full_backward_pre_hook(lambda *_: late("side, backward"))
    layer.beside = False
    wanted = step_of(layer, x)
    with torch.no_grad():
        y = layer(x)
    alone, layer.beside = set(streams), True
    assert alone == {torch.cuda.current_stream()}, "the shared expert is apart"
    errors = []
    for late_here in ((), ("main",), ("side",), ("side, backward",), ("main", "side", "side, backward")):
        asleep.clear()
        asleep.update(late_here)
        for _ in range(2):
            found = step_of(layer, x)
            spoilt = [torch.full_like(x, torch.nan) for _ in range(8)]  # memory that was freed too early
            with torch.no_grad():
                errors.append(large_difference([layer(x)], [y]))
            errors.append(large_difference(found, wanted))
            del spoilt
    layer.exchange.check()
    assert len(streams) == 2, "the shared expert is not on a stream of its own"
    return errors


def test_the_shared_expert_beside_the_dispatch_gives_the_same(ranks: GpuRanks) -> None:
    for errors in ranks.run(min(RANKS, 4), run_beside):
        assert max(errors) <= 1e-3, errors


def run_captured_step(world: World, many: bool) -> list[float]:
    """Capture forward and backward, and replay them with other tokens; `many`: with the kernels of many tokens."""
    with mock.patch("raymoe.exchange.peer.workspace.FEW_TOKENS", 0) if many else nullcontext():
        layer = MoELayer(world, spec_of(world.size, "bfloat16"), form_of(world.size), seed=1, backend="fused")
    assert layer.exchange.keeps_places == many
    x = batch_of(0).to(world.device).requires_grad_()
    side, errors = torch.cuda.Stream(world.device), []
    side.wait_stream(torch.cuda.current_stream(world.device))
    with torch.cuda.stream(side):
        step_of(layer, x)  # libraries allocate at a first call, and kernels are loaded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            found = step_of(layer, x)
        for seed in range(3):
            with torch.no_grad():
                x.copy_(batch_of(0).roll(seed, dims=1).to(world.device))
            graph.replay()
            replayed = [each.clone() for each in found]
            layer.beside = seed != 1
            errors.append(large_difference(replayed, step_of(layer, x)))
        layer.exchange.check()
    del graph
    return errors


@pytest.mark.parametrize("many", [False, True])
def test_a_captured_step_with_its_gradients_is_replayed_with_other_routing(ranks: GpuRanks, many: bool) -> None:
    for errors in ranks.run(min(RANKS, 4), run_captured_step, many):
        assert max(errors) <= 1e-3, errors


def run_few_tokens(world: World) -> float:
    """Compare a layer of few tokens without gradients with the same layer with them."""
    spec = ExchangeSpec(tokens=16, hidden=256, experts=4 * world.size, topk=2, dtype="bfloat16", depth=0)
    layer = MoELayer(world, spec, form_of(world.size), seed=1)
    x = batch_of(0)[:16].to(world.device)
    wanted = layer(x)
    with torch.no_grad():
        found = layer(x)
    layer.exchange.check()
    return large_difference([found], [wanted.detach()])


def test_few_tokens_without_gradients_give_the_same_as_with_them(ranks: GpuRanks) -> None:
    for error in ranks.run(min(RANKS, 4), run_few_tokens):
        assert error <= 2**-6
