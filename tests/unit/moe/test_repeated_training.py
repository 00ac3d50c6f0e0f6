"""Twenty steps of training have the same bits in every run of the same world and seed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, RouterForm, balance_loss
from raymoe.moe.activation import GPT_OSS
from raymoe.moe.experts import local
from tests.unit.ranks import RankPool

H, F, E, K, T, STEPS = 32, 16, 8, 2, 16, 20
ROUTER = RouterForm(E, K, score="sigmoid", groups=4, topk_groups=2, scale=2.5)
SWIGLU_FORM = LayerForm(F, ROUTER, shared=8, norm=1e-6, residual=True)
FORMS = {
    "bfloat16": SWIGLU_FORM,
    "float32 weights": replace(SWIGLU_FORM, weights="float32"),
    "gpt_oss": LayerForm(F, RouterForm(E, K, "chosen"), GPT_OSS, biases=True, norm=1e-6, residual=True),
    "activation again": replace(SWIGLU_FORM, recompute="activation"),
    "all again": replace(SWIGLU_FORM, recompute="all"),
}
OTHERS = [name for name in FORMS if name != "bfloat16"]


def sizes(**changed: Any) -> ExchangeSpec:
    return replace(ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, depth=0), **changed)


def trained(world: World, form: LayerForm, spec: ExchangeSpec, options: dict[str, Any]) -> list[str]:
    """Train two layers for 20 steps; return digests of the losses and the weights. `options`: backend, seed, lr."""
    backend, seed = options.get("backend", "auto"), options.get("seed", 0)
    layers = nn.Sequential(*(MoELayer(world, spec, form, backend=backend, seed=seed + index) for index in range(2)))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=options.get("lr", 0.01))
    losses = []
    for step in range(STEPS):
        source = torch.Generator().manual_seed(1000 * step + world.rank)
        tokens = spec.tokens - 3 * (step % 4) - world.rank
        x = torch.randn(tokens, spec.hidden, generator=source).to(world.device, getattr(torch, spec.dtype))
        y, routed = layers[1](layers[0](x), return_routing=True)
        wanted = torch.roll(x, 1, dims=-1)
        loss = (y - wanted).float().square().mean()
        (loss + 0.01 * balance_loss(routed.logits, routed.topk_idx, layers[1].gate.form)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses)
    assert float(curve[-4:].mean()) < float(curve[:4].mean()), "it learns something"
    return [digest(curve), *(digest(local(parameter.detach())) for parameter in layers.parameters())]


def digest(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("form", ["bfloat16", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_two_runs_of_20_steps_have_the_same_weights(pool: RankPool, form: str) -> None:
    first, again = (pool.run(2, trained, FORMS[form], sizes(), {}) for _ in range(2))
    assert first == again
    if FORMS[form].recompute != "nothing":
        assert first == pool.run(2, trained, SWIGLU_FORM, sizes(), {})


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["collective", "allgather"])
def test_other_backends_repeat_too(pool: RankPool, backend: str) -> None:
    first, again = (pool.run(2, trained, SWIGLU_FORM, sizes(), {"backend": backend}) for _ in range(2))
    assert first == again


def test_another_seed_gives_other_weights(pool: RankPool) -> None:
    one, other = (pool.run(1, trained, SWIGLU_FORM, sizes(), {"seed": seed})[0] for seed in (0, 5))
    assert not set(one) & set(other)
