"""Exchanges found by a group's name and a spec: in compiled functions too, where nothing was made before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raymoe.errors import ConfigError
from raymoe.exchange.exchange import Exchange
from raymoe.memory.world import World
from raymoe.moe.by_name import exchange_of
from raymoe.moe.differentiable import combine, dispatch
from tests.unit.memory.test_world_of import with_group
from tests.unit.ranks import RankPool


def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: str) -> torch.Tensor:
    found = exchange_of(group, tokens=8, hidden=x.shape[1], experts=4, topk=2, dtype="float32")
    got = dispatch(found, x, ids, weights)
    return combine(found, torch.tanh(got.x), got)


def run(function: Any, group: str, tokens: int, rank: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 8, generator=source, requires_grad=True)
    weights, ids = torch.rand(tokens, 4, generator=source).topk(2)
    y = function(x, ids, weights.requires_grad_(), group)
    y.square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def trace_before_anything_is_made(rank: int) -> list[int]:
    torch.compiler.reset()
    group, made = str(dist.group.WORLD.group_name), []
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = [run(compiled, group, tokens, rank) for tokens in (5, 3 + rank, 4)]
    world = World.of(shared=True)
    found = exchange_of(group, tokens=8, hidden=8, experts=4, topk=2, dtype="float32")
    made.append(found.world is world)
    torch.testing.assert_close(results, [run(layer, group, tokens, rank) for tokens in (5, 3 + rank, 4)])
    world.close()
    torch.testing.assert_close(run(compiled, group, 5, rank), results[0])  # is compiled again, and makes another world
    made.append(World.of(shared=True) is world)
    torch.compiler.reset()
    return made


@pytest.mark.thorough
def test_a_compiled_function_makes_its_exchange_while_it_is_traced(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, with_group, str(tmp_path / "store"), trace_before_anything_is_made)
    assert found == [[True, False]] * 2


def test_names_of_no_group_are_refused_and_names_may_be_used_again() -> None:
    found: list[Exchange] = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD  # held, so that the first world is not closed with its group
        found.append(exchange_of(str(group.group_name), tokens=4, hidden=8, experts=2, topk=1))
        found.append(exchange_of(str(group.group_name), tokens=4, hidden=8, experts=2, topk=1, capacity=2))
        with pytest.raises(ConfigError, match="knows no process group of the name 'experts'"):
            exchange_of("experts", tokens=4, hidden=8, experts=2, topk=1)
        dist.destroy_process_group()
    assert len({id(each) for each in found}) == 4
    assert found[0].closed and found[0].spec == found[2].spec
    found[2].world.close()
