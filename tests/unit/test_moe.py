"""Router, experts and layer compared with plain float64 arithmetic."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.layer import Experts, MoELayer, Router, arithmetic_dtype
from raymoe.moe.weights import ExpertShape, expert_weights
from raymoe.workload.oracle import BOUNDS, LAYER_SLACK, SwigluExperts, want
from tests.unit.ranks import RankPool

SHAPE = ExpertShape(hidden=32, ffn=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_takes_the_best_experts_and_renormalises(dtype: torch.dtype) -> None:
    router = Router(hidden=32, experts=8, topk=3, source=torch.Generator().manual_seed(0))
    x = torch.randn(40, 32).to(dtype)
    ids, weights = router(x)
    scores = (x.double() @ router.weight.double().T).softmax(dim=-1)
    best = scores.sort(dim=-1, descending=True)
    assert torch.equal(ids, best.indices[:, :3]) and ids.dtype == torch.int64
    want = best.values[:, :3] / best.values[:, :3].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weights, want.float(), rtol=1e-5, atol=1e-6)


def test_router_takes_no_tokens_and_refuses_topk_above_experts() -> None:
    ids, weights = Router(hidden=8, experts=4, topk=4)(torch.zeros(0, 8))
    assert ids.shape == weights.shape == (0, 4)
    with pytest.raises(ConfigError, match=r"over 4 experts.*best 5"):
        Router(hidden=8, experts=4, topk=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_are_swiglu_over_their_own_rows(dtype: torch.dtype) -> None:
    shape = ExpertShape(32, 16, dtype)
    experts = Experts([4, 5, 6], shape, seed=2)
    x = torch.randn(64, 32).to(dtype)
    x[40:] = torch.nan  # rows that belong to no expert are never read
    offsets, counts = torch.tensor([0, 16, 32, 48], dtype=torch.int32), torch.tensor([16, 0, 8], dtype=torch.int32)
    rows = experts(x, offsets, counts)
    assert rows.shape == x.shape and rows.dtype == dtype
    for expert, start, count in ((4, 0, 16), (6, 32, 8)):
        own, weights = x[start : start + count].double(), expert_weights(shape, 2, expert)
        gate, up = own @ weights.gate_up[:16].double().T, own @ weights.gate_up[16:].double().T
        want = (torch.nn.functional.silu(gate) * up) @ weights.down.double().T
        torch.testing.assert_close(rows[start : start + count].double(), want, rtol=0.02, atol=0.02)


def test_weights_follow_from_seed_and_expert_alone() -> None:
    one, again = expert_weights(SHAPE, 1, 5), expert_weights(SHAPE, 1, 5)
    assert torch.equal(one.gate_up, again.gate_up) and torch.equal(one.down, again.down)
    assert not torch.equal(one.down, expert_weights(SHAPE, 1, 6).down)
    assert not torch.equal(one.down, expert_weights(SHAPE, 2, 5).down)
    assert torch.equal(Experts([3, 5], SHAPE, seed=1).down[1].to(torch.bfloat16), one.down)


def test_float16_is_multiplied_as_float32_on_a_cpu() -> None:
    assert arithmetic_dtype(torch.float16) == arithmetic_dtype(torch.float32) == torch.float32


def layer_errors(world: World, layout: str) -> list[float]:
    """Return the layer's errors for a full, a short and an empty batch; check that gradients are refused."""
    spec = ExchangeSpec(tokens=16, hidden=32, experts=8, topk=2, layout=layout)
    errors = []
    with MoELayer(world, spec, ffn=16, seed=4) as layer:
        for tokens in (16, 5, 0):
            x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(world.rank)).to(torch.bfloat16)
            ids, weights = layer.router(x)
            wanted = want(x, ids, weights, SwigluExperts(layer.experts.shape, seed=4), by_row=True)
            errors.append(wanted.error_of(layer(x)))
        with pytest.raises(ConfigError, match="no backward"):
            layer(torch.ones(1, 32, dtype=torch.bfloat16, requires_grad=True))
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    return errors


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_layer_equals_router_then_experts_on_any_number_of_ranks(pool: RankPool, ranks: int, layout: str) -> None:
    for errors in pool.run(ranks, layer_errors, layout):
        assert max(errors) <= LAYER_SLACK * BOUNDS[torch.bfloat16]
