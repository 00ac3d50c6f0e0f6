"""The gradient of every parameter of each family of models, on CPU ranks: the judge of tests/gpu, judged here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymoe.moe.experts import GPT_OSS
from tests.unit.moe import family_gradients
from tests.unit.moe.family_gradients import CASES, FAMILIES, Case, Outcome, Reference, cases, run_family
from tests.unit.worlds import close, each, wired

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
CPU_RATIO = 2.0
"""On CPUs the activation is rounded after each of its steps, and few tokens leave noise in gradients of routers."""


def outcomes_of(family: str, ranks: int, case: Case) -> list[Outcome]:
    """Of ranks that are threads."""
    worlds = wired(ranks)
    outcomes = each(worlds, lambda world: run_family(world, family, case))
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    close(worlds)
    return outcomes


@pytest.mark.one_in(10)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_near_float64_and_repeats(family: str, case: str, dtype: torch.dtype, ranks: int) -> None:
    for outcome in outcomes_of(family, ranks, cases(60, dtype)[case]):
        assert {"x", "experts.gate_up_proj", "experts.down_proj"} < set(outcome.errors)
        assert max(outcome.errors.values()) <= BOUNDS[dtype], outcome.errors
        assert outcome.differing == []
        assert dtype == torch.float32 or outcome.beyond(CPU_RATIO) == {}


def test_a_wrong_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reference.expert

    def wrong(self, experts, leaves, expert, rows):
        experts.activation = replace(GPT_OSS, alpha=1.6)
        return real(self, experts, leaves, expert, rows)

    monkeypatch.setattr(family_gradients.Reference, "expert", wrong)
    (outcome,) = outcomes_of("GptOssMLP", 1, cases(60, torch.float32)["chosen"])
    assert outcome.errors["experts.gate_up_proj_bias"] > 1e-3


def test_gradients_that_are_a_hundredth_too_large_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = family_gradients.step

    def wrong(*arguments):
        gradients, ids = real(*arguments)
        return {name: 1.01 * gradient for name, gradient in gradients.items()}, ids

    monkeypatch.setattr(family_gradients, "step", wrong)
    (outcome,) = outcomes_of("MixtralSparseMoeBlock", 1, cases(60, torch.bfloat16)["chosen"])
    assert max(outcome.errors.values()) <= BOUNDS[torch.bfloat16]
    assert set(outcome.beyond(CPU_RATIO)) == set(outcome.errors)
