"""Lines of `nccl_bare`, the baseline over NCCL, in the report."""

from __future__ import annotations

from pathlib import Path

from raymoe.config import load_job
from raymoe.report.plots import write_plots
from raymoe.report.results import Line
from raymoe.report.tables import render
from raymoe.workload.compare.nccl_bare import LEFT_OUT
from raymoe.workload.memory_needed import device_bytes
from tests.unit.report.lines import complete_line, gpu_exchange


def bare(tokens: tuple[int, ...] = (128, 4096)) -> list[Line]:
    """Return lines of the baseline, made from lines of a dispatch."""
    lines = [line for line in gpu_exchange("nccl_bare", 20.0, tokens) if line["op"] == "dispatch"]
    return [complete_line(line | {"op": op, "leaves_out": why}) for op, why in LEFT_OUT.items() for line in lines]


def test_each_nccl_call_has_a_table_that_says_what_it_leaves_out() -> None:
    text = render(gpu_exchange("fused", 10.0) + bare())
    assert all(f"{op}, cold L2: us" in text for op in LEFT_OUT)
    assert all(why in text for why in LEFT_OUT.values())
    dispatch = next(part for part in text.split("\n\n") if part.startswith("dispatch, cold L2"))
    assert "nccl_bare" not in dispatch


def test_nccl_calls_have_no_plots(tmp_path: Path) -> None:
    write_plots(tmp_path, gpu_exchange("fused", 10.0) + bare())
    drawn = {path.stem for path in tmp_path.rglob("*.svg")}
    assert "dispatch" in drawn and not drawn & LEFT_OUT.keys()


def test_the_memory_of_nccl_bare_is_counted() -> None:
    asked = "matrix={exchange.backend: [nccl_bare], shape.tokens: [4096]}"
    [case] = load_job("exchange_deepseek_v3", [asked]).cases()
    rows = 4096 * 14336
    assert device_bytes(case) > (1 + 2 * 4 + 2 * 4) * rows + 2 * 8 * rows
