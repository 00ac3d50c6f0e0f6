"""Products of experts beside grouped_mm, a dense product and a copy, by workload products: ratios of medians."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config.job import Job  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import product_launch  # noqa: E402
from raymoe.workload import run_case  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.perf,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]
SHAPE = {"hidden": 7168, "ffn": 2048, "experts": 64}
"""DeepSeek-V3, as on each of four GPUs."""


@dataclass(frozen=True)
class Bar:
    """The time of `other` divided by ours is at least `least`, in these operations."""

    kind: str
    rows: int
    other: str
    least: float
    ops: tuple[str, ...] = ("up", "down")


BARS = (  # a little below what docs/evidence/experiments/products.md shows
    Bar("uniform", 256, "grouped_mm", 1.2),
    Bar("uniform", 512, "grouped_mm", 1.15),
    Bar("uniform", 512, "dense", 0.88),
    Bar("uniform", 1024, "grouped_mm", 1.08),
    Bar("uniform", 1024, "dense", 0.90),
    Bar("uniform", 32, "copy", 0.92),
    Bar("uniform", 32, "grouped_mm", 1.0),
    Bar("uniform", 64, "copy", 0.88),
    Bar("uniform", 64, "grouped_mm", 1.0),
    Bar("uniform", 128, "copy", 0.83),
    Bar("uniform", 128, "grouped_mm", 1.03),
    Bar("equal", 512, "grouped_mm", 0.98),
    Bar("equal", 1024, "grouped_mm", 0.98),
    Bar("hot", 1024, "grouped_mm", 1 / 1.1),
    Bar("uniform", 256, "grouped_mm", 1.03, ("dw",)),
    Bar("uniform", 1024, "grouped_mm", 1.02, ("dw",)),
    Bar("uniform", 256, "grouped_mm", 1.18, ("dx",)),
    Bar("uniform", 1024, "grouped_mm", 1.01, ("dx",)),
)
SWIGLU = 1.02
"""The most that up with SwiGLU takes, in times of up alone."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.open(0, 1, device="cuda") as world:
        world.wire([world.descriptor()])
        yield world


_measured: dict[tuple[str, int], dict[tuple[str, str], float]] = {}


def times(world: World, kind: str, rows: int) -> dict[tuple[str, str], float]:
    """The median of each operation and system, measured once."""
    if (kind, rows) not in _measured:
        given: dict[str, Any] = {
            "name": "bars",
            "workload": "products",
            "world": {"ranks": 1, "device": "cuda"},
            "shape": SHAPE,
            "products": {"kind": kind, "rows": rows},
            "steps": {"warmup": 3, "count": 15},
        }
        (case,) = Job(**given).cases()
        lines = run_case(case, world, lambda _: None)
        _measured[kind, rows] = {
            (str(line["op"]), str(line["backend"])): float(str(line["us_p50"])) for line in lines if line["samples"]
        }
        print(kind, rows, {f"{op} {system}": round(us, 1) for (op, system), us in _measured[kind, rows].items()})
    return _measured[kind, rows]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: f"{bar.kind}-{bar.rows}-{bar.other}")
def test_products_reach_their_bars(world: World, bar: Bar) -> None:
    us = times(world, bar.kind, bar.rows)
    ratios = {op: us[op, bar.other] / us[op, "raymoe"] for op in bar.ops}
    print(bar, {op: round(ratio, 3) for op, ratio in ratios.items()})
    assert min(ratios.values()) >= bar.least


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [8, 512])
def test_swiglu_costs_next_to_nothing(world: World, rows: int) -> None:
    us = times(world, "equal", rows)
    assert us["up_swiglu", "raymoe"] <= SWIGLU * us["up", "raymoe"]


@pytest.mark.timeout(300)
def test_sums_of_gradients_in_float32_need_no_second_pass(world: World) -> None:
    us = times(world, "uniform", 1024)
    print({system: round(us["dw", system], 1) for system in ("raymoe", "added", "grouped_mm", "grouped_mm_added")})
    assert us["dw", "added"] <= 0.75 * us["dw", "grouped_mm_added"]
