"""Layers with 8-bit experts on CPU ranks: their results, their weights, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import quantise_weight
from raymoe.memory.world import World
from raymoe.moe import (
    LayerForm,
    MoELayer,
    RouterForm,
    expert_parameters,
    let_sleep,
    load_quantised_experts,
    load_quantised_shared,
    offer_weights,
    plan_placement,
    quantise_experts,
    quantise_shared,
)
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, local
from raymoe.moe.families import Parts
from raymoe.moe.scaled_layer import scaled_spec
from raymoe.rows.quantised_rows import quantise_rows
from tests.unit.memory.test_world_of import groups
from tests.unit.moe.bits import assert_same_bits, same_bits
from tests.unit.moe.scaled_reference import EPS, SCALED, error_of, wanted
from tests.unit.ranks import RankPool

__all__ = ["groups"]  # a fixture

H, F, E, K, T = 272, 200, 4, 2, 24
"""Several blocks of 128, the last ones narrower, and F that is padded."""
FP8 = "float8_e4m3"
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, dtype="float32", depth=0)
FORM = LayerForm(F, RouterForm(E, K, score="sigmoid"), shared=64, norm=EPS, residual=True, experts_dtype=FP8)
BOUND = 1e-2
"""Of a row's largest element: h and the result of the experts are bfloat16."""


def rows(rank: int, spec: ExchangeSpec = SPEC) -> Tensor:
    drawn = torch.randn(T - 5 * rank, H, generator=torch.Generator().manual_seed(rank))
    return drawn.to(getattr(torch, spec.dtype))


def alone() -> World:
    world = World.open(0, 1, name="alone")
    world.wire([world.descriptor()])
    return world


@pytest.fixture
def world() -> Iterator[World]:
    with alone() as world:
        yield world


def whole_weights(seed: int, form: LayerForm = FORM, spec: ExchangeSpec = SPEC) -> dict[str, Tensor]:
    """The 8-bit weights of the experts of all ranks."""
    with alone() as world:
        wide = MoELayer(world, replace(spec, slots=None), replace(form, experts_dtype=None), seed=seed)
        made = quantise_experts(wide.experts)
        return {name: each.detach().clone() for name, each in made.named_parameters()}


def form_of(activation: Activation) -> LayerForm:
    return replace(FORM, activation=activation, biases=activation == GPT_OSS)


@torch.no_grad()
def run(world: World, spec: ExchangeSpec, activation: Activation, weights: dict[str, Tensor]) -> float:
    layer = MoELayer(world, spec, form_of(activation), seed=3).eval()
    x = rows(world.rank, spec)
    y = layer(x)
    assert y.dtype == x.dtype
    return error_of(y, wanted(layer, weights, x))


@pytest.mark.parametrize(
    ("activation", "dtype", "layout"),
    [(SWIGLU, "float32", "expert"), (SWIGLU, "bfloat16", "rank"), (GPT_OSS, "bfloat16", "expert")],
    ids=["swiglu", "rank", "gpt_oss"],
)
def test_a_layer_equals_float64_of_the_same_8_bit_weights_and_rows(
    pool: RankPool, activation: Activation, dtype: str, layout: str
) -> None:
    spec = replace(SPEC, layout=layout, dtype=dtype)
    weights = whole_weights(3, form_of(activation), spec)
    for error in pool.run(2, run, spec, activation, weights):
        assert error < BOUND


@torch.no_grad()
def test_the_comparison_sees_one_wrong_scale_of_each_kind(world: World) -> None:
    layer, x = MoELayer(world, SPEC, FORM, seed=3), rows(0)
    want = wanted(layer, whole_weights(3), x)
    assert error_of(layer(x), want) < BOUND
    for name in SCALED[1::2]:
        scales = getattr(layer.experts, name)
        for expert in range(E):
            scales[expert, 0, -1] *= 2
        assert error_of(layer(x), want) > BOUND, name
        for expert in range(E):
            scales[expert, 0, -1] /= 2
        shared = getattr(layer.shared_experts, name)
        shared[0, -1] *= 2
        assert error_of(layer(x), want) > BOUND, f"shared {name}"
        shared[0, -1] /= 2
    real = quantise_rows

    def wrong(rows: Tensor) -> tuple[Tensor, Tensor]:
        values, scales = real(rows)
        scales[:, 1] *= 1.5
        return values, scales

    with mock.patch("raymoe.moe.quantised_experts.quantise_rows", wrong):
        assert error_of(layer(x), want) > BOUND


