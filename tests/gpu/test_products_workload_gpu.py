"""Workload products on a GPU: every system has a line, captured and cold, and ours are verified."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe import product_launch  # noqa: E402
from raymoe.workload.products.systems import CLASSES, OWN, SYSTEMS  # noqa: E402
from raymoe.workload.products.systems_fp8 import FP8_SYSTEMS  # noqa: E402
from raymoe.workload.products.tasks import FORWARD, OPS  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]


DW, BOTH = ("added", "grouped_mm_added"), ("raymoe", "grouped_mm", "copy")
"""The systems of gradients of weights alone, and those of all operations."""


def job(**products: Any) -> dict[str, Any]:
    return {
        "name": "test",
        "workload": "products",
        "world": {"ranks": 1, "device": "cuda"},
        "shape": {"hidden": 512, "ffn": 256, "experts": 8},
        "products": products,
        "steps": {"warmup": 1, "count": 2},
    }


@pytest.mark.parametrize("kind", ["equal", "uniform", "zipf", "hot"])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_every_system_has_a_line_and_ours_are_verified(ranks: GpuRanks, rows: int, kind: str) -> None:
    (lines,) = ranks.run(1, run, job(rows=rows, kind=kind))
    assert [(line["op"], line["backend"]) for line in lines] == [(op, name) for op in OPS for name in SYSTEMS]
    for line in lines:
        if line["backend"] in FP8_SYSTEMS and line["op"] not in FORWARD:
            assert "no gradients" in line["skipped"], line
        elif (line["op"] == "dw") != (line["backend"] in DW) and line["backend"] not in BOTH:
            assert "gradients of weights" in line["skipped"], line
        elif line["backend"] == "raymoe_fp8_quantised" and line["op"] != "up_swiglu":
            assert "only results of SwiGLU" in line["skipped"], line
        elif line["backend"] in OWN:
            assert (line["verified"], line["graph"], line["l2"]) == (True, True, "cold"), line
            assert line["us_p50"] > 0 and line["bytes_weights"] > 0
        elif line["backend"] in ("grouped_mm", "grouped_mm_added", "dense"):
            assert line["verified"], line
        else:
            assert line.get("skipped") or line["verified"], line


def test_float16_and_eager_calls_are_timed_too(ranks: GpuRanks) -> None:
    given = job(rows=70, dtype="float16")
    given["steps"]["graph"] = False
    (lines,) = ranks.run(1, run, given)
    by_system = {(line["op"], line["backend"]): line for line in lines}
    for op in OPS:
        for name in ("raymoe", "added", "copy") if op == "dw" else ("raymoe", *CLASSES, "dense", "copy"):
            line = by_system[op, name]
            assert (line["verified"], line["graph"], line["dtype"]) == (True, False, "float16"), line
        assert "makes the host wait" in by_system[op, "grouped_mm"]["skipped"]
        why = "measured beside bfloat16" if op in FORWARD else "no gradients"
        assert why in by_system[op, "raymoe_fp8"]["skipped"]
