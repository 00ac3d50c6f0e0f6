"""Kernels that stream rows through one GPU, as shares of a copy with as many bytes, on a cold L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from raymoe.rows.elementwise_kernels import Pointwise, Swiglu  # noqa: E402
from raymoe.rows.norm_kernels import (  # noqa: E402
    LayerNorm,
    RmsNorm,
    RmsNormBackward,
)
from raymoe.rows.pipe_shape import Limits  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]

LAUNCH_US = 6
"""Of a kernel that does nothing, at most: its launch, and the first rows on their way."""
HIDDEN, FFN, SETS, REPLAYS = 7168, 2048, 4, 20
"""Each replay runs SETS calls on tensors of their own: together more than the L2 cache holds."""
Call = Callable[[], None]


def rows(count: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)


def scaled(count: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(count, hidden, device="cuda", dtype=torch.float8_e4m3fn),
        torch.empty(count, hidden // 128, device="cuda"),
    )


def us_of(make: Callable[[], Call]) -> float:
    """Microseconds of a call: the median over replays of a graph."""
    calls = [make() for _ in range(SETS)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / SETS)
    return statistics.median(times[3:])


def copied(nbytes: int) -> float:
    """Microseconds of the faster copy that reads and writes so many bytes in all."""
    count = nbytes // 2 // (HIDDEN * 2)

    def by_torch() -> Call:
        source, into = rows(count), rows(count)

        def call() -> None:
            into.copy_(source)

        return call

    def by_pipeline() -> Call:
        asked = Pointwise("v0", [rows(count)], rows(count))
        return lambda: asked.launch()

    return min(us_of(by_torch), us_of(by_pipeline))


def forward(kind: str, count: int, limits: Limits | None = None) -> tuple[Callable[[], Call], int]:
    """A maker of calls, and the bytes that a call must read and write."""
    weight, wide = rows(1)[0], count * HIDDEN * 2

    def make() -> Call:
        x = rows(count)
        if kind == "add_rms_norm":
            added = RmsNorm(x, weight, rows(count), residual=rows(count), residual_out=rows(count))
            return lambda: added.launch(limits)
        if kind == "layer_norm":
            asked = LayerNorm(x, weight, weight, rows(count))
            return lambda: asked.launch(limits)
        if kind == "rms_norm_fp8":
            values, scales = scaled(count, HIDDEN)
            quantised = RmsNorm(x, weight, values, scales=scales)
            return lambda: quantised.launch(limits)
        if kind == "rms_norm_backward":
            gradient = RmsNormBackward(rows(count), x, weight, rows(count), torch.empty_like(weight))
            return lambda: gradient.launch(limits)
        plain = RmsNorm(x, weight, rows(count))
        return lambda: plain.launch(limits)

    halves = {"rms_norm": 4, "add_rms_norm": 8, "layer_norm": 4, "rms_norm_fp8": 3, "rms_norm_backward": 6}
    return make, wide * halves[kind] // 2


BARS = {"rms_norm": 0.97, "add_rms_norm": 0.97, "layer_norm": 0.97, "rms_norm_fp8": 0.90, "rms_norm_backward": 0.90}


@pytest.mark.parametrize("count", [4096, 16384])
@pytest.mark.parametrize("kind", BARS)
def test_rows_stream_almost_as_fast_as_a_copy(kind: str, count: int) -> None:
    make, nbytes = forward(kind, count)
    took, copy = us_of(make), copied(nbytes)
    print(f"{kind} {count}: {took:.1f} us, copy {copy:.1f} us, {nbytes / took / 1e6:.2f} TB/s")
    assert copy / took >= BARS[kind]


@pytest.mark.parametrize("kind", BARS)
def test_on_48_sms_the_pipeline_is_faster_than_loads_in_turn(kind: str) -> None:
    took, in_turn = (us_of(forward(kind, 4096, Limits(48, loading=loading))[0]) for loading in (None, "IN_TURN"))
    print(f"{kind} on 48 SMs: {took:.1f} us, in turn {in_turn:.1f} us")
    assert in_turn / took >= 1.10


def test_swiglu_takes_the_time_of_the_rows_that_are_there() -> None:
    count = 16384

    def make(end: int) -> Callable[[], Call]:
        offsets = torch.tensor([0, end], dtype=torch.int32, device="cuda")

        def made() -> Call:
            values, scales = scaled(count, FFN)
            asked = Swiglu(rows(count, 2 * FFN), values, offsets, scales)
            return lambda: asked.launch()

        return made

    whole, quarter = us_of(make(count)), us_of(make(count // 4))
    copy = copied(count * FFN * 5)
    print(f"swiglu to fp8: {whole:.1f} us, a quarter {quarter:.1f} us, copy {copy:.1f} us")
    assert copy / whole >= 0.90
    assert quarter <= 0.25 * whole + LAUNCH_US
