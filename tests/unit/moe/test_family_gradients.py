"""The gradient of every parameter of each family of models, on CPU ranks: the judge of tests/gpu, judged here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymoe.moe.experts import GPT_OSS
from tests.unit.moe import family_gradients
from tests.unit.moe.family_gradients import FAMILIES, Sizes, run_family
from tests.unit.worlds import close, each, wired

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def errors_of(family: str, ranks: int, sizes: Sizes) -> dict[str, float]:
    """The largest errors over ranks, which are threads."""
    worlds = wired(ranks)
    outcomes = each(worlds, lambda world: run_family(world, family, sizes))
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    close(worlds)
    assert all(not differing for _, differing, _ in outcomes)
    return {name: max(errors[name] for errors, _, _ in outcomes) for name in outcomes[0][0]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_near_float64_and_repeats(family: str, dtype: torch.dtype, ranks: int) -> None:
    errors = errors_of(family, ranks, Sizes(60, dtype))
    assert {"x", "experts.gate_up_proj", "experts.down_proj"} < set(errors)
    assert max(errors.values()) <= BOUNDS[dtype], errors


def test_a_wrong_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = family_gradients.expert_of

    def wrong(experts, leaves, expert, rows):
        experts.activation = replace(GPT_OSS, alpha=1.6)
        return real(experts, leaves, expert, rows)

    monkeypatch.setattr(family_gradients, "expert_of", wrong)
    errors = errors_of("GptOssMLP", 1, Sizes(60, torch.float32))
    assert errors["experts.gate_up_proj_bias"] > 1e-3
