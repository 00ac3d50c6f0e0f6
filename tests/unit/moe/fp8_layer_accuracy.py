"""Errors of a whole layer of 8-bit floats on two CPU ranks: `python -m tests.unit.moe.fp8_layer_accuracy`.

The shape is that of DeepSeek-V3, smaller: norm, sigmoid router with groups, 8 experts for a token, shared expert. Torch
quantises the same rows for a reference in float64, which has the errors of the format alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, RouterForm, quantise_experts
from tests.unit.moe.fp8_accuracy import OUTLIERS, TIMES, Norms
from tests.unit.moe.scaled_reference import EPS, wanted
from tests.unit.ranks import RankPool

RANKS = 2
SPEC = ExchangeSpec(tokens=64, hidden=512, experts=16, topk=8, dtype="bfloat16", depth=0)
ROUTER = RouterForm(16, 8, score="sigmoid", groups=4, topk_groups=2, scale=2.5)
FORM = LayerForm(256, ROUTER, shared=256, norm=EPS, experts_dtype="float8_e4m3")
CASES = [(outliers, residual) for outliers in (False, True) for residual in (False, True)]
HEAD = ("rows; y", "layer, same weights", "torch", "layer ÷ torch", "layer, wide weights", "torch")


def rows(rank: int, outliers: bool) -> Tensor:
    x = torch.randn(SPEC.tokens, SPEC.hidden, generator=torch.Generator().manual_seed(rank))
    if outliers:
        x[:, OUTLIERS] *= TIMES
    return x.bfloat16()


@torch.no_grad()
def outputs(world: World, outliers: bool, residual: bool) -> list[Tensor]:
    """Return y of a rank: the layer's, and in float64 of 8-bit rows, of the same weights, and of wide weights."""
    form, x = replace(FORM, residual=residual), rows(world.rank, outliers)
    layer = MoELayer(world, SPEC, form, seed=0)
    with World.open(0, 1, name="alone") as alone:
        alone.wire([alone.descriptor()])
        wide = MoELayer(alone, SPEC, replace(form, experts_dtype=None), seed=0)  # the experts of both ranks
        same = dict(quantise_experts(wide.experts).named_parameters())
        without = 0.0 if residual else x.double()
        references = [wanted(layer, same, x, quantises) - without for quantises in (True, False)]
        references.append(wanted(wide, dict(wide.experts.named_parameters()), x, quantises=False) - without)
    return [layer(x).double(), *references]


def numbers(pool: RankPool, outliers: bool, residual: bool) -> list[Norms]:
    """Return the errors of the layer and of torch in relation to the same weights, and to wide ones."""
    y, by_torch, same, wide = map(torch.cat, zip(*pool.run(RANKS, outputs, outliers, residual), strict=True))
    return [Norms.of(each - want, want) for want in (same, wide) for each in (y, by_torch)]


def table(pool: RankPool) -> list[str]:
    """Return the lines of the table in docs/products.md: percentages, of all rows and of the worst one."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for outliers, residual in CASES:
        name = f"{len(OUTLIERS)} channels × {TIMES}" if outliers else "random"
        errors = numbers(pool, outliers, residual)
        cells = [f"{100 * rms:.2f} / {100 * worst:.2f}" for rms, worst in errors]
        cells.insert(2, f"{errors[0].rms / errors[1].rms:.3f}")
        lines.append((f"{name}; {'with' if residual else 'without'} x", *cells))
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    with RankPool(RANKS) as pool:
        print("\n".join(table(pool)))
