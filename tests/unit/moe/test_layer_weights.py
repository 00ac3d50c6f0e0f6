"""The weights of a new layer: other ones in each layer, the same on any number of ranks, and on the device meta."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, RouterForm, expert_parameters
from raymoe.moe.families import Parts
from raymoe.moe.weights import ExpertShape, expert_weights
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

SPEC = ExchangeSpec(tokens=16, hidden=32, experts=4, topk=2, dtype="float32", depth=0)
FORM = LayerForm(ffn=16, router=RouterForm(4, 2, score="sigmoid"), biases=True, shared=8, norm=1e-6)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' parts of a DTensor."""
    every: Any = tensor.detach()
    return every.full_tensor() if hasattr(every, "full_tensor") else every


def values_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in layer.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Seeds.


def weights_of(world: World, store: str) -> list[dict[str, torch.Tensor]]:
    """Make three layers without a seed, and one with that of the second."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of() as own:
            layers = [MoELayer(own, SPEC, FORM) for _ in range(3)]
            return [values_of(layer) for layer in (*layers, MoELayer(own, SPEC, FORM, seed=1))]
    finally:
        dist.destroy_process_group()


def test_each_layer_has_other_weights_which_are_the_same_on_any_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, weights_of, str(tmp_path / "one"))
    for found in pool.run(2, weights_of, str(tmp_path / "two")):
        assert all(same(a, b) for a, b in zip(found, alone, strict=True))
    first, second, third, seeded = alone
    assert same(second, seeded)
    for name in ("experts.gate_up_proj", "experts.down_proj_bias", "gate.weight", "shared_experts.down_proj"):
        rows = torch.stack([layer[name] for layer in (first, second, third)]).flatten(1)
        assert not any(torch.equal(rows[a], rows[b]) for a, b in ((0, 1), (0, 2), (1, 2))), name
    drawn = expert_weights(ExpertShape(32, 16, torch.float32), seed=0, expert=3)
    assert torch.equal(first["experts.down_proj"][3], drawn.down)


# The device meta.


def on_meta(world: World, store: str, spread: bool) -> tuple[bool, bool, bool]:
    """Make a layer on the device meta, let FSDP2 spread it, give it memory and values, and run it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of() as own:
            wanted = MoELayer(own, SPEC, FORM, seed=5)
            with torch.device("meta"):
                model = nn.Sequential(MoELayer(own, SPEC, FORM, seed=5))
            empty = all(each.is_meta for each in (*model.parameters(), *model.buffers()))
            if spread:
                fully_shard(model, ignored_params=set(expert_parameters(model).values()))
            model.to_empty(device="cpu")
            for each in (*model.parameters(), *model.buffers()):
                each.detach().fill_(torch.nan)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            x = torch.linspace(-1, 1, 160).view(5, 32)
            return empty, same(values_of(model[0]), values_of(wanted)), torch.equal(model(x), wanted(x))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("spread", [False, True], ids=["alone", "FSDP2"])
def test_a_layer_on_meta_gets_the_values_of_its_seed(pool: RankPool, tmp_path: Path, spread: bool) -> None:
    assert pool.run(2, on_meta, str(tmp_path / "store"), spread) == [(True, True, True)] * 2


def test_a_layer_of_given_parts_has_no_seed() -> None:
    (world,) = wired(1)
    with world:
        layer = MoELayer(world, SPEC, FORM)
        of_parts = MoELayer(world, SPEC, Parts(layer.gate, layer.experts, layer.shared_experts))
        with pytest.raises(ConfigError, match="whose weights follow from no seed: load them"):
            of_parts.reset_parameters()


# The output.


def warned(world: World, store: str) -> list[str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        found = []
        with World.of() as own, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for form in (FORM, LayerForm(ffn=16), LayerForm(ffn=16, residual=True)):
                layer = MoELayer(own, SPEC, form)
                fully_shard(layer, ignored_params=set(expert_parameters(layer).values()))
                for shape in ((4, 32), (2, 2, 32), (32,)):
                    x = torch.ones(shape, requires_grad=True)
                    y = layer(x)
                    assert y.shape == x.shape
                    y.square().sum().backward()
                    assert x.grad is not None and x.grad.shape == x.shape
        found += [str(each.message) for each in caught]
        return found
    finally:
        dist.destroy_process_group()


def test_fsdp_warns_of_no_view(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, warned, str(tmp_path / "store")) == [[], []]
