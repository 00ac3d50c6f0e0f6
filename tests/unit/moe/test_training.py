"""The calls of a training step beside an unsharded run of the same tokens: norms, clipped gradients, loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import (
    LayerForm,
    MoELayer,
    RouterForm,
    RoutingStats,
    average_expert_gradients,
    clip_grad_norm,
    expert_load,
    expert_parameters,
    routing_stats,
    update_router_bias,
)
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool

__all__ = ["groups"]  # a fixture
Groups = Callable[..., list[Any]]
H, TOKENS, EXPERTS = 16, 12, 8
SPEC = ExchangeSpec(tokens=TOKENS, hidden=H, experts=EXPERTS, topk=2, dtype="float32", depth=0)
ROUTERS = RouterForm(EXPERTS, 2), RouterForm(EXPERTS, 2, score="sigmoid")
MAX_NORM = 0.01


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of this file alone: torch caches the meshes of DTensors, also those of a group that another test ended."""
    with RankPool(4) as ranks:
        yield ranks


class Model(nn.Module):
    """Two layers of experts between two linear layers; `again` computes the layers once more in the backward pass."""

    def __init__(self, world: World, spec: ExchangeSpec = SPEC, again: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H, bias=False)
        forms = [LayerForm(ffn=8, router=router, shared=8, norm=1e-6, residual=True) for router in ROUTERS]
        self.layers = nn.ModuleList(MoELayer(world, spec, form, seed=seed) for seed, form in enumerate(forms))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        return self.last(x)


@contextmanager
def alone() -> Iterator[World]:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        yield world


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(rank))


def unsharded(ranks: int) -> Model:
    """The model with all experts in this process, after the backward pass of the tokens of all ranks."""
    with alone() as world:
        model = Model(world, replace(SPEC, tokens=ranks * TOKENS))
        model(torch.cat([tokens_of(rank) for rank in range(ranks)])).square().mean().backward()
        return model


def with_ddp(model: Model) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))
    return DistributedDataParallel(model)


def with_fsdp(model: Model) -> nn.Module:
    own = set(expert_parameters(model).values())
    fully_shard(model.layers[0], ignored_params=own)
    fully_shard(model, ignored_params=own)
    return model


def by_hand(model: Model) -> nn.Module:
    return model


WAYS: dict[str, Callable[[Model], nn.Module]] = {"by hand": by_hand, "DDP": with_ddp, "FSDP2": with_fsdp}


def average_others(model: nn.Module) -> None:
    own = set(expert_parameters(model).values())
    for parameter in model.parameters():
        if parameter not in own and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def whole(parameter: nn.Parameter) -> torch.Tensor:
    gradient: Any = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def clipped(rank: int, way: str, experts_over: int, norm_type: float) -> list[Any]:
    """The norm before and after the clip, and the largest error of a clipped gradient, relative to the largest."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // experts_over, experts_over), mesh_dim_names=("dp", "ep"))
    with World.of(mesh) as world:
        plain = Model(world)
        model = WAYS[way](plain)
        for _ in range(2):  # the second call finds the groups of the first
            model.zero_grad()
            model(tokens_of(rank)).square().mean().backward()
            average_expert_gradients(model)
        if way == "by hand":
            average_others(model)
        norm = clip_grad_norm(model, MAX_NORM, norm_type)
        have = {name: whole(parameter).clone() for name, parameter in plain.named_parameters()}
        again = clip_grad_norm(model, MAX_NORM, norm_type)
    wanted = unsharded(ranks)
    total = nn.utils.clip_grad_norm_(wanted.parameters(), MAX_NORM, norm_type)
    errors = {}
    for name, parameter in wanted.named_parameters():
        assert parameter.grad is not None
        errors[name] = float((have[name] - parameter.grad).abs().max() / parameter.grad.abs().max())
    return [float(norm), float(total), float(again), max(errors.values())]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize(("ranks", "experts_over"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_the_norm_and_the_clipped_gradients_are_those_of_an_unsharded_run(
    groups: Groups, way: str, ranks: int, experts_over: int, norm_type: float
) -> None:
    found = groups(ranks, clipped, way, experts_over, norm_type)
    assert len({norm for norm, *_ in found}) == 1, "ranks would clip by different factors"
    for norm, wanted, again, error in found:
        assert wanted > MAX_NORM and norm == pytest.approx(wanted, rel=1e-5)
        assert again == pytest.approx(MAX_NORM, rel=1e-4)
        assert error < 1e-5


def clipped_alone(world: World) -> list[float]:
    """Plain experts: no process group made the world."""
    model = Model(world)
    model(tokens_of(world.rank)).square().mean().backward()
    average_expert_gradients(model)
    own = set(expert_parameters(model).values())
    for parameter in model.parameters():
        if parameter not in own:
            parameter.grad = torch.stack(world.swap(parameter.grad, "gradients")).mean(0)
    wanted = nn.utils.get_total_norm(
        [each.grad for each in unsharded(world.size).parameters() if each.grad is not None]
    )
    return [float(clip_grad_norm(model, MAX_NORM)), float(wanted)]


def test_plain_experts_are_counted_once_too(pool: RankPool) -> None:
    found = pool.run(2, clipped_alone)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-5)


def test_a_model_without_gradients_or_layers_is_clipped_as_by_torch() -> None:
    model = nn.Linear(4, 4)
    assert float(clip_grad_norm(model, 1.0)) == 0.0
    model(torch.ones(4)).sum().backward()
    assert float(clip_grad_norm(model, 1.0)) == pytest.approx(20**0.5)
    assert float(clip_grad_norm(model, 1.0)) == pytest.approx(1.0)
    average_expert_gradients(model)
    update_router_bias(model, 0.1)
    assert routing_stats(model) == {}


# Loads.


def counted(rank: int, experts_over: int, again: bool | None, compiled: bool) -> list[Any]:
    """The loads that a program would count by itself, those of `routing_stats`, and the biases after two updates."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // experts_over, experts_over), mesh_dim_names=("dp", "ep"))
    with World.of(mesh, timeout_s=300 if compiled else 20) as world:
        model = Model(world, again=again)
        step = torch.compile(model, backend="aot_eager") if compiled else model
        by_program = torch.zeros(2, EXPERTS, dtype=torch.int64)
        names = [name for name, layer in model.named_modules() if isinstance(layer, MoELayer)]
        for micro_batch in range(2):
            x = tokens_of(10 * micro_batch + rank)
            with torch.no_grad():
                y = model.first(x)
                for place, layer in enumerate(model.eval().layers):
                    y, routing = layer(y, return_routing=True)
                    by_program[place] += expert_load(routing.topk_idx, EXPERTS)
            model.train()
            step(x).square().mean().backward()
        dist.all_reduce(by_program)
        first, then = routing_stats(model), routing_stats(model)
        update_router_bias(model, 0.25)
        update_router_bias(model, 0.25)  # no pass since: an even load, which moves nothing
        with torch.no_grad():
            model(tokens_of(rank))
        later = routing_stats(model)
        bias = model.layers[1].gate.e_score_correction_bias.tolist()
        return [by_program.tolist(), names, first, then, later, bias]


