"""Steps of a layer on one GPU that keep rows by token, in turns with steps that keep the dispatched rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import load_job  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import product_launch  # noqa: E402
from raymoe.workload.layer.passes import LayerPasses  # noqa: E402
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.perf.test_layer_products_on_one_gpu import in_turns  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.perf,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]
TOKENS, MIB = 4096, 2**20
MODELS = {"deepseek_v3": 128, "gpt_oss_120b": 64, "qwen3_235b": 64}
"""Half of a model's experts, with as many rows as on two GPUs."""
MOST = 1.02
"""The most that a step takes, in times of one that keeps the dispatched rows."""
FEW_TOKENS, MOST_EAGER = (1, 16, 128), 1.1
"""The same of an eager step of few tokens, in which the two copies are two launches more."""
EAGER_STEPS, SAMPLES = 4, 15


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.open(0, 1, device="cuda") as world:
        world.wire([world.descriptor()])
        yield world


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recompute", ["nothing", "activation"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_takes_little_more_time_and_keeps_fewer_bytes(world: World, model: str, recompute: str) -> None:
    new_stream: Any = torch.cuda.Stream  # has no annotations
    stream = new_stream(world.device)
    with torch.cuda.stream(stream):
        step, kept = step_of(world, model, TOKENS, recompute)
    stream.synchronize()
    with closing(TorchGraphClock(world, stream, stream.synchronize, captured=True)) as clock:
        us, before = in_turns(clock, lambda: step(False), lambda: step(True))
    found, whole = (kept[keeps] / MIB for keeps in (False, True))
    print(f"{model}, {recompute}: {us:.0f} us, {found:.0f} MiB; with all rows {before:.0f} us, {whole:.0f} MiB")
    assert us <= MOST * before and found < whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens", FEW_TOKENS)
def test_an_eager_step_of_few_tokens_takes_little_more_time(world: World, tokens: int) -> None:
    step, _ = step_of(world, "qwen3_235b", tokens, "nothing")
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for sample in range(SAMPLES + 1):
        for keeps_rows, found in times.items():
            us = eager_us(lambda keeps_rows=keeps_rows: step(keeps_rows))
            if sample:
                found.append(us)
    (host, us), (host_before, before) = (map(median, zip(*times[keeps], strict=True)) for keeps in (False, True))
    print(
        f"qwen3_235b, eager, {tokens} tokens: {us:.0f} us, {host:.0f} of the host; with all rows {before:.0f} us, "
        f"{host_before:.0f} of the host"
    )
    assert us <= MOST_EAGER * before


def eager_us(work: Callable[[], None]) -> tuple[float, float]:
    """Return microseconds of one call: until the host has enqueued it, and until the GPU is done."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(EAGER_STEPS):
        work()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (enqueued - begun) / EAGER_STEPS * 1e6, (time.perf_counter() - begun) / EAGER_STEPS * 1e6


def step_of(world: World, model: str, tokens: int, recompute: str) -> tuple[Callable[[bool], None], dict[bool, int]]:
    """Return a step of a layer with gradients, by `keeps_rows`, and the bytes that it then keeps for them."""
    settings = ["world.ranks=1", f"shape.experts={MODELS[model]}", f"matrix.shape.tokens=[{tokens}]"]
    (case,) = load_job(f"layer_{model}", [*settings, "layer.backward=true", f"layer.recompute={recompute}"]).cases()
    passes = LayerPasses(case.job, world)
    layer, parameters = passes.layer, passes.parameters
    x, dy = torch.randn(2, tokens, case.job.shape.hidden, device=world.device).bfloat16().unbind()
    x.requires_grad_()
    kept: dict[bool, int] = {}

    def step(keeps_rows: bool) -> None:
        layer.keeps_rows = keeps_rows
        allocated = torch.cuda.memory_allocated()
        y = layer(x)
        kept[keeps_rows] = torch.cuda.memory_allocated() - allocated
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(y, [x, *parameters], dy)

    return step, kept
