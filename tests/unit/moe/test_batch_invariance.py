"""A token's result has the same bits among any other tokens: part by part, and of whole layers on CPU ranks.

Bits are compared as integers. A part gets the rows of a large batch alone, in twos, in threes and so on, from other
places, and between other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, Router, RouterForm, rms_norm
from raymoe.moe.by_row import in_tiles
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts
from raymoe.moe.router import route
from raymoe.moe.torch_products import multiply_by_torch
from tests.unit.exchange.test_exchange import BACKENDS
from tests.unit.moe.bits import assert_same_bits, same_bits
from tests.unit.ranks import RankPool

F32, BF16 = torch.float32, torch.bfloat16
ROWS = 130
COUNTS = (1, 2, 3, 5, 8, 17, 31, 33, 64, 130)
Part = Callable[[torch.Tensor], torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def other_bits(part: Part, x: torch.Tensor) -> list[tuple[int, int]]:
    """Return (rows, first row) of the batches in which a row has other bits than among all of them."""
    whole, others = part(x), []
    for count in COUNTS:
        for first in (0, 3):
            rows = x[first : first + count]
            if not same_bits(part(rows.clone()), whole[first : first + len(rows)]):
                others.append((count, first))
    return others


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    """torch's threads of one process. With two of them each computes a part of a tensor."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Parts.


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("hidden", [16, 72, 100, 1024, 7168])
def test_the_norm(hidden: int, dtype: torch.dtype, threads: int) -> None:
    weight = drawn(hidden, dtype=dtype, seed=1)
    x = drawn(ROWS, hidden, dtype=dtype)
    assert other_bits(lambda rows: rms_norm(rows, weight, 1e-6, batch_invariant=True), x) == []


FORMS = [
    RouterForm(8, 2),
    RouterForm(60, 8, normalise=False),
    RouterForm(8, 2, score="sigmoid"),
    RouterForm(60, 8, score="sigmoid", groups=4, topk_groups=2),
    RouterForm(256, 8, score="sigmoid", scale=2.5),
    RouterForm(128, 4, score="chosen"),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.score}-{form.experts}-{form.topk}")
def test_the_choice_of_experts_and_their_weights(form: RouterForm, threads: int) -> None:
    logits = drawn(ROWS, form.experts)
    for place in (0, 1):
        assert other_bits(lambda rows, place=place: route(rows, form)[place], logits) == []


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("experts", [8, 60, 256])
def test_a_whole_router(experts: int, dtype: torch.dtype, threads: int) -> None:
    router = Router(RouterForm(experts, 4, score="sigmoid"), drawn(experts, 200, dtype=dtype, seed=1))
    router.by_row = True
    for field in ("logits", "topk_idx", "topk_weights"):
        assert other_bits(lambda x, field=field: getattr(router(x), field), drawn(ROWS, 200, dtype=dtype)) == []


