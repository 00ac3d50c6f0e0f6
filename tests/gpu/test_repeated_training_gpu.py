"""Twenty steps of training have the same bits in every run of the same world and seed, on GPU ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.moe import LayerForm, RouterForm  # noqa: E402
from raymoe.moe.activation import GPT_OSS  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.moe.test_repeated_training import trained  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
H, F, E, K = 512, 256, 16, 4
SWIGLU_FORM = LayerForm(F, RouterForm(E, K, "sigmoid", scale=2.5), shared=128, norm=1e-6, residual=True)
FORMS = {
    "bfloat16": SWIGLU_FORM,
    "gpt_oss": LayerForm(F, RouterForm(E, K, "chosen"), GPT_OSS, biases=True, norm=1e-6, residual=True),
    "activation again": replace(SWIGLU_FORM, recompute="activation"),
    "all again": replace(SWIGLU_FORM, recompute="all"),
}


@pytest.mark.parametrize("tokens", [64, 700])
@pytest.mark.parametrize("backend", ["fused", "staged"])
@pytest.mark.parametrize("form", FORMS)
def test_two_runs_of_20_steps_have_the_same_weights(ranks: GpuRanks, form: str, backend: str, tokens: int) -> None:
    spec = ExchangeSpec(tokens=tokens, hidden=H, experts=E, topk=K, depth=0)
    options = {"backend": backend, "lr": 0.001}
    first, again = (ranks.run(2, trained, FORMS[form], spec, options) for _ in range(2))
    assert first == again
    if form == "all again":
        assert first == ranks.run(2, trained, SWIGLU_FORM, spec, options)
