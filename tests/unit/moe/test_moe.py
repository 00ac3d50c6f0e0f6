"""Router, experts and layer compared with plain float64 arithmetic."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from raymoe.errors import ConfigError, DataRefused
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import (
    SWIGLU,
    Activation,
    Experts,
    ModelWeights,
    local,
)
from raymoe.moe.layer import LayerForm, MoELayer, expert_parameters
from raymoe.moe.router import Router, balance_loss, expert_load, route
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.torch_products import arithmetic_dtype
from raymoe.moe.weights import ExpertShape, expert_weights
from raymoe.workload.oracle import BOUNDS, LAYER_SLACK, LayerExperts, want
from tests.unit.moe.gradient_cases import close
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

SHAPE = ExpertShape(hidden=32, ffn=16, dtype=torch.bfloat16)


# Router.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_takes_the_best_experts_and_renormalises(dtype: torch.dtype) -> None:
    router = Router(RouterForm(8, 3), torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(40, 32).to(dtype)
    ids, weights, _ = router(x)
    scores = (x.double() @ router.weight.double().T).softmax(dim=-1)
    best = scores.sort(dim=-1, descending=True)
    assert torch.equal(ids, best.indices[:, :3]) and ids.dtype == torch.int64
    want = best.values[:, :3] / best.values[:, :3].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weights, want.float(), rtol=1e-5, atol=1e-6)


def test_router_takes_no_tokens() -> None:
    ids, weights, logits = Router(RouterForm(4, 4), torch.zeros(4, 8))(torch.zeros(0, 8))
    assert ids.shape == weights.shape == logits.shape == (0, 4)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"topk": 9}, "over 8 experts was asked for the best 9"),
        ({"score": "tanh"}, "score is 'tanh'; it is one of softmax"),
        ({"groups": 3}, "1 of 3 groups of 8 experts"),
        ({"groups": 4, "topk_groups": 5}, "5 of 4 groups"),
        ({"groups": 8}, "8 groups of one expert"),
        ({"groups": 4, "topk": 3}, "1 of 4 groups hold 2 experts"),
    ],
)
def test_an_impossible_router_is_refused(form: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RouterForm(**{"experts": 8, "topk": 2, **form})


def test_groups_limit_the_choice_and_the_correction_does_not_weigh() -> None:
    form = RouterForm(8, 2, score="sigmoid", groups=4, topk_groups=1, scale=2.5)
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    ids, weights = route(logits, form)
    assert sorted(ids[0].tolist()) == [2, 3]  # the best sum of two, although expert 0 is the best alone
    torch.testing.assert_close(weights, torch.tensor([[1.25, 1.25]]))
    correction = torch.tensor([0.0, 0, 0, 0, 0, 0, 3, 2])
    ids, weights = route(logits, form, correction)
    assert ids.tolist() == [[6, 7]]
    torch.testing.assert_close(weights, torch.tensor([[1.25, 1.25]]))


def test_the_load_counts_entries_and_the_loss_falls_as_it_evens_out() -> None:
    form = RouterForm(4, 1)
    logits = torch.tensor([[4.0, 0, 0, 0], [4.0, 0, 0, 0], [0, 4.0, 0, 0]], requires_grad=True)
    ids, _ = route(logits, form)
    assert expert_load(ids, 4).tolist() == [2, 1, 0, 0]
    loss = balance_loss(logits, ids, form)
    assert loss.item() > 1.0
    (gradient,) = torch.autograd.grad(loss, logits)
    again = logits.detach() - gradient
    assert float(balance_loss(again, ids, form)) < loss.item()
    assert float(balance_loss(torch.zeros(4, 4), torch.arange(4)[:, None], form)) == 1.0


# Experts.


def new_experts(count: int, shape: ExpertShape, seed: int) -> Experts:
    drawn = [expert_weights(shape, seed, expert) for expert in range(count)]
    return Experts(ModelWeights(torch.stack([each.gate_up for each in drawn]), torch.stack([d.down for d in drawn])))


OFFSETS, COUNTS = torch.tensor([0, 16, 32, 48], dtype=torch.int32), torch.tensor([16, 0, 8], dtype=torch.int32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_are_swiglu_over_their_own_rows(dtype: torch.dtype, weighted: bool) -> None:
    shape = ExpertShape(32, 16, dtype)
    experts = new_experts(3, shape, seed=2)
    x = torch.randn(64, 32).to(dtype)
    x[40:] = torch.nan  # rows that belong to no expert are never read
    weights = torch.rand(64) if weighted else None
    rows = experts(x, OFFSETS, COUNTS, weights)
    assert rows.shape == x.shape and rows.dtype == dtype
    for expert, start, count in ((0, 0, 16), (2, 32, 8)):
        part = slice(start, start + count)
        own, drawn = x[part].double(), expert_weights(shape, 2, expert)
        gate, up = own @ drawn.gate_up[:16].double().T, own @ drawn.gate_up[16:].double().T
        wanted = (torch.nn.functional.silu(gate) * up) @ drawn.down.double().T
        wanted = wanted * (1.0 if weights is None else weights[part, None])
        torch.testing.assert_close(rows[part].double(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("activation", [SWIGLU, Activation(True, 1.702, 1.0, 1.0)], ids=["swiglu", "gpt_oss"])
def test_gradients_of_experts_are_of_their_own_rows(activation: Activation) -> None:
    source = torch.Generator().manual_seed(1)
    shapes = ((3, 8, 12), (3, 6, 8), (3, 12), (3, 8))
    weights = [torch.randn(shape, generator=source, requires_grad=True) for shape in shapes]
    experts = Experts(ModelWeights(*weights, transposed=True), activation)
    x = torch.randn(50, 8, generator=source, requires_grad=True)
    share = torch.rand(50, generator=source).requires_grad_()
    expert = Groups(OFFSETS, COUNTS).expert_of_row(50)
    there = expert < 3
    dy = torch.randn(50, 8, generator=source).where(there[:, None], torch.tensor(0.0))
    found = torch.autograd.grad((experts(x, OFFSETS, COUNTS, share) * dy).sum(), [x, share, *experts.parameters()])
    exact = [each.detach().double().requires_grad_() for each in (x, share, *experts.parameters())]
    rows, part, gate_up, down, gate_up_bias, down_bias = exact
    own, which = rows[there], expert[there]
    product = (own[:, None] @ gate_up[which]).squeeze(1) + gate_up_bias[which]
    if activation == SWIGLU:
        h = torch.nn.functional.silu(product[:, :6]) * product[:, 6:]
    else:
        gate, up = product[:, ::2].clamp(max=1.0), product[:, 1::2].clamp(-1.0, 1.0)
        h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    y = ((h[:, None] @ down[which]).squeeze(1) + down_bias[which]) * part[there, None]
    wanted = torch.autograd.grad((y * dy[there].double()).sum(), exact)
    for have, exactly in zip(found, wanted, strict=True):
        close("gradient", have, exactly, 1e-6)


@pytest.mark.parametrize("variant", ["swiglu", "gpt_oss"])
def test_experts_on_a_gpu_read_no_value(variant: str) -> None:
    """Tensors without values stand for a GPU's: a read of one by the host raises."""
    like = {"device": "meta", "dtype": torch.bfloat16}
    if variant == "swiglu":
        experts = Experts(ModelWeights(torch.empty(3, 64, 32, **like), torch.empty(3, 32, 32, **like)))
    else:
        shapes = ((3, 32, 64), (3, 32, 32), (3, 64), (3, 32))
        weights = ModelWeights(*(torch.empty(shape, **like) for shape in shapes), transposed=True)
        experts = Experts(weights, Activation(True, 1.702, 7.0, 1.0))
    router = Router(RouterForm(16, 4, score="sigmoid", groups=4, topk_groups=2), torch.empty(16, 32, **like))
    x = torch.empty(48, 32, requires_grad=True, **like)
    ids, weights, logits = router(x)
    y = experts(x, OFFSETS.to("meta"), COUNTS.to("meta"), weights[:, 0])
    (y.float().sum() + balance_loss(logits, ids, router.form)).backward()
    assert all(parameter.grad is not None for parameter in (x, *experts.parameters(), *router.parameters()))