@pytest.mark.parametrize(
    "activation", [SWIGLU, GPT_OSS, Activation(interleaved=True)], ids=["swiglu", "gpt_oss", "mixed"]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("ffn", [16, 72, 100, 1536])
def test_activations(ffn: int, dtype: torch.dtype, activation: Activation, threads: int) -> None:
    def apply(rows: torch.Tensor) -> torch.Tensor:
        return activation(rows, None, torch.full((len(rows),), 0.3), by_row=True)

    assert other_bits(apply, drawn(ROWS, 2 * ffn, dtype=dtype)) == []


SIZES = [(64, 256), (256, 128), (1024, 512), (8, 64), (100, 72), (128, 4096)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("outputs", "columns"), SIZES)
def test_products_in_tiles(outputs: int, columns: int, dtype: torch.dtype, threads: int) -> None:
    """Also from each place of a tile, and in experts of other sizes, at other offsets."""
    weight, x = drawn(outputs, columns, dtype=dtype, seed=1), drawn(ROWS, columns, dtype=dtype)
    assert other_bits(lambda rows: in_tiles(lambda tile: tile @ weight.T, rows), x) == []

    def as_second_expert(rows: torch.Tensor) -> torch.Tensor:
        padded = torch.cat((x[:5], rows, x[:2]))
        ends = torch.tensor([0, 5, 5 + len(rows), 7 + len(rows)])
        return multiply_by_torch(padded, weight.expand(3, -1, -1), Groups(ends, ends.diff()), by_row=True)[5:-2]

    assert other_bits(as_second_expert, x) == []


def test_products_of_torch_have_other_bits_for_other_numbers_of_rows() -> None:
    """The reason for tiles. Where torch changes that, the test of a whole layer without the option may be stricter."""
    weight = drawn(64, 256, seed=1)
    assert other_bits(lambda rows: rows @ weight.T, drawn(ROWS, 256)) != []


# Layers on ranks.

H, E, K = 48, 8, 2
SPEC = ExchangeSpec(tokens=40, hidden=H, experts=E, topk=K, dtype="float32", depth=0)
FORM = LayerForm(
    ffn=36, router=RouterForm(E, K, score="sigmoid"), shared=20, norm=1e-6, residual=True, deterministic="batch"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "more tokens": {"tokens": 64},
    "capacity": {"capacity": 100},
    "alignment": {"alignment": 16},
    "by rank": {"layout": "rank"},
    "depth": {"depth": 1},
}


def results_of_layers(world: World, backend: str, dtype: str) -> list[str]:
    """Return the ways in which the first tokens of a rank have other bits than in a batch of their own."""
    weights = "float32" if dtype == "bfloat16" else None  # weights that each pass casts
    kind: torch.dtype = getattr(torch, dtype)
    spec, form, wrong = replace(SPEC, dtype=dtype), replace(FORM, weights=weights), []
    layer = MoELayer(world, spec, form, backend=backend, seed=0)
    own = drawn(3, H, dtype=kind, seed=10 + world.rank)
    with torch.no_grad():
        alone = layer(own)
    for name, changes in VARIANTS.items():
        other = MoELayer(world, replace(spec, **changes), form, backend=backend, seed=0)
        for tokens in ((3, 3), (40, 4), (5, 33)):
            for place in (0, 1):
                count = tokens[world.rank]
                first = 0 if place == 0 else count - 3
                x = drawn(count, H, dtype=kind, seed=100 + count + world.rank)
                x[first : first + 3] = own
                for grad in (False, True):
                    with torch.set_grad_enabled(grad):
                        y = other(x)
                    if not same_bits(y[first : first + 3], alone):
                        wrong.append(f"{name}, {tokens} tokens, from {first}, gradients {grad}")
    return wrong


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_a_layer_have_the_same_bits_in_any_batch(pool: RankPool, backend: str, dtype: str) -> None:
    assert pool.run(2, results_of_layers, backend, dtype) == [[], []]


def without_the_option(world: World) -> list[bool]:
    """Whether one token has the bits that it has among others, and those of a pass with gradients."""
    layer = MoELayer(world, SPEC, replace(FORM, deterministic=None))
    x = drawn(40, H, seed=world.rank)
    with torch.no_grad():
        whole, one = layer(x), layer(x[:1])
    return [same_bits(one, whole[:1]), same_bits(layer(x), whole)]


def test_without_the_option_bits_differ(pool: RankPool) -> None:
    """So the test above can fail: one row is multiplied in another order, and weights are applied elsewhere."""
    for found in pool.run(2, without_the_option):
        assert found == [False, False]


def _by_row(layer: MoELayer) -> list[bool]:
    """Whether the norm, the router, the experts and the shared expert compute each row alone."""
    parts: list[Any] = [layer.norm, layer.gate, layer.experts, layer.shared_experts]
    return [part.by_row for part in parts]


def test_it_can_be_set_and_costs_no_accuracy() -> None:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        layer = MoELayer(world, SPEC, replace(FORM, deterministic=None))
        x = drawn(9, H).requires_grad_()
        wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        layer.deterministic = "batch"
        assert layer.deterministic == "batch" and _by_row(layer) == [True] * 4
        found = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        for gradient, exactly in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient, exactly, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            assert_same_bits(layer(x)[:0], x.detach()[:0])
            assert len(layer(x[:0])) == 0
        layer.deterministic = None
        assert _by_row(layer) == [False] * 4
        assert _by_row(MoELayer(world, SPEC, FORM)) == [True] * 4
        with pytest.raises(ConfigError, match="deterministic is 'rows'; it is None or 'batch'"):
            layer.deterministic = "rows"
    with pytest.raises(ConfigError, match="deterministic is True"):
        LayerForm(ffn=4, deterministic=True)


def test_operators_of_gpus_ask_for_the_same_bits() -> None:
    """The products by the formula go in tiles."""
    weight = drawn(1, 64, 48, seed=1)

    def groups_of(rows: torch.Tensor) -> Groups:
        return Groups(torch.tensor([0, len(rows)]), torch.tensor([len(rows)]))

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return multiply_experts(rows, weight, groups_of(rows), Added(by_row=True))

    def gate(rows: torch.Tensor) -> torch.Tensor:
        added = Added(by_row=True)
        return gate_experts(rows, weight, groups_of(rows), added, keep_gate_up=True)[1]

    for part in (multiply, gate):
        assert other_bits(part, drawn(ROWS, 48)) == []
