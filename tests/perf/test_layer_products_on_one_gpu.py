"""The forward pass of layers on one GPU, by product.cu and by torch's products in turns: ratios of medians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import load_job  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import product_launch  # noqa: E402
from raymoe.workload.layer.passes import LayerPasses  # noqa: E402
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.perf,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]
TOKENS, SAMPLES = 4096, 15
MODELS = {"deepseek_v3": (128, 0.80), "gpt_oss_120b": (64, 0.80), "qwen3_235b": (64, 0.92)}
"""Half of a model's experts, with as many rows as on two GPUs; the most that a layer takes, in times of before."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.open(0, 1, device="cuda") as world:
        world.wire([world.descriptor()])
        yield world


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
def test_the_forward_pass_takes_less_time_than_with_products_of_torch(world: World, model: str) -> None:
    experts, most = MODELS[model]
    settings = ["world.ranks=1", f"shape.experts={experts}", f"matrix.shape.tokens=[{TOKENS}]"]
    (case,) = load_job(f"layer_{model}", settings).cases()
    new_stream: Any = torch.cuda.Stream  # has no annotations
    stream = new_stream(world.device)
    with torch.cuda.stream(stream):
        layer = LayerPasses(case.job, world).layer
        x = torch.randn(TOKENS, case.job.shape.hidden, device=world.device).bfloat16()
    stream.synchronize()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = layer(x)
            return y

    def before() -> torch.Tensor:
        with mock.patch.object(product_launch, "takes", lambda *_: False):
            return forward()

    with closing(TorchGraphClock(world, stream, stream.synchronize, captured=True)) as clock:
        us, theirs = in_turns(clock, forward, before)
        with torch.cuda.stream(stream):
            new, old = forward().float(), before().float()
            assert float((new - old).abs().max()) <= 2**-5 * float(old.abs().max())
    print(f"{model}: {us:.0f} us, {theirs:.0f} before, {us / theirs:.3f}")
    assert us <= most * theirs


def in_turns(clock: TorchGraphClock, *works: Callable[[], object]) -> list[float]:
    """The median of each, cold."""
    timed = []
    with torch.cuda.stream(clock.stream):
        for work in works:
            work()  # loads and allocates before the capture
            clock.stream.synchronize()
            timed.append(clock.timed(work))
        samples = [[clock.us_cold(each) for each in timed] for _ in range(SAMPLES)]
    return [median(times) for times in zip(*samples, strict=True)]
