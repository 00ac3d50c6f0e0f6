"""Both products of experts with few rows, in a CUDA graph: raymoe's, and grouped_mm with SwiGLU between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe import grouped_linear, grouped_swiglu, swiglu  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]
SHAPES = {"deepseek_v3": (128, 7168, 2048), "qwen3": (64, 4096, 1536), "mixtral": (4, 6144, 16384)}
"""Experts of a rank, H and F."""
ALIGNMENT, SAMPLES = 16, 5
COPY_TBPS = 4.1


@pytest.fixture(scope="module")
def clock() -> Any:
    from raymoe.memory.world import World
    from raymoe.workload.pointwise.gpu_clock import TorchGraphClock

    with World.open(0, 1, device="cuda") as world:
        world.wire([world.descriptor()])
        new_stream: Any = torch.cuda.Stream  # has no annotations
        stream = new_stream(world.device)
        with closing(TorchGraphClock(world, stream, stream.synchronize, captured=True)) as made:
            yield made


def us_of(clock: Any, work: Callable[[], object]) -> float:
    with torch.cuda.stream(clock.stream), torch.no_grad():
        work()  # loads and allocates before the capture
        clock.stream.synchronize()
        timed = clock.timed(work)
        return median([clock.us_cold(timed) for _ in range(SAMPLES)])


def counts_of(experts: int, rows: int | None) -> torch.Tensor:
    """Rows of each expert: so many on average, of tokens with two experts each; None: one row for eight experts."""
    source = torch.Generator("cuda").manual_seed(0)
    if rows is None:
        counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
        counts[torch.randperm(experts, generator=source, device="cuda")[:8]] = 1
        return counts
    ids = torch.rand(rows * experts // 2, experts, generator=source, device="cuda").topk(2).indices
    return torch.bincount(ids.flatten(), minlength=experts).int()


@pytest.mark.parametrize("rows", [None, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_take_less_time_than_grouped_products(clock: Any, shape: str, rows: int | None) -> None:
    experts, H, F = SHAPES[shape]
    if rows is None and experts < 8:
        rows = 1
    gate_up = torch.randn(experts, 2 * F, H, device="cuda").bfloat16() * H**-0.5
    down = torch.randn(experts, H, F, device="cuda").bfloat16() * F**-0.5
    counts = counts_of(experts, rows)
    ends = ((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0).int()
    offsets = torch.cat((ends.new_zeros(1), ends))
    x = torch.randn(int(ends[-1]), H, device="cuda").bfloat16()
    product: Any = torch.nn.functional.grouped_mm

    def grouped() -> torch.Tensor:
        h = swiglu(product(x, gate_up.transpose(1, 2), offs=offsets[1:]), offsets)
        return product(h, down.transpose(1, 2), offs=offsets[1:])

    def by_kernels() -> torch.Tensor:
        return grouped_linear(grouped_swiglu(x, gate_up, offsets, counts), down, offsets, counts)

    starts = zip(offsets[:-1].tolist(), counts.tolist(), strict=True)
    there = torch.cat([torch.arange(n, device="cuda") + start for start, n in starts])
    found, wanted = by_kernels()[there].float(), grouped()[there].float()
    assert float((found - wanted).abs().max()) <= 2**-6 * float(wanted.abs().max())
    took, theirs = us_of(clock, by_kernels), us_of(clock, grouped)
    least = int((counts > 0).sum()) * 3 * H * F * 2 / COPY_TBPS / 1e6
    print(
        f"{shape}, rows {rows or 'one of 8 experts'}: {took:.1f} us, grouped_mm {theirs:.1f}, weights alone {least:.1f}"
    )
    assert took < theirs
