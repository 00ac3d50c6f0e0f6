"""Errors of layers that name the mistake of a training program, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from raymoe.errors import ConfigError, DataRefused, PeerTimeout
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer
from raymoe.moe.experts import local
from tests.unit.exchange.exchange_judge import advice
from tests.unit.ranks import RankPool
from tests.unit.worlds import each, wired

SPEC = ExchangeSpec(tokens=16, hidden=32, experts=4, topk=2, dtype="float32", depth=0)
FORM = LayerForm(ffn=16)


# A layer that one rank does not call.


def timeout_of(world: World, where: str) -> str:
    """Leave out the second layer, or its backward pass, on rank 1; return what rank 0 raises."""
    layers = [MoELayer(world, SPEC, FORM) for _ in range(2)]
    x = torch.ones(5, 32, requires_grad=True)
    run = torch.compile(layers[1], backend="aot_eager", fullgraph=True) if where == "compiled" else layers[1]
    with torch.set_grad_enabled(where != "no gradients"):
        y = layers[0](x)
        y = run(y) if where == "backward" or world.rank == 0 else y
        if where == "backward" and world.rank == 0:
            y.sum().backward()
    return ""


@pytest.mark.parametrize("where", ["forward", "no gradients", "backward", "compiled"])
def test_a_timeout_asks_whether_all_ranks_called_the_layer(where: str) -> None:
    worlds = wired(2, timeout_s=0.5)
    error, _ = each(worlds, lambda world: timeout_of(world, where))
    for world in worlds:
        world.close(together=False)
    assert isinstance(error, PeerTimeout) and error.peer == 1
    asked = "did all ranks call this layer, number 2, and those before it, in the backward pass too?"
    assert str(error).endswith(f": {asked}") and str(error).count(asked) == 1


# More rows than the capacity.


def grown(world: World) -> tuple[str, bool]:
    """Refuse a step, then take an exchange with more capacity; return the error, and whether the step then is right."""
    layer, roomy = (MoELayer(world, replace(SPEC, capacity=rows), FORM, seed=1) for rows in (16, "worst"))
    x = torch.ones(16, 32)
    try:
        layer(x)
    except DataRefused as error:
        rows, message = error.rows_needed, str(error)
    layer.exchange = world.exchange(replace(layer.exchange.spec, capacity=rows))
    return message, torch.equal(layer(x), roomy(x))


def test_a_refusal_names_the_capacity_that_a_layer_then_takes(pool: RankPool) -> None:
    """All tokens choose the same two experts, which are on one rank."""
    for message, right in pool.run(2, grown):
        assert message.endswith(f"its capacity is 16: {advice(64)}") and right


# Experts that data parallelism takes over.


def in_ddp(model: nn.Module, names: list[str]) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


TAKES_OVER: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": DistributedDataParallel,
    "DDP of some": lambda model: in_ddp(model, ["1.experts.down_proj"]),
    "fully_shard": fully_shard,
    "fully_shard of the layer": lambda model: fully_shard(model[1]),
    "fully_shard of the experts": lambda model: fully_shard(model[1].experts),
    "fully_shard of some": lambda model: fully_shard(model, ignored_params={model[1].experts.down_proj}),
}


def refusals(world: World, store: str, sharded: bool) -> list[tuple[str, bool]]:
    """Give all parameters to data parallelism; return its errors, and whether the experts are what they were."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        found = []
        with World.of() if sharded else nullcontext(world) as own:
            for take_over in TAKES_OVER.values():
                model = nn.Sequential(nn.Linear(32, 32), MoELayer(own, SPEC, FORM, seed=3))
                with pytest.raises(ConfigError) as caught:
                    take_over(model)
                wanted = MoELayer(own, SPEC, FORM, seed=3).experts.parameters()
                pairs = zip(model[1].experts.parameters(), wanted, strict=True)
                found.append((str(caught.value), all(torch.equal(local(a), local(b)) for a, b in pairs)))
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [True, False], ids=["DTensors", "plain tensors"])
def test_experts_that_data_parallelism_takes_over_are_refused(pool: RankPool, tmp_path: Path, sharded: bool) -> None:
    for found in pool.run(2, refusals, str(tmp_path / "store"), sharded):
        for way, (message, unchanged) in zip(TAKES_OVER, found, strict=True):
            ignoring = "_set_params_and_buffers_to_ignore_for_model(model, list(" if way.startswith("DDP") else "set("
            assert f"{ignoring}raymoe.moe.expert_parameters(model)" in message, way
            assert ("down_proj" in message.partition(" of a layer" if "shard" in way else ", and")[0]) == (
                "some" not in way
            )
            assert unchanged, way


def replicated(world: World, store: str) -> bool:
    """Let DDP and FSDP2 have the layers of worlds that have all experts on each rank: they are replicas."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        alone = World.open(rank=0, size=1)
        alone.wire([alone.descriptor()])
        with alone:
            layers = [MoELayer(alone, SPEC, FORM, seed=3) for _ in range(3)]
            models: list[Any] = [DistributedDataParallel(layers[0]), fully_shard(layers[1]), layers[2]]
            for model in models:
                model(torch.full((4, 32), float(1 + world.rank))).square().sum().backward()
            by_ddp, by_fsdp, own = (layer.experts.down_proj.grad for layer in layers)
            dist.all_reduce(own)
            return all(torch.allclose(each, own / 2) for each in (by_ddp, by_fsdp.full_tensor()))
    finally:
        dist.destroy_process_group()


def test_experts_that_are_replicas_may_be_taken_over(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, replicated, str(tmp_path / "store")) == [True, True]


# An exchange beside a product.


def test_overlap_has_its_names_and_changes_nothing_on_cpu_ranks() -> None:
    (world,) = wired(1)
    with world, torch.no_grad():
        layer, x = MoELayer(world, SPEC, FORM).eval(), torch.randn(5, 32)
        assert layer.overlap == "none"
        want = layer(x)
        with pytest.raises(ConfigError, match="overlap is 'all'; it is one of none, combine"):
            layer.overlap = "all"
        layer.overlap = "combine"
        assert torch.equal(layer(x), want)
