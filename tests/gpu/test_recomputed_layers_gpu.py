"""Layers whose backward pass computes a part of the forward pass again, on GPU ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import LayerForm, MoELayer, RouterForm  # noqa: E402
from raymoe.moe.activation import GPT_OSS  # noqa: E402
from raymoe.moe.experts import local  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.moe.bits import same_bits  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]
H, F, E, K, T = 512, 256, 16, 4, 700
FORMS = {
    "swiglu": LayerForm(F, RouterForm(E, K, "sigmoid"), shared=128, norm=1e-6, residual=True),
    "gpt_oss": LayerForm(F, RouterForm(E, K, "chosen"), GPT_OSS, biases=True, norm=1e-6),
    "float32 weights": LayerForm(F, RouterForm(E, K), weights="float32"),
}


def differences(world: World, name: str, kind: str) -> dict[str, float]:
    """Return the relative error of each gradient that has other bits than one of a layer that keeps all."""
    spec = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, depth=0)
    x = torch.randn(T - world.rank, H, generator=torch.Generator().manual_seed(world.rank)).to(world.device).bfloat16()
    results = []
    for recompute in ("nothing", kind):
        layer = MoELayer(world, spec, replace(FORMS[name], recompute=recompute), seed=1)
        source = x.clone().requires_grad_()
        layer(source).float().square().sum().backward()
        named = {each: local(parameter.grad) for each, parameter in layer.named_parameters()}
        results.append({"x": source.grad, **named})
    wanted, found = results
    return {
        each: float((found[each].float() - want.float()).norm() / want.float().norm())
        for each, want in wanted.items()
        if not same_bits(found[each], want)
    }


@pytest.mark.parametrize("kind", ["activation", "all"])
@pytest.mark.parametrize("name", FORMS)
def test_only_the_gradient_of_down_proj_is_rounded_elsewhere(ranks: GpuRanks, name: str, kind: str) -> None:
    for other in ranks.run(2, differences, name, kind):
        assert set(other) <= ({"experts.down_proj"} if kind == "activation" else set())
        assert all(error < 0.01 for error in other.values()), other
