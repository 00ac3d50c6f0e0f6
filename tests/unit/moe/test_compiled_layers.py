"""Stacks of layers under torch.compile, on two ranks: the outputs and gradients of eager layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer
from raymoe.moe.experts import local
from raymoe.moe.layer import expert_parameters
from tests.unit.ranks import RankPool

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

H = 32
SPEC = ExchangeSpec(tokens=16, hidden=H, experts=4, topk=2, dtype="float32", depth=0)
TOKENS = ((5, 5, 9), (7, 0, 2))
"""Of each rank in three steps: other numbers, none, and one that compiles anew on one rank only."""
RECOMPUTED = {"activation again": "activation", "all again": "all"}
"""Ways in which the layers themselves compute something again."""
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Stack(nn.Module):
    """A linear layer and three MoE layers, each of which may be computed again in the backward pass."""

    def __init__(self, world: World, reentrant: bool | None = None, recompute: str = "nothing") -> None:
        super().__init__()
        form = LayerForm(ffn=16, residual=True, norm=1e-6, recompute=recompute)
        self.first = nn.Linear(H, H)
        self.layers = nn.ModuleList(MoELayer(world, SPEC, form, seed=seed) for seed in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def outcomes(model: Callable[[torch.Tensor], torch.Tensor], stack: Stack, rank: int) -> list[Outcome]:
    """Run three steps; return the output of each, and the gradients of all parameters."""
    source, found = torch.Generator().manual_seed(rank), []
    for tokens in TOKENS[rank]:
        stack.zero_grad()
        y = model(torch.randn(tokens, H, generator=source))
        y.square().sum().backward()
        gradients = {
            name: local(parameter.grad).clone()
            for name, parameter in stack.named_parameters()
            if parameter.grad is not None
        }
        found.append((y.detach(), gradients))
    return found


def plain(stack: Stack) -> nn.Module:
    return stack


def under_ddp(stack: Stack) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stack, list(expert_parameters(stack)))
    return DistributedDataParallel(stack)


def under_fsdp(stack: Stack) -> nn.Module:
    fully_shard(stack, ignored_params=set(expert_parameters(stack).values()))
    return stack


WAYS: dict[str, tuple[Callable[[Stack], nn.Module], bool | None, str]] = {
    "default": (plain, None, "default"),
    "max-autotune": (plain, None, "max-autotune-no-cudagraphs"),
    "checkpoint": (plain, False, "default"),
    "reentrant checkpoint": (plain, True, "default"),
    "DDP": (under_ddp, None, "default"),
    "FSDP2": (under_fsdp, None, "default"),
    **dict.fromkeys(RECOMPUTED, (plain, None, "default")),
}


def compiled_and_eager(world: World, store: str, way: str) -> tuple[list[Outcome], list[Outcome]]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    torch.compiler.reset()
    torch.manual_seed(0)
    wrap, reentrant, mode = WAYS[way]
    with World.of(timeout_s=300) as of_group:  # one rank may compile while the other waits in an exchange
        stack = Stack(of_group, reentrant, RECOMPUTED.get(way, "nothing"))
        model = wrap(stack)
        eager = outcomes(model, stack, world.rank)
        found = outcomes(torch.compile(model, mode=mode), stack, world.rank), eager
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_equal_eager_ones(
    pool: RankPool, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.ranks.DEADLINE_S", 600.0)  # a compilation takes up to a minute on loaded cores
    for compiled, eager in pool.run(2, compiled_and_eager, str(tmp_path / "store"), way):
        for (y, gradients), (wanted, wanted_gradients) in zip(compiled, eager, strict=True):
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
            assert gradients.keys() == wanted_gradients.keys() and len(gradients) >= 2
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-3, msg=name)
