"""Train with float32 weights under FSDP2's mixed precision, DDP and autocast on GPUs, beside an unsharded model."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.moe.test_float32_weights import WAYS, error, trained  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each of two ranks, and there are {GPUS}"),
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_a_model_that_is_not_sharded(ranks: GpuRanks, tmp_path: Path, way: str) -> None:
    bound = 0.03 if "mixed" in way or "autocast" in way else 0.015  # there the linear layers are bfloat16 too
    for losses, (gradients, wanted_gradients), wanted in ranks.run(2, trained, str(tmp_path / "store"), way, 5, 256):
        assert gradients.keys() == wanted_gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32, name
            assert error(gradient, wanted_gradients[name]) < bound, name
        assert losses == pytest.approx(wanted, rel=bound)