@torch.no_grad()
def test_parts_with_8_bit_experts_make_the_same_layer(world: World) -> None:
    layer, x = MoELayer(world, SPEC, FORM, seed=3), rows(0)
    wide = MoELayer(world, SPEC, replace(FORM, experts_dtype=None), seed=3)
    parts = Parts(wide.gate, wide.experts, wide.shared_experts, norm=wide.norm, residual=True)
    parts.quantise()
    assert_same_bits(MoELayer(world, SPEC, parts)(x), layer(x))
    near = wide(x)
    assert 0 < error_of(layer(x), near.double()) < 0.1, "8 bits cost some digits and no more"


@pytest.mark.thorough
@torch.no_grad()
def test_a_layer_that_is_compiled_runs_as_it_is(world: World) -> None:
    layer, x = MoELayer(world, SPEC, FORM, seed=3), rows(0)
    assert_same_bits(torch.compile(layer, backend="eager")(x), layer(x))


# Weights.


def test_weights_are_drawn_on_meta_and_filled_later(world: World) -> None:
    with torch.device("meta"):
        layer = MoELayer(world, SPEC, FORM, seed=3)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    held, whole = dict(layer.experts.named_parameters()), whole_weights(3)
    assert list(held) == list(whole) == SCALED
    for name, each in held.items():
        assert_same_bits(each, whole[name])
        assert not each.requires_grad
    wide = MoELayer(world, SPEC, replace(FORM, experts_dtype=None), seed=3)
    for name, each in quantise_shared(wide.shared_experts).named_parameters():
        assert_same_bits(getattr(layer.shared_experts, name), each)
    assert held["gate_up_proj"].shape == (E, 2 * 256, H) and held["gate_up_proj"].dtype == torch.float8_e4m3fn


def test_a_state_dict_has_values_and_scales(world: World) -> None:
    layer, other = (MoELayer(world, SPEC, FORM, seed=seed) for seed in (1, 2))
    state = layer.state_dict()
    assert {f"{part}.{name}" for part in ("experts", "shared_experts") for name in SCALED} <= set(state)
    assert state["shared_experts.down_proj"].dtype == torch.float8_e4m3fn
    other.load_state_dict(state)
    with torch.no_grad():
        assert_same_bits(other(rows(0)), layer(rows(0)))
    wide = MoELayer(world, SPEC, replace(FORM, experts_dtype=None), seed=1)
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up_proj_scale_inv"):
        layer.load_state_dict(wide.state_dict())


def restored(_rank: int, folder: str) -> list[bool]:
    """Save a layer of shards, and load it into other values."""
    with World.of() as world:
        layer, other = (nn.Sequential(MoELayer(world, SPEC, FORM, seed=seed)) for seed in (1, 2))
        sharded = all(hasattr(each, "to_local") for each in layer[0].experts.parameters())
        dcp.save(layer.state_dict(), checkpoint_id=folder)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        with torch.no_grad():
            x = rows(world.rank)
            return [sharded, same_bits(layer(x), other(x))]