def test_weights_follow_from_seed_and_expert_alone() -> None:
    one, again = expert_weights(SHAPE, 1, 5), expert_weights(SHAPE, 1, 5)
    assert torch.equal(one.gate_up, again.gate_up) and torch.equal(one.down, again.down)
    assert not torch.equal(one.down, expert_weights(SHAPE, 1, 6).down)
    assert not torch.equal(one.down, expert_weights(SHAPE, 2, 5).down)


def test_float16_is_multiplied_as_float32_on_a_cpu() -> None:
    assert arithmetic_dtype(torch.float16) == arithmetic_dtype(torch.float32) == torch.float32


# The layer.


def layer_errors(world: World, layout: str) -> list[float]:
    """Return the layer's errors for a full, a short and an empty batch, with gradients and without."""
    spec = ExchangeSpec(tokens=16, hidden=32, experts=8, topk=2, layout=layout)
    errors = []
    layer = MoELayer(world, spec, LayerForm(ffn=16), seed=4)
    for tokens in (16, 5, 0):
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(world.rank)).to(torch.bfloat16)
        ids, weights, _ = layer.gate(x)
        wanted = want(x, ids, weights.detach(), LayerExperts(SHAPE, seed=4), by_row=True)
        errors.append(wanted.error_of(layer(x).detach()))
        with torch.no_grad():
            errors.append(wanted.error_of(layer(x)))
    return errors


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_layer_equals_router_then_experts_on_any_number_of_ranks(pool: RankPool, ranks: int, layout: str) -> None:
    for errors in pool.run(ranks, layer_errors, layout):
        assert max(errors) <= LAYER_SLACK * BOUNDS[torch.bfloat16]


