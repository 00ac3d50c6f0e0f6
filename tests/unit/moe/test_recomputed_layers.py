"""Layers whose backward pass computes a part of the forward pass again: the same gradients, from fewer kept bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, record_routes
from raymoe.moe.activation import GPT_OSS, SWIGLU, Activation
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import Experts, ModelWeights, local
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts
from raymoe.moe.recomputed_product import Gated, multiply_gated
from tests.unit.moe.bits import assert_same_bits
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

H, F = 32, 16
SPEC = ExchangeSpec(tokens=24, hidden=H, experts=4, topk=2, depth=0)
CLAMPED = Activation(interleaved=True, alpha=1.702, limit=0.5, up_plus=1.0)
FORMS = {
    "swiglu": LayerForm(F, shared=8, norm=1e-6, residual=True),
    "gpt_oss": LayerForm(F, activation=CLAMPED, biases=True),
    "biases": LayerForm(F, biases=True),
    "float32 weights": LayerForm(F, weights="float32"),
    "batch": LayerForm(F, deterministic="batch", norm=1e-6),
}
OFFSETS, COUNTS = torch.tensor([0, 16, 32, 48], dtype=torch.int32), torch.tensor([16, 0, 9], dtype=torch.int32)
GROUPS = Groups(OFFSETS, COUNTS)


@pytest.fixture
def alone() -> Iterator[World]:
    (world,) = wired(1)
    with world:
        yield world


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(call: Callable[[torch.Tensor], torch.Tensor], layer: MoELayer, tokens: int = 20) -> list[torch.Tensor]:
    """Return the output, and the gradients of x and of all parameters."""
    layer.zero_grad()
    x = drawn(tokens, H, seed=layer.world.rank).requires_grad_()
    y = call(x)
    y.backward(drawn(tokens, H, seed=9).to(y.dtype))
    parameters = [local(parameter.grad) for parameter in layer.parameters()]
    return [y.detach(), *(grad.clone() for grad in (x.grad, *parameters) if grad is not None)]


def kept_by(call: Callable[[], torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what autograd keeps of a call, a tensor of each piece of memory, parameters included."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return kept


def through_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experts on a CPU take the operators of GPUs, which compute by their formulas."""
    monkeypatch.setattr("raymoe.moe.experts._in_kernels", lambda _: True)
    monkeypatch.setattr("raymoe.moe.activation.in_kernels", lambda _: True)


# Gradients.