@pytest.mark.thorough
def test_a_checkpoint_of_shards_has_the_experts_of_both_ranks(groups: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert groups(2, restored, str(tmp_path / "saved")) == [[True] * 2] * 2


@torch.no_grad()
def spread_by_fsdp(_rank: int) -> bool:
    """Let FSDP spread all but the experts of a layer on meta, and draw its weights then."""
    from torch.distributed.fsdp import fully_shard

    with World.of() as world:
        whole = MoELayer(world, SPEC, FORM, seed=3)
        with torch.device("meta"):
            layer = MoELayer(world, SPEC, FORM, seed=3)
        model = nn.Sequential(layer)
        fully_shard(model, ignored_params=set(expert_parameters(model).values()))
        model.to_empty(device="cpu")
        layer.reset_parameters()
        assert hasattr(layer.shared_experts.down_proj, "to_local")
        x = rows(world.rank)
        return same_bits(model(x), whole(x))


@pytest.mark.thorough
def test_fsdp_spreads_the_shared_expert(groups: Callable[..., list[Any]]) -> None:
    assert groups(2, spread_by_fsdp) == [True, True]


def live(world: World, whole: dict[str, Tensor]) -> list[bool]:
    """Load the experts of seed 2 into a layer of seed 1, from all ranks' and as another world offers them."""
    with torch.no_grad():
        layer, other = (MoELayer(world, SPEC, FORM, seed=seed) for seed in (1, 2))
        rest = {name: each for name, each in other.named_parameters() if not name.startswith("experts.")}
        x, new = rows(world.rank), other(rows(world.rank))
        given = rest | {f"experts.{name}": each for name, each in whole.items()}
        given |= {name: each.detach() for name, each in other.named_buffers()}
        old = layer(x)
        layer.load(given)
        return [not same_bits(old, new), same_bits(layer(x), new)]


def test_live_weights_are_values_and_scales(pool: RankPool) -> None:
    assert pool.run(2, live, whole_weights(2)) == [[True, True]] * 2


@torch.no_grad()
def test_a_shared_expert_takes_any_number_of_rows(world: World) -> None:
    layer, x = MoELayer(world, SPEC, FORM, seed=3), rows(0)
    want = layer.shared_experts(x)
    assert want.dtype == x.dtype
    for count in (0, 1, 5):
        assert_same_bits(layer.shared_experts(x[:count]), want[:count])
    with pytest.raises(ConfigError, match=r"experts of torch.float8_e4m3fn was to become torch.float16"):
        layer.shared_experts.half()


def test_a_shared_expert_of_a_checkpoint_is_loaded(world: World) -> None:
    layer, other = (MoELayer(world, SPEC, FORM, seed=seed) for seed in (1, 2))
    wide = MoELayer(world, SPEC, replace(FORM, experts_dtype=None), seed=2).shared_experts
    gate, up = wide.gate_up_proj.detach().chunk(2)
    tensors: dict[str, Tensor] = {}
    for name, weight in {"w1": gate, "w3": up, "w2": wide.down_proj.detach()}.items():
        values, scales = quantise_weight(weight)
        tensors |= {f"mlp.shared.{name}.weight": values, f"mlp.shared.{name}.scale": scales}
    loaded = load_quantised_shared(tensors, "mlp.shared")
    layer.load({f"shared_experts.{name}": each for name, each in loaded.named_parameters()}, partial=True)
    for name, each in layer.shared_experts.named_parameters():
        assert_same_bits(each, getattr(other.shared_experts, name))
    with pytest.raises(ConfigError, match=r"no tensor is below 'mlp\.other'; the prefix"):
        load_quantised_shared(tensors, "mlp.other")


@pytest.mark.parametrize(
    ("mlp", "message"),
    [
        (nn.Sequential(nn.Linear(8, 8)), "a shared expert with the parameters 0.weight, 0.bias; gate_proj, up_proj"),
        (
            nn.ModuleDict({name: nn.Linear(8, 8) for name in ("gate_proj", "up_proj", "down_proj")}),
            "a shared expert with activation SiLU or with biases",
        ),
    ],
)
def test_other_shared_experts_are_refused(mlp: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantise_shared(mlp)


def test_experts_of_a_checkpoint_are_loaded(world: World) -> None:
    layer, whole = MoELayer(world, SPEC, FORM, seed=1), whole_weights(2)
    loaded = load_quantised_experts({f"experts.{name}": each for name, each in whole.items()}, "experts")
    layer.load({f"experts.{name}": each for name, each in loaded.named_parameters()}, partial=True)
    for name, each in layer.experts.named_parameters():
        assert_same_bits(each, whole[name])


def test_live_weights_of_another_dtype_are_refused(world: World) -> None:
    layer = MoELayer(world, SPEC, FORM, seed=1)
    wide = {"experts.down_proj": torch.zeros(E, H, 256)}
    with pytest.raises(ConfigError, match=r"down_proj is torch.float8_e4m3fn and was given torch.float32, and a cast"):
        layer.load(wide, partial=True, cast=True)
    layer.load({"experts.down_proj": quantise_weight(wide["experts.down_proj"])[0]}, partial=True)
    assert not layer.experts.down_proj.float().any()


def test_8_bit_weights_are_not_offered(world: World) -> None:
    layer = MoELayer(world, SPEC, FORM, seed=1)
    message = r"experts\.gate_up_proj has 8-bit values, which cannot be offered; layer\.load takes them$"
    with pytest.raises(ConfigError, match=message):
        offer_weights(layer, readers=1)


@torch.no_grad()
def placed(world: World, placement: Any, whole: dict[str, Tensor]) -> list[bool]:
    layer, x = MoELayer(world, replace(SPEC, slots=3), FORM, seed=3), rows(world.rank)
    want = wanted(layer, whole, x)
    first, right = list(layer.experts.numbers), [error_of(layer(x), want) < BOUND]
    layer.place(placement)
    for change in (lambda: None, layer.reset_parameters):
        change()
        right.append(error_of(layer(x), want) < BOUND)
        for slot, expert in enumerate(layer.experts.numbers):
            parts = ((local(each)[slot], whole[name][expert]) for name, each in layer.experts.named_parameters())
            right += [expert < 0 or same_bits(*pair) for pair in parts]
    return [first != layer.experts.numbers, *right]


def test_slots_bring_values_and_scales_of_their_experts(pool: RankPool) -> None:
    placement = plan_placement(torch.tensor([90, 5, 5, 40]), ranks=2, slots=3)
    for right in pool.run(2, placed, placement, whole_weights(3)):
        assert all(right), right


@torch.no_grad()
def test_experts_sleep_and_wake(world: World) -> None:
    layer, x = MoELayer(world, SPEC, FORM, seed=3), rows(0)
    before = layer(x)
    held = sum(each.nbytes for each in layer.experts.parameters())
    assert let_sleep(layer) == held
    world.sleep()
    world.wake()
    assert_same_bits(layer(x), before)


# Refusals.


def test_gradients_are_refused_in_one_sentence(world: World) -> None:
    layer, x = MoELayer(world, SPEC, FORM, seed=3), rows(0)
    message = r"^a layer with 8-bit experts has no gradients, and {} needs one; call it under torch.no_grad, or train a"
    routing = torch.zeros(len(x), K, dtype=torch.int64), torch.ones(len(x), K)
    again = MoELayer(world, SPEC, replace(FORM, recompute="all"), seed=3)
    for call in (lambda: layer(x), lambda: again(x), lambda: layer.apply_experts(x, *routing)):
        with pytest.raises(ConfigError, match=message.format("gate.weight")):
            call()
    layer.requires_grad_(False)
    frozen = layer(x)
    with pytest.raises(ConfigError, match=message.format("x")):
        layer(x.clone().requires_grad_())
    layer.shared_experts.requires_grad_()
    with pytest.raises(ConfigError, match=message.format("shared_experts.gate_up_proj")):
        layer(x)
    with torch.no_grad():
        assert_same_bits(layer(x), frozen)
    with torch.inference_mode():
        assert_same_bits(layer(x), frozen)


WRONG = {
    "a name": (lambda _: replace(FORM, experts_dtype="fp8"), "experts_dtype is 'fp8'; it is None or 'float8_e4m3'"),
    "weights": (
        lambda world: MoELayer(world, replace(SPEC, dtype="bfloat16"), replace(FORM, weights="float32")),
        "weights is 'float32' over rows of bfloat16 with experts of float8_e4m3.*leave weights out",
    ),
    "bits": (
        lambda world: MoELayer(world, SPEC, replace(FORM, deterministic="batch")),
        "deterministic is 'batch' with 8-bit experts",
    ),
    "a cast": (
        lambda world: MoELayer(world, SPEC, FORM).to(torch.bfloat16),
        "experts of torch.float8_e4m3fn was to become torch.bfloat16",
    ),
    "a wire": (
        lambda world: MoELayer(world, replace(SPEC, wire=FP8), FORM),
        "rows that cross as float8_e4m3; only fused and staged, on GPUs",
    ),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(world: World, make: Callable[[World], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(world)


def test_rows_cross_as_8_bits_between_gpus() -> None:
    gpus: Any = mock.Mock()
    gpus.device = torch.device("cuda")
    spec = scaled_spec(replace(SPEC, wire={"combine": "bfloat16"}), gpus, "fused")
    assert (spec.dispatch_wire, spec.combine_wire, spec.output) == (FP8, "bfloat16", "raw")
    assert scaled_spec(replace(SPEC, wire=FP8), gpus, "auto") == scaled_spec(SPEC, gpus, "staged")
    with pytest.raises(ConfigError, match="with backend collective, which sends no 8-bit rows on GPUs; take fused"):
        scaled_spec(SPEC, gpus, "collective")
    with pytest.raises(ConfigError, match="with hidden 72; kernels of 8-bit rows take multiples of 16"):
        scaled_spec(replace(SPEC, hidden=72), gpus, "auto")