SPEC = ExchangeSpec(tokens=24, hidden=16, experts=8, topk=2, dtype="float32")
FORM = LayerForm(8, RouterForm(8, 2, score="sigmoid", groups=4, topk_groups=2), shared=12, norm=1e-6, residual=True)


def whole_layer(world: World) -> tuple[object, ...]:
    """Run forward and backward of two layers with all parts; return results that other worlds can be compared with."""
    layers = [MoELayer(world, SPEC, FORM, seed=seed) for seed in (1, 2)]
    assert layers[0].exchange is layers[1].exchange
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(7)).chunk(world.size)[world.rank].requires_grad_()
    y = layers[1](layers[0](x.view(2, -1, 16)))
    y.square().sum().backward()
    own = [layer.experts.gate_up_proj.grad for layer in layers]
    router = [layer.gate.weight.grad for layer in layers]
    return y.detach().reshape(-1, 16), x.grad, own, router


def test_the_number_of_ranks_changes_nothing(pool: RankPool) -> None:
    """Rows and expert gradients are those of one rank; router gradients are of each rank's tokens, and add up to it."""
    ((y, dx, own, router),) = pool.run(1, whole_layer)
    found = pool.run(4, whole_layer)
    close("y", torch.cat([each[0] for each in found]), y, 1e-5)
    close("dx", torch.cat([each[1] for each in found]), dx, 1e-5)
    for layer in range(2):
        close("experts", torch.cat([each[2][layer] for each in found]), own[layer], 1e-5)
        close("router", torch.stack([each[3][layer] for each in found]).sum(dim=0), router[layer], 1e-5)