@pytest.mark.parametrize("path", ["torch", "operators"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_have_the_bits_of_a_layer_that_keeps_all(
    alone: World, name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "operators":
        through_operators(monkeypatch)
    layer = MoELayer(alone, SPEC, FORMS[name], seed=1)
    wanted = gradients(layer, layer)
    assert len(wanted) == 2 + len(list(layer.parameters()))
    for kind in ("activation", "all"):
        layer.recompute = kind
        for result, want in zip(gradients(layer, layer), wanted, strict=True):
            assert_same_bits(result, want)


def run_ragged(world: World) -> list[list[torch.Tensor]]:
    layer = MoELayer(world, SPEC, FORMS["gpt_oss"], seed=1)
    results = []
    for kind in ("nothing", "activation", "all"):
        layer.recompute = kind
        results += [gradients(layer, layer, tokens) for tokens in ((20, 0), (0, 3))[world.rank]]
    return results


def test_ranks_of_other_numbers_of_tokens_have_the_same_gradients(pool: RankPool) -> None:
    for nothing, more, *others in pool.run(2, run_ragged):
        for result, want in zip([*others[0], *others[1], *others[2], *others[3]], (nothing + more) * 2, strict=True):
            assert_same_bits(result, want)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["activation", "all"])
@pytest.mark.parametrize("path", ["torch", "operators"])
def test_a_compiled_layer_has_the_gradients_and_keeps_no_activation(
    alone: World, path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This backend divides a graph as Inductor does, and compiles nothing."""
    if path == "operators":
        through_operators(monkeypatch)
    torch.compiler.reset()
    layer = MoELayer(alone, SPEC, LayerForm(F, norm=1e-6), seed=1)
    wanted = gradients(layer, layer)
    layer.recompute = kind
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    for result, want in zip(gradients(compiled, layer), wanted, strict=True):
        torch.testing.assert_close(result, want, rtol=0.02, atol=0.02)
    x = drawn(20, H, seed=5).requires_grad_()
    shapes = {tuple(tensor.shape) for tensor in kept_by(lambda: compiled(x)).values()}
    rows = SPEC.rows(1)
    assert (rows, F) not in shapes and ((rows, 2 * F) in shapes) == (kind == "activation"), shapes


def test_a_repeated_pass_counts_no_rows_and_records_no_routes(alone: World) -> None:
    layer = MoELayer(alone, SPEC, LayerForm(F, recompute="all"), seed=1)
    with record_routes(layer, tokens=64) as routes:
        layer(drawn(20, H, seed=5).requires_grad_()).sum().backward()
    assert routes.ids().shape == (1, 20, SPEC.topk)
    assert int(layer.row_counts.total.sum()) == 20 * SPEC.topk


def test_a_copy_and_a_layer_without_gradients_compute_the_same(alone: World) -> None:
    layer, x = MoELayer(alone, SPEC, LayerForm(F), seed=1), drawn(20, H, seed=5)
    with torch.no_grad():
        wanted = layer(x)
        for kind in ("activation", "all"):
            layer.recompute = kind
            copied = copy.deepcopy(layer)
            assert copied.recompute == kind and copied.experts.recomputes == (kind == "activation")
            assert_same_bits(copied(x), wanted)


# Memory.


@pytest.mark.parametrize("capacity", ["worst", 80])
@pytest.mark.parametrize("shared", [0, 24])
def test_a_layer_keeps_the_bytes_that_its_page_says(
    alone: World, capacity: int | str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/layer.md, "Memory for the backward pass"."""
    through_operators(monkeypatch)
    spec = replace(SPEC, capacity=capacity)
    layer = MoELayer(alone, spec, LayerForm(F, shared=shared), seed=1)
    T, K, L = 20, spec.topk, spec.experts
    ids, weights = torch.rand(T, L).topk(K).indices, torch.rand(T, K)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    _, C, _, words, _ = layer.exchange.numbers
    assert (80 if capacity == 80 else 112) == C
    for kind, columns in (("nothing", 3 * F), ("activation", 2 * F)):
        layer.recompute = kind
        x = drawn(T, H, seed=5).requires_grad_()
        kept = kept_by(lambda x=x: layer.apply_experts(x, ids, weights))
        found = sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in own)
        of_rows, of_tokens = C * (2 * columns + 4), T * (2 * H + 8 * K + 6 * shared)
        assert found == of_rows + of_tokens + 4 * (words + 2 * L + 1), [list(each.shape) for each in kept.values()]


def test_a_layer_that_repeats_all_keeps_its_input_alone(alone: World) -> None:
    layer = MoELayer(alone, SPEC, LayerForm(F, shared=8, norm=1e-6, residual=True, recompute="all"), seed=1)
    x = drawn(20, H, seed=5).requires_grad_()
    assert [tensor.data_ptr() for tensor in kept_by(lambda: layer(x)).values()] == [x.data_ptr()]


@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt_oss"])
def test_products_add_to_main_grad(activation: Activation) -> None:
    x, row_weights = drawn(48, H, seed=1), torch.rand(48).index_fill_(0, torch.arange(25, 48), 0.0)
    x[25:] = 0
    gate_up_proj, down_proj = drawn(3, 2 * F, H, seed=2), drawn(3, H, F, seed=3).requires_grad_()
    results = []
    for recomputes in (False, True):
        total = torch.ones(3, H, F)
        source = x.clone().requires_grad_()
        added = Added(None, row_weights, gaps_are_zero=True)
        h, gate_up = gate_experts(source, gate_up_proj, GROUPS, added, activation.form)
        last = Added(gaps_are_zero=True, main_grad=total)
        if recomputes:
            y = multiply_gated(Gated(h, gate_up, activation, row_weights), down_proj, GROUPS, last)
        else:
            y = multiply_experts(h, down_proj, GROUPS, last)
        dy = drawn(48, H, seed=4).index_fill_(0, torch.arange(25, 48), 0.0)
        y.backward(dy)
        assert down_proj.grad is None and source.grad is not None
        results.append((total, source.grad))
    assert not torch.equal(results[0][0], torch.ones(3, H, F))
    for result, want in zip(results[1], results[0], strict=True):
        assert_same_bits(result, want)


def test_another_value_is_refused(alone: World) -> None:
    message = "recompute is 'some'; it is 'nothing', 'activation' or 'all'"
    with pytest.raises(ConfigError, match=message):
        LayerForm(F, recompute="some")
    with pytest.raises(ConfigError, match=message):
        MoELayer(alone, SPEC, LayerForm(F), seed=1).recompute = "some"


def test_rows_are_not_kept_for_the_gradients_of_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 3 * H  # no other tensor is as wide
    x, share = drawn(48, hidden, seed=1).requires_grad_(), torch.rand(48).requires_grad_()
    experts = Experts(ModelWeights(drawn(3, 2 * F, hidden, seed=2), drawn(3, hidden, F, seed=3)))
    for path in ("torch", "operators"):
        if path == "operators":
            through_operators(monkeypatch)
        for recomputes in (False, True):
            experts.recomputes = recomputes
            wanted = torch.autograd.grad(experts(x, OFFSETS, COUNTS, share).float().sum(), [x, share])
            experts.requires_grad_(False)
            kept = kept_by(lambda: experts(x, OFFSETS, COUNTS, share)).values()
            assert not any(tensor.shape[1:] == (hidden,) for tensor in kept if tensor.dim() == 2)
            found = torch.autograd.grad(experts(x, OFFSETS, COUNTS, share).float().sum(), [x, share])
            experts.requires_grad_(True)
            for result, want in zip(found, wanted, strict=True):
                assert_same_bits(result[:25], want[:25])
