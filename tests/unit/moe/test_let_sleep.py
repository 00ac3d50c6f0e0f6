"""The weights of a layer's experts sleep, and wake with their bytes or for a load, on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raymoe.errors import ConfigError, WeightsMissing
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, expert_parameters, let_sleep, load_weights
from raymoe.moe.experts import local
from tests.unit.moe.bits import same_bits
from tests.unit.ranks import RankPool

H, F, E, T = 16, 8, 8, 12
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=2, dtype="float32", depth=0)


def stack_of(world: World, seed: int) -> nn.Sequential:
    form = LayerForm(ffn=F, norm=1e-6, residual=True, biases=True)
    return nn.Sequential(*[MoELayer(world, SPEC, form, seed=seed + layer) for layer in range(2)])


def rows(rank: int) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(rank))


def addresses(model: nn.Module) -> list[int]:
    return [local(each.detach()).data_ptr() for each in model.parameters()]


def sleep_and_wake(world: World, is_compiled: bool) -> dict[str, bool]:
    """Return what holds."""
    model, other, x = stack_of(world, 1), stack_of(world, 5), rows(world.rank)
    run = torch.compile(model, backend="eager") if is_compiled else model
    old, new = model(x), other(x)
    parameters, before = list(model.parameters()), addresses(model)
    nbytes = let_sleep(model)
    experts = expert_parameters(model)
    holds = {
        "all bytes of experts": nbytes == sum(local(each.detach()).nbytes for each in experts.values()),
        "the parameters are the same": all(a is b for a, b in zip(parameters, model.parameters(), strict=True)),
        "experts moved": len(set(before) & set(addresses(model))) == len(parameters) - len(experts),
        "once": let_sleep(model) == nbytes,
        "the same bits there": same_bits(run(x), old),
    }
    before = addresses(model)
    world.sleep()
    holds["memory is empty"] = not any(local(each.detach()).any() for each in experts.values())
    with pytest.raises(
        WeightsMissing, match=r"has no values of 0\.experts\.gate_up_proj.* they sleep: call world\.wake"
    ):
        run(x)
    values = {name: local(each.detach()) for name, each in other.named_parameters()}
    with pytest.raises(ConfigError, match=r"which sleeps; call world\.wake before"):
        load_weights(model, values)
    world.wake()
    holds["restored"] = same_bits(run(x), old)
    world.sleep(copy=False)
    world.wake("empty")
    with pytest.raises(WeightsMissing, match="they were not loaded after a wake: load them"):
        run(x)
    half = {name: each for name, each in values.items() if name.startswith("0.")}
    load_weights(model, half, partial=True)
    with pytest.raises(WeightsMissing, match=r"has no values of 1\.experts\.gate_up_proj"):
        run(x)
    load_weights(model, values)
    holds["loaded"] = same_bits(run(x), new)
    holds["addresses stay"] = addresses(model) == before
    loss = model(x).square().sum()
    world.sleep()
    with pytest.raises(WeightsMissing):
        loss.backward()
    world.wake()
    model(x).square().sum().backward()
    torch.optim.SGD(list(experts.values()), lr=0.1).step()
    holds["trained in place"] = addresses(model) == before and not same_bits(model(x), new)
    return holds


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["eager", "compiled"]
)
def test_experts_sleep_and_wake_where_they_were(pool: RankPool, is_compiled: bool) -> None:
    for holds in pool.run(2, sleep_and_wake, is_compiled):
        assert [what for what, is_so in holds.items() if not is_so] == []


def sleep_of_dtensors(world: World, store: str) -> dict[str, bool]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with World.of() as own:
            assert all(hasattr(each, "to_local") for each in expert_parameters(stack_of(own, 1)).values())
            return sleep_and_wake(own, False)
    finally:
        dist.destroy_process_group()


def test_experts_that_are_dtensors_sleep_too(pool: RankPool, tmp_path: Path) -> None:
    for holds in pool.run(2, sleep_of_dtensors, str(tmp_path / "store")):
        assert [what for what, is_so in holds.items() if not is_so] == []
