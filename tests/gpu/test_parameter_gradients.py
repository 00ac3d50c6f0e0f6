"""The gradient of every parameter of each family of models in bfloat16, against float64, twice: equal bit for bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.moe.family_gradients import FAMILIES, Sizes, run_family  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
BOUND = 1.5e-2
MANY, FEW = 2400, 40


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_near_float64_and_repeats(ranks: GpuRanks, family: str, tokens: int, size: int) -> None:
    for errors, differing, rows in ranks.run(size, run_family, family, Sizes(tokens, torch.bfloat16)):
        print(f"{family}, {tokens} tokens, {size} ranks:", {name: f"{error:.4f}" for name, error in errors.items()})
        assert differing == []
        assert max(errors.values()) <= BOUND, errors
        assert tokens == FEW or rows > 256, "more rows than a sum in bfloat16 can count"
