"""`World.of(group, shared=True)`: one world a group, found again, and closed with the group or at exit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.unit.memory.test_world_of import error_of, with_group
from tests.unit.ranks import RankPool

SPEC = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, dtype="float32")


@pytest.fixture
def groups(pool: RankPool, tmp_path: Path) -> Callable[..., list[Any]]:
    """`groups(size, f)` calls `f(rank)` in processes that have a default process group."""
    return lambda size, body: pool.run(size, with_group, str(tmp_path / "store"), body)


def find_a_world_again(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    world = World.of(shared=True)
    others = World.of(dist.group.WORLD, shared=True), World.of(mesh, shared=True), World.of()
    found = [other is world for other in others]
    others[2].close()
    found.append(error_of(lambda: World.of(shared=True, timeout_s=5)))
    part = World.of(dist.new_group([0, 1]), shared=True)
    found.append((part is world, part.swap(rank, "part")))
    exchange = world.exchange(SPEC)
    equal = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, dtype="float32")
    found.append([world.exchange(equal) is exchange, world.exchange(SPEC, "host") is exchange])
    exchange.close()
    again = world.exchange(SPEC)
    got = again.dispatch(torch.ones(1, 8), torch.tensor([[1 - rank]]), torch.ones(1, 1))
    found.append([again is exchange, again.combine(3 * got.x, got)[0, 0].item()])
    world.close()
    later = World.of(shared=True)
    found.append([again.closed, later is world, later.swap(rank, "later")])
    return found


def test_a_group_has_one_world_until_it_is_closed(groups) -> None:
    for found in groups(2, find_a_world_again):
        # With one rank a dimension, the mesh has the default group.
        assert found[:3] == [True, True, False]
        kind, said = found[3]
        assert kind == "ConfigError"
        assert "was asked for with (device, timeout_s, domain) = ('auto', 5, None); it was made with" in said
        assert found[4:] == [(False, [0, 1]), [True, False], [False, 3.0], [True, False, [0, 1]]]


def destroy_groups(rank: int) -> Any:
    dropped, held = dist.new_group([0, 1]), dist.new_group([0, 1])
    worlds = World.of(dropped, shared=True), World.of(held, shared=True)
    exchanges = [world.exchange(SPEC) for world in worlds]
    dist.destroy_process_group(dropped)
    dist.destroy_process_group(held)
    del dropped
    gc.collect()
    states = [world.closed for world in worlds]
    World.of(shared=True)  # notices that `held` is gone
    dist.destroy_process_group()
    return states, [world.closed for world in worlds], [exchange.closed for exchange in exchanges]


def test_a_shared_world_is_closed_with_its_group(groups) -> None:
    for states, later, exchanges in groups(2, destroy_groups):
        assert states == [True, False]
        assert later == [True, True]
        assert exchanges == [True, True]


AT_EXIT = """
import sys, torch.distributed as dist
from raymoe import ExchangeSpec, World
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
world = World.of(shared=True)
exchange = world.exchange(ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, dtype="float32"))
closing = World.close
def close(self, together=True):
    closing(self, together)
    print("closed", self is world, self.closed, exchange.closed, flush=True)
World.close = close
"""


@pytest.mark.thorough  # two interpreters import torch
def test_a_shared_world_is_closed_when_the_interpreter_exits(tmp_path: Path) -> None:
    program = [sys.executable, "-c", AT_EXIT]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*program, str(rank), str(tmp_path / "s")], stdout=-1, stderr=-1, text=True, env=environment)
        for rank in range(2)
    ]
    for process in processes:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert said == "closed True True True\n"


def test_a_world_that_goes_during_a_capture_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from raymoe.memory import group_worlds

    class Group:
        """Stands for a process group: torch's object is of C++."""

    class Pretended:
        device, closed = torch.device("cpu"), False

        def close(self, together: bool = True) -> None:  # noqa: ARG002
            self.closed = True

    worlds, first, second = group_worlds.GroupWorlds(), Pretended(), Pretended()
    monkeypatch.setattr(group_worlds, "is_known", lambda _: True)
    group = Group()
    assert worlds.of(group, (), lambda: first) is first
    monkeypatch.setattr(group_worlds, "capturing", lambda _: True)
    del group
    gc.collect()
    assert not first.closed
    monkeypatch.setattr(group_worlds, "capturing", lambda _: False)
    other = Group()
    assert worlds.of(other, (), lambda: second) is second
    assert first.closed and not second.closed


def test_equal_numbers_of_rows_share_an_exchange_also_where_one_is_a_factor() -> None:
    world = World.open(rank=0, size=1)
    world.wire([world.descriptor()])
    specs = [ExchangeSpec(4, 8, 2, 1, "float32", alignment=1, capacity=capacity) for capacity in (1, 1.0, 4)]
    with world:
        one, factor, four = (world.exchange(spec) for spec in specs)
        assert isinstance(one, Exchange) and one is not factor and factor is four
        assert (one.spec.rows(1), four.spec.rows(1)) == (1, 4)
    assert one.closed and four.closed