def checkpointed(world: World, folder: str, store: str, save: bool) -> list[bool]:
    """Save a layer's weights, or load them into a layer of other weights; return whether they are those of seed 1."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of() as own:
            layer = MoELayer(own, SPEC, FORM, seed=1 if save else 2)
            assert isinstance(layer.experts.down_proj, DTensor)
            assert layer.experts.down_proj.shape == (8, 16, 8)
            state = layer.state_dict()
            (dcp.save if save else dcp.load)(state, checkpoint_id=folder)
            layer.load_state_dict(state)
            local = SPEC.local_experts(own.size)
            shape = ExpertShape(16, 8, torch.float32)
            local_down = layer.experts.down_proj.to_local()
            x = torch.ones(3, 16, requires_grad=True)
            layer(x).sum().backward()
            assert isinstance(layer.experts.down_proj.grad, DTensor)
            drawn = [expert_weights(shape, 1, own.rank * local + expert).down for expert in range(local)]
            return [torch.equal(have, want) for have, want in zip(local_down, drawn, strict=True)]
    finally:
        dist.destroy_process_group()


def test_weights_are_loaded_on_another_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    assert all(map(all, pool.run(2, checkpointed, folder, str(tmp_path / "two"), True)))
    assert all(map(all, pool.run(4, checkpointed, folder, str(tmp_path / "four"), False)))


@pytest.fixture
def alone() -> Iterator[World]:
    (world,) = wired(1)
    with world:
        yield world


def test_a_recomputed_layer_and_a_copy_have_the_same_gradients(alone: World) -> None:
    layer = MoELayer(alone, SPEC, FORM, seed=1)
    copied, results = copy.deepcopy(layer), []
    assert copied.exchange is layer.exchange and copied.gate.weight is not layer.gate.weight
    for run in (layer, copied, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        x = torch.linspace(-1, 1, 80).view(5, 16).requires_grad_()
        run(x).square().sum().backward()
        of = copied if run is copied else layer
        results.append([x.grad, of.gate.weight.grad, of.experts.down_proj.grad.clone()])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize("copies", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda copies: copies.__qualname__)
def test_a_world_and_an_exchange_are_of_one_process(alone: World, copies: Callable[[object], object]) -> None:
    layer = MoELayer(alone, SPEC, FORM, seed=1)
    for kind, shared in {"World": alone, "Exchange": layer.exchange}.items():
        with pytest.raises(
            TypeError, match=rf"^a raymoe {kind} cannot be pickled or copied: it belongs to the process"
        ):
            copies(shared)
    if copies is pickle.dumps:
        with pytest.raises(
            TypeError, match=r"^a raymoe World cannot be pickled .*, and of layers save and load state_dict"
        ):
            pickle.dumps(layer)
    else:
        assert copies(layer).exchange is layer.exchange  # type: ignore[attr-defined]


def overflowing(world: World) -> list[str]:
    """Send more rows than a rank may receive, then a step that fits."""
    layer = MoELayer(world, replace(SPEC, capacity=32), FORM, seed=1)
    said = []
    for tokens in (24, 1):
        x = torch.ones(tokens, 16, requires_grad=True)
        try:
            layer(x).sum().backward()
        except DataRefused as error:
            said.append(str(error))
        else:
            said.append("gradients" if x.grad is not None else "none")
    return said


def test_rows_beyond_the_capacity_are_refused_on_all_ranks_and_the_next_step_works(pool: RankPool) -> None:
    first, second = pool.run(2, overflowing)
    assert first == second
    assert "its capacity is 32" in first[0] and first[1] == "gradients"


def test_a_compiled_layer_is_one_graph(alone: World) -> None:
    layer = MoELayer(alone, SPEC, FORM, seed=1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, again = (torch.ones(5, 16, requires_grad=True) for _ in range(2))
    layer(x).square().sum().backward()
    compiled(again).square().sum().backward()
    assert x.grad is not None and again.grad is not None
    close("dx", again.grad, x.grad, 1e-6)


def compiled_in_a_process_group(world: World, store: str) -> list[tuple[torch.Tensor, ...]]:
    """Return output and gradients of a layer whose experts are DTensors, as one graph and eagerly."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of() as own:
            layer, found = MoELayer(own, SPEC, FORM, seed=1), []
            for run in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
                layer.zero_grad()
                x = torch.linspace(-1, 1, 80).view(5, 16).requires_grad_()
                y = run(x)
                y.square().sum().backward()
                own_gradients = [each.grad.to_local().clone() for each in layer.experts.parameters()]
                found.append((y.detach(), x.grad, layer.gate.weight.grad, *own_gradients))
            return found
    finally:
        dist.destroy_process_group()


