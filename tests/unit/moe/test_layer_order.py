"""Ranks in different layers of one spec, or in backward passes of different dispatches: all refuse, and go on."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer
from tests.unit.exchange.domains.test_hierarchical import Groups, groups  # noqa: F401
from tests.unit.exchange.test_exchange import BACKENDS
from tests.unit.ranks import RankPool

SPEC = ExchangeSpec(tokens=16, hidden=32, experts=4, topk=2, dtype="float32", depth=0)


def layers_of(world: World, backend: str) -> tuple[list[MoELayer], torch.Tensor]:
    layers = [MoELayer(world, SPEC, LayerForm(ffn=16), seed=seed, backend=backend) for seed in (0, 1)]
    assert layers[0].exchange is layers[1].exchange and [each.number for each in layers] == [1, 2]
    return layers, torch.randn(5, 32, generator=torch.Generator().manual_seed(world.rank))


def refusal(call) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def drops_another_layer(world: World, backend: str, grad: bool) -> tuple[str, bool]:
    """LayerDrop: each rank leaves out another layer."""
    layers, x = layers_of(world, backend)
    with torch.set_grad_enabled(grad):
        wanted = [layer(x) for layer in layers]
        message = refusal(lambda: layers[world.rank](x))
        return message, all(torch.equal(layer(x), want) for layer, want in zip(layers, wanted, strict=True))


def other_order_of_losses(world: World, backend: str) -> tuple[str, bool]:
    """Experts alone are tuned, so no combine of gradients follows the dispatch of gradients."""
    layers, x = layers_of(world, backend)
    layer = layers[0]
    layer.gate.requires_grad_(False)
    parameters = list(layer.experts.parameters())

    def losses() -> list[torch.Tensor]:
        return [layer(each).square().sum() for each in (x, x + 1)]

    wanted = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses()]
    by_rank = losses()
    message = refusal(lambda: torch.autograd.grad(by_rank[world.rank], parameters))
    found = [torch.autograd.grad(loss, parameters) for loss in losses()]
    pairs = [(g, h) for a, b in zip(found, wanted, strict=True) for g, h in zip(a, b, strict=True)]
    return message, all(torch.equal(g, h) for g, h in pairs)


def skips_a_backward_pass(world: World, backend: str) -> tuple[str, bool]:
    layers, x = layers_of(world, backend)
    layer = layers[0]
    wanted = layer(x)
    y = layer(x)
    odd = (lambda: y.square().sum().backward()) if world.rank == 0 else (lambda: layer(x))
    return refusal(odd), torch.equal(layer(x), wanted)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_in_different_layers_are_refused(pool: RankPool, backend: str, grad: bool) -> None:
    for rank, (message, right) in enumerate(pool.run(2, drops_another_layer, backend, grad)):
        here, there = rank + 1, 2 - rank
        assert f"rank {rank} is in dispatch of call site {here} while rank {1 - rank}" in message
        assert f"is in dispatch of call site {there}; call the same operations in one order" in message
        assert right


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_passes_in_another_order_are_refused(pool: RankPool, backend: str) -> None:
    for rank, (message, right) in enumerate(pool.run(2, other_order_of_losses, backend)):
        here, there = 3 + rank, 4 - rank
        assert f"rank {rank} is in the backward pass of dispatch {here + 2} " in message
        assert f"while rank {1 - rank} is in that of dispatch {there + 2}; call the same operations" in message
        assert right


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_backward_pass_is_refused(pool: RankPool, backend: str) -> None:
    (first, right), (second, also_right) = pool.run(2, skips_a_backward_pass, backend)
    assert first.startswith("rank 0 is in dispatch of gradients while rank 1 is in dispatch of the same exchange")
    assert second.startswith("rank 1 is in dispatch while rank 0 is in dispatch of gradients of the same exchange")
    assert right and also_right


def between_domains(rank: int, test: str) -> tuple[str, bool]:
    del rank
    with World.of(domain=1, timeout_s=20) as world:
        if test == "layers":
            return drops_another_layer(world, "auto", True)
        return other_order_of_losses(world, "auto")


@pytest.mark.parametrize("test", ["layers", "losses"])
def test_domains_refuse_too(groups: Groups, test: str) -> None:  # noqa: F811
    for rank, (message, right) in enumerate(groups(2, between_domains, test)):
        assert f"while domain {1 - rank} is in " in message
        assert right
