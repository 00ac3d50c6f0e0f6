"""Checkpoints of a layer's experts: those of all ranks, whatever the world was made from, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.experts import local
from raymoe.moe.layer import LayerForm, MoELayer
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool

__all__ = ["groups"]  # a fixture
Groups = Callable[..., list[Any]]
SPEC = ExchangeSpec(tokens=4, hidden=16, experts=8, topk=2, dtype="float32")
FORM = LayerForm(ffn=8, biases=True)


def experts_of(layer: MoELayer) -> list[torch.Tensor]:
    """This rank's experts, as plain copies."""
    found = [local(each.detach()) for each in layer.experts.parameters()]
    return [each.clone() for each in found if each is not None]


@contextmanager
def made_by(how: str) -> Iterator[World]:
    """A world of the default process group's ranks."""
    domain = int(how.removeprefix("domain=")) if how.startswith("domain=") else None
    with World.of(domain=domain) as world:
        part = world.group(range(world.size)) if how == "group" else world
        assert part is not None
        yield part


def restored(rank: int, folder: str, how: str, save: bool) -> list[bool]:
    """Save a layer's weights, or load them into zeros; return whether this rank's are those of seed 1."""
    del rank
    with made_by(how) as world:
        layer, wanted = (MoELayer(world, SPEC, FORM, seed=1) for _ in range(2))
        model = nn.Sequential(layer)
        if save:
            dcp.save(model.state_dict(), checkpoint_id=folder)
        for each in layer.parameters():
            nn.init.zeros_(each)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        return [torch.equal(have, want) for have, want in zip(experts_of(layer), experts_of(wanted), strict=True)]


@pytest.mark.parametrize("how", ["of", "domain=1", "group"])
def test_a_checkpoint_of_two_ranks_has_the_experts_of_both(groups: Groups, tmp_path: Path, how: str) -> None:
    assert groups(2, restored, str(tmp_path / "saved"), how, True) == [[True] * 4] * 2


def test_a_checkpoint_over_domains_is_loaded_by_other_worlds(groups: Groups, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    assert groups(4, restored, folder, "domain=2", True) == [[True] * 4] * 4
    (tmp_path / "store").unlink()
    assert groups(2, restored, folder, "domain=1", False) == [[True] * 4] * 2


def of_domains(rank: int) -> tuple[bool, bool, float]:
    """A world of several domains keeps its process group weakly; the norm of docs/training.md works on its experts."""
    with World.of(domain=1) as world:
        layer = MoELayer(world, SPEC, FORM, seed=1)
        whole, inside = world.process_group is dist.group.WORLD, world.domain.process_group is None
        norm: Any = torch.nn.utils.get_total_norm([torch.full_like(each, rank) for each in layer.experts.parameters()])
        return whole, inside, float(norm.full_tensor()) ** 2


def test_experts_of_several_domains_are_shards_of_one_mesh(groups: Groups) -> None:
    of_a_rank = 4 * (16 * 16 + 16 * 8 + 16 + 16)
    for found in groups(2, of_domains):
        assert found[:2] == (True, True) and found[2] == pytest.approx(of_a_rank)  # zeros of rank 0, ones of rank 1


# Without a process group.


def refusals(world: World, store: str, folder: str) -> list[Any]:
    """Ask for the state of a layer of a world that no process group made, in the ways in which programs do."""
    model = nn.Sequential(MoELayer(world, SPEC, FORM, seed=1))
    layer = model[0]
    alone = len(model.state_dict())  # torch.distributed is not there
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        messages = []
        for ask in (
            model.state_dict,
            layer.experts.state_dict,
            copy.deepcopy(model).state_dict,
            lambda: get_model_state_dict(model),
        ):
            with pytest.raises(ConfigError) as caught:
                ask()
            messages.append(str(caught.value))
        layer.experts.saved_by_rank = True
        path = f"{folder}/{world.rank}.pt"
        torch.save(model.state_dict(), path)
        before = experts_of(layer)
        for each in layer.parameters():
            nn.init.zeros_(each)
        model.load_state_dict(torch.load(path))
        same = [torch.equal(have, want) for have, want in zip(experts_of(layer), before, strict=True)]
        return [alone, messages, same]
    finally:
        dist.destroy_process_group()


def test_plain_experts_are_not_given_where_they_would_be_saved_as_replicas(pool: RankPool, tmp_path: Path) -> None:
    """`raymoe.join` makes such worlds, as `World.open` does."""
    for rank, (alone, messages, same) in enumerate(pool.run(2, refusals, str(tmp_path / "store"), str(tmp_path))):
        assert alone == 5 and same == [True] * 4
        names = ["0.experts", "experts", "0.experts", "0.experts"]
        for name, message in zip(names, messages, strict=True):
            assert message.startswith(f"the state_dict of {name} was asked for on rank {rank} of 2")
            assert "save those of one rank only" in message and "saved_by_rank = True" in message


def in_parts(rank: int) -> list[str]:
    """Layers of a domain, and of a group of some ranks: no process group has these ranks alone."""
    found = []
    with World.of(domain=2) as world:
        with pytest.raises(ConfigError) as caught:
            MoELayer(world.domain, SPEC, FORM).state_dict()
        found.append(str(caught.value))
    with World.of() as world:
        parts = [world.group(ranks) for ranks in ((0, 1), (2, 3))]
        part = parts[rank // 2]
        assert part is not None
        with pytest.raises(ConfigError) as caught:
            MoELayer(part, SPEC, FORM).state_dict()
        found.append(str(caught.value))
        single = world.group([0])
        if single is not None:
            found.append(str(len(MoELayer(single, SPEC, FORM).state_dict())))  # it has all experts
    return found


def test_a_part_of_a_process_group_is_refused_and_a_rank_with_all_experts_is_not(groups: Groups) -> None:
    for rank, found in enumerate(groups(4, in_parts)):
        assert all("no process group has the ranks of the layer's world" in message for message in found[:2])
        assert found[2:] == (["5"] if rank == 0 else [])