def test_a_layer_of_dtensors_is_one_graph(pool: RankPool, tmp_path: Path) -> None:
    for compiled, eager in pool.run(2, compiled_in_a_process_group, str(tmp_path / "store")):
        for have, wanted in zip(compiled, eager, strict=True):
            close("compiled", have, wanted.double(), 1e-6)


def under_ddp(world: World, store: str, sharded: bool) -> dict[str, bool]:
    """Wrap a layer as docs/training.md says; whether its experts stay, and gradients are those of a layer by itself."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of() if sharded else nullcontext(world) as own:
            layer, alone = MoELayer(own, SPEC, FORM, seed=1), MoELayer(own, SPEC, FORM, seed=1)
            experts = expert_parameters(layer)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, list(experts))
            found = []
            for run in (DistributedDataParallel(layer), alone):
                run(torch.linspace(-1, 1, 80).view(5, 16) * (world.rank + 1)).square().sum().backward()
            others = layer.gate.weight.grad, alone.gate.weight.grad
            dist.all_reduce(others[1])
            for parameter, original in zip(experts.values(), alone.experts.parameters(), strict=True):
                pairs = (local(parameter), local(original)), (local(parameter.grad), local(original.grad))
                found.append(all(torch.equal(*pair) for pair in pairs))
            return {"experts": all(found), "router": torch.allclose(others[0], others[1] / 2, atol=1e-6)}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
def test_ddp_leaves_the_experts_of_each_rank_alone(pool: RankPool, tmp_path: Path, sharded: bool) -> None:
    for found in pool.run(2, under_ddp, str(tmp_path / "store"), sharded):
        assert found == {"experts": True, "router": True}


def test_a_layer_under_autocast_chooses_by_float32_logits(alone: World) -> None:
    layer, x = MoELayer(alone, SPEC, FORM, seed=1), torch.linspace(-1, 1, 80).view(5, 16)
    offsets, counts = torch.arange(0, 9, dtype=torch.int32).clamp(max=5), torch.ones(8, dtype=torch.int32)
    counts[5:] = 0

    def outputs() -> tuple[torch.Tensor, ...]:
        routed = layer.gate(x)
        product = torch.ops.raymoe.grouped_product(x, layer.experts.gate_up_proj, offsets, counts)
        return routed.logits, routed.topk_idx, product

    wanted = outputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = outputs()
    for result, reference in zip(found, wanted, strict=True):
        assert result.dtype == reference.dtype and torch.equal(result, reference)


def test_a_layer_ignores_the_default_dtype_of_torch(alone: World) -> None:
    wanted = MoELayer(alone, SPEC, FORM, seed=1).state_dict()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = MoELayer(alone, SPEC, FORM, seed=1).state_dict()
    finally:
        torch.set_default_dtype(before)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


def test_a_router_takes_tokens_in_any_shape(alone: World) -> None:
    layer, x = MoELayer(alone, SPEC, FORM, seed=1), torch.linspace(-1, 1, 240).view(3, 5, 16)
    for found, wanted in zip(layer.gate(x), layer.gate(x.flatten(0, 1)), strict=True):
        assert torch.equal(found, wanted)


WRONG_FORMS = [({"ffn": 0}, "ffn is 0"), ({"ffn": 8.0}, "ffn is 8.0"), ({"ffn": 8, "shared": -3}, "shared is -3")]


@pytest.mark.parametrize(("sizes", "said"), WRONG_FORMS)
def test_sizes_that_are_no_sizes_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}; a whole number of at least"):
        LayerForm(**sizes)


@pytest.mark.parametrize("x", [torch.ones(3, 8), torch.ones(())], ids=["other hidden", "no dimension"])
def test_rows_of_another_size_are_refused(alone: World, x: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="this layer takes rows of 16"):
        MoELayer(alone, SPEC, FORM, seed=1)(x)


def test_a_layer_needs_a_router_of_its_exchange(alone: World) -> None:
    with pytest.raises(ConfigError, match="best 3 of 8 experts with an exchange of 2 of 8"):
        MoELayer(alone, SPEC, LayerForm(8, RouterForm(8, 3)))