def check_counts(found: list[list[Any]], ranks: int, experts_over: int) -> None:
    capacity = SPEC.rows(experts_over)
    for by_program, names, first, then, later, bias in found:
        assert list(first) == list(then) == names == ["layers.0", "layers.1"]
        for name, load in zip(names, by_program, strict=True):
            stats = first[name]
            assert stats.load == load and sum(load) == 2 * 2 * TOKENS * ranks
            assert stats.capacity == capacity and 0 < stats.rows <= capacity
            assert stats.imbalance == max(load) / (sum(load) / EXPERTS)
            assert then[name] == RoutingStats([0] * EXPERTS, 0, capacity) and then[name].imbalance == 0
            assert sum(later[name].load) == 2 * TOKENS * ranks, "also without gradients"
        mean = sum(by_program[1]) / EXPERTS
        assert bias == [0.25 * ((each < mean) - (each > mean)) for each in by_program[1]]
        assert first == found[0][2] and bias == found[0][5]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ranks", "experts_over"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("again", [None, False, True], ids=["once", "checkpoint", "reentrant"])
def test_stats_count_each_pass_of_all_ranks_once_and_the_bias_follows_the_sign(
    groups: Groups, ranks: int, experts_over: int, again: bool | None
) -> None:
    check_counts(groups(ranks, counted, experts_over, again, False), ranks, experts_over)


@pytest.mark.thorough
@pytest.mark.parametrize("again", [None, False], ids=["once", "checkpoint"])
@pytest.mark.timeout(300)
def test_compiled_layers_count_too(groups: Groups, again: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.ranks.DEADLINE_S", 240.0)
    check_counts(groups(4, counted, 2, again, True), 4, 2)


def rows_at_most(world: World) -> tuple[int, int]:
    model = Model(world)
    for count in (2, TOKENS, 1):
        model(tokens_of(world.rank)[:count])
    stats = routing_stats(model)["layers.0"]
    ids = [
        model.layers[0](tokens_of(world.rank), return_routing=True)[1].topk_idx
    ]  # the first layer takes model.first's
    del ids
    x = model.first(tokens_of(world.rank))
    load = expert_load(model.layers[0](x, return_routing=True)[1].topk_idx, EXPERTS)
    loads = torch.tensor(world.swap(load.tolist(), "loads")).sum(0)
    padded = (loads + SPEC.alignment - 1) // SPEC.alignment * SPEC.alignment
    return stats.rows, int(padded.view(world.size, -1).sum(1).max())


def test_rows_are_those_of_the_fullest_pass_and_rank_without_a_process_group(pool: RankPool) -> None:
    for rows, wanted in pool.run(2, rows_at_most):
        assert rows == wanted


def test_a_layer_returns_its_routing_as_a_part_of_the_graph() -> None:
    with alone() as world:
        layer = MoELayer(world, SPEC, LayerForm(ffn=8, router=ROUTERS[0]))
        x = tokens_of(0).view(3, 4, H)
        y, routing = layer(x, return_routing=True)
        assert torch.equal(y, layer(x)) and y.shape == x.shape
        ids, weights, _ = layer.gate(x)
        assert torch.equal(routing.topk_idx, ids) and torch.equal(routing.topk_weights, weights)
        routing.logits.square().mean().backward()
        assert layer.gate.weight.grad is not None and layer.gate.weight.grad.abs().max() > 0


def too_few(rank: int) -> str:
    with World.of() as world:
        layer = MoELayer(world, SPEC, LayerForm(ffn=8))
        layer(tokens_of(rank)).sum().backward()
        three = dist.new_group([0, 1, 2])
        if rank == 3:
            return ""
        with pytest.raises(ConfigError) as caught:
            average_expert_gradients(layer, three)
        return str(caught.value)


def test_a_group_that_does_not_hold_whole_worlds_is_refused(groups: Groups) -> None:
    for message in groups(4, too_few)[:3]:
        assert "spread over 4 ranks, and 3 ranks were taken" in message and "give group=" in message
