"""Workload products on CPU ranks: its lines, its oracle, refused jobs, and what other systems do wrong."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import pytest
import torch

from raymoe.config import load_job
from raymoe.config.job import Job
from raymoe.errors import ConfigError, WrongResult
from raymoe.fp8 import dequantise, dequantise_weight
from raymoe.memory.world import World
from raymoe.report.results import KEYS, complete, decode, encode
from raymoe.workload import Progress, run_case
from raymoe.workload.memory_needed import device_bytes, products_bytes
from raymoe.workload.oracle import BOUNDS
from raymoe.workload.products import systems as systems_of
from raymoe.workload.products.cublas import GroupArrays
from raymoe.workload.products.gradient_systems import by_torch
from raymoe.workload.products.prepared import by_places
from raymoe.workload.products.run_products import SWIGLU_SLACK
from raymoe.workload.products.systems import COPY, OURS, OWN, SYSTEMS, Prepared, Unavailable
from raymoe.workload.products.systems_fp8 import FP8_SYSTEMS, OURS_FP8, _deep_gemm_contiguous
from raymoe.workload.products.tasks import (
    BY_ROWS,
    FORWARD,
    HOT_OTHERS,
    OPS,
    ProductSizes,
    Task,
    error_between,
    padded_places,
    rows_of_experts,
)
from tests.unit.ranks import RankPool

CPU = torch.device("cpu")
KINDS = ("equal", "uniform", "zipf", "hot")


def job(ranks: int = 1, **products: object) -> dict[str, Any]:
    return {
        "name": "test",
        "workload": "products",
        "world": {"ranks": ranks, "device": "cpu"},
        "shape": {"hidden": 48, "ffn": 24, "experts": 4 * ranks},
        "products": {"rows": 9, **products},
        "steps": {"warmup": 1, "count": 3},
    }


def run(world: World, given: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Progress]]:
    progress: list[Progress] = []
    return [line for case in Job(**given).cases() for line in run_case(case, world, progress.append)], progress


def run_alone(given: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Progress]]:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        return run(world, given)


ELSEWHERE = ("grouped_mm", "dense"), ("grouped_mm", "added", "grouped_mm_added")
"""The systems beside raymoe and the copy that compute on a CPU: rows, and gradients of weights."""
FP8_ELSEWHERE = "raymoe_fp8", "raymoe_fp8_quantised"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_product_has_a_line_for_each_system(kind: str, dtype: str) -> None:
    lines, progress = run_alone(job(kind=kind, dtype=dtype))
    assert [(line["op"], line["backend"]) for line in lines] == [(op, name) for op in OPS for name in SYSTEMS]
    assert progress[-1].done == progress[-1].total == 4 * len(OPS)
    counts = rows_of_experts(kind, 9, 4)
    item = 4 if dtype == "float32" else 2
    for line in lines:
        assert (line["rows"], line["tokens"], line["experts"], line["routing"]) == (9, sum(counts), 4, kind)
        with_rows = 4 if line["op"] == "dw" else sum(count > 0 for count in counts)
        weights = with_rows * 48 * 24 * item * (1 if line["op"] == "down" else 2)
        assert line["bytes_weights"] == weights and line["dtype"] == dtype
        if line["backend"] in FP8_SYSTEMS and line["op"] not in FORWARD:
            assert line["samples"] == 0 and "no gradients" in line["skipped"]
            continue
        if line["backend"] not in (OURS, COPY, *FP8_ELSEWHERE, *ELSEWHERE[line["op"] == "dw"]):
            reasons = "compute capability", "GPUs", "gradients of weights"
            assert line["samples"] == 0 and any(reason in line["skipped"] for reason in reasons)
            continue
        if line["backend"] in OURS_FP8 and dtype != "bfloat16":
            assert "measured beside bfloat16" in line["skipped"]
            continue
        if line["backend"] == "raymoe_fp8_quantised" and line["op"] != "up_swiglu":
            assert "only results of SwiGLU" in line["skipped"]
            continue
        assert line["samples"] == 3 and line["verified"] is True, line
        assert line["max_error"] <= BOUNDS[getattr(torch, dtype)] * (SWIGLU_SLACK if line["op"] == "up_swiglu" else 1)
        if line["backend"] == COPY:
            assert line["bytes_memory"] == weights and line["tflops"] is None
            continue
        inner = 24 if line["op"] == "down" else 48
        outputs = 24 if line["op"] == "up_swiglu" else 48
        results = outputs if line["backend"] == "raymoe_fp8_quantised" else 2 * outputs
        in_8_bits = weights // 2 + sum(counts) * (inner + results)
        whole = weights + sum(counts) * (inner + outputs) * item
        assert line["bytes_memory"] == (in_8_bits if line["backend"] in OURS_FP8 else whole)
        assert math.isclose(line["tflops"], 2 * sum(counts) * 48 * inner / line["us_p50"] / 1e6)
        full = complete(line, run="r", generation=0, commit=None)
        assert set(full) == set(KEYS) and decode(encode(full)) == full


def test_ranks_measure_together_and_get_the_same_lines(pool: RankPool) -> None:
    answers = pool.run(2, run, job(ranks=2))
    assert answers[0][0] == answers[1][0]
    assert {(line["ranks"], line["experts"]) for line in answers[0][0]} == {(2, 4)}


# Rows of experts.


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_spread_as_their_kind_says(kind: str) -> None:
    counts = rows_of_experts(kind, 256, 64)
    assert len(counts) == 64 and counts == rows_of_experts(kind, 256, 64), "the same in each run"
    if kind == "hot":
        assert sorted(counts) == [HOT_OTHERS] * 63 + [256]
        return
    assert sum(counts) == 64 * 256
    spread = max(counts) / 256
    assert {"equal": spread == 1, "uniform": 1.1 < spread < 1.35, "zipf": spread > 8}[kind]


def test_experts_start_at_multiples_of_16_and_each_compared_row_has_one() -> None:
    sizes = ProductSizes((3, 0, 40, 16), 48, 24, "bfloat16")
    assert sizes.starts == [0, 16, 16, 64, 80]
    task = Task.drawn("up", sizes, 0, CPU)
    assert task.own.tolist() == [0, 1, 2, *range(16, 56), *range(64, 80)]
    checked = task.checked.tolist()
    assert checked[:3] == [0, 1, 2] and (checked[3], checked[18]) == (16, 55) and checked[19:] == [*range(64, 80)]
    assert len(task.want) == len(checked) == 35


# The oracle.


@pytest.mark.parametrize(
    ("name", "op"),
    [*itertools.product((OURS, "grouped_mm", "dense"), BY_ROWS), *itertools.product(("raymoe_fp8",), FORWARD)],
)
def test_the_oracle_finds_a_wrong_row_and_a_missing_one(name: str, op: str) -> None:
    task = Task.drawn(op, ProductSizes((3, 0, 40, 16), 48, 24, "bfloat16"), 0, CPU)
    prepared = SYSTEMS[name](task)
    bound = BOUNDS[torch.bfloat16] * SWIGLU_SLACK
    y = prepared.compute()
    assert prepared.error(y) <= bound
    last = int(task.checked[-1]) if name != "dense" else task.rows - 1
    for wrong in (1.5 * y[last], y[last].roll(1), y[0]):
        changed = y.clone()
        changed[last] = wrong
        assert prepared.error(changed) > bound
    changed = y.clone()
    changed[last, 5] = torch.nan
    assert prepared.error(changed) == torch.inf
    if name in (OURS, "raymoe_fp8"):  # a row between those that are compared
        changed = y.clone()
        changed[int(next(place for place in task.own if place not in task.checked))] = torch.nan
        assert prepared.error(changed) == torch.inf


@pytest.mark.parametrize("name", [OURS, "grouped_mm", "added", "grouped_mm_added"])
def test_the_oracle_finds_wrong_gradients_of_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task.drawn("dw", ProductSizes((3, 0, 40, 16), 48, 24, "bfloat16"), 0, CPU)
    assert task.dy is not None and not task.x[3:16].any() and not task.dy[3:16].any()
    prepared, bound = SYSTEMS[name](task), BOUNDS[torch.bfloat16]
    for _ in range(2):  # sums of two calls are judged by one more
        assert prepared.error(prepared.compute()) <= bound
    changes = (3, -1, 5, 2.0), (1, 7, 5, 1.0), (2, 9, 5, torch.nan)
    if name in (OURS, "grouped_mm"):
        for expert, output, column, change in changes:
            d_weight = prepared.compute().clone()
            d_weight[expert, output, column] += change * d_weight.abs().max()
            assert prepared.error(d_weight) > bound
        return
    monkeypatch.setattr(torch.Tensor, "zero_", lambda total: total.fill_(1.0))
    assert prepared.error(prepared.compute()) > bound


def test_a_copy_that_did_not_copy_is_found() -> None:
    task = Task.drawn("up", ProductSizes((3,), 48, 24, "bfloat16"), 0, CPU)
    prepared = SYSTEMS[COPY](task)
    result = prepared.compute()
    assert prepared.error(result) == 0.0
    result[-1] = 0
    assert prepared.error(result) == torch.inf


def test_errors_are_relative_to_the_largest_element_of_a_row() -> None:
    want = torch.tensor([[1.0, 100.0], [1.0, 1.0]], dtype=torch.float64)
    assert error_between(want + torch.tensor([[1.0, 0.0], [0.0, 0.0]]), want) == pytest.approx(0.01)
    assert error_between(want + torch.tensor([[0.0, 0.0], [0.0, 1.0]]), want) == pytest.approx(1.0)


# DeepGEMM, by a module that has its functions.


class DeepGemm:
    """The two products of DeepGEMM, as its page describes them."""

    @staticmethod
    def get_mk_alignment_for_contiguous_layout() -> int:
        return 128

    @staticmethod
    def m_grouped_bf16_gemm_nt_contiguous(
        x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, experts: torch.Tensor
    ) -> None:
        assert len(x) % 128 == 0 and all(len(block.unique()) <= 2 for block in experts.split(128))
        for row, expert in enumerate(experts.tolist()):
            y[row] = torch.nan if expert < 0 else (x[row].float() @ weight[expert].float().T).to(y.dtype)

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(x: Any, weight: Any, y: torch.Tensor, experts: torch.Tensor) -> None:
        assert x[1].stride(0) == 1 and x[0].dtype == weight[0].dtype == torch.float8_e4m3fn
        rows, weights = dequantise(*x), dequantise_weight(*weight)
        for row, expert in enumerate(experts.tolist()):
            y[row] = torch.nan if expert < 0 else (rows[row] @ weights[expert].T).to(y.dtype)

    @staticmethod
    def m_grouped_bf16_gemm_nt_masked(
        x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, expected: int
    ) -> None:
        assert expected >= 1
        y.fill_(torch.nan)
        for expert, count in enumerate(rows.tolist()):
            y[expert, :count] = (x[expert, :count].float() @ weight[expert].float().T).to(y.dtype)


@pytest.mark.parametrize("op", BY_ROWS)
@pytest.mark.parametrize("form", ["contiguous", "masked"])
def test_deep_gemm_gets_rows_as_it_needs_them(form: str, op: str) -> None:
    task = Task.drawn(op, ProductSizes((3, 0, 40, 16), 48, 24, "bfloat16"), 0, CPU)
    prepared = getattr(systems_of, f"_deep_gemm_{form}")(task, DeepGemm)
    assert prepared.error(prepared.compute()) <= BOUNDS[torch.bfloat16] * SWIGLU_SLACK
    assert padded_places((3, 0, 40, 16), 128) == ([0, 128, 128, 256], 384)


def as_columns(address: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix that is at an address column by column."""
    memory = (ctypes.c_char * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(columns, rows).T


def multiply_groups(handle, of_a, of_b, m, n, k, ones, a, a_type, lda, b, b_type, ldb, *others):
    """Multiply each group as cuBLAS does: op(A) B, all by columns."""
    zeros, c, c_type, ldc, groups, sizes, compute = others
    assert (handle.value, a_type, b_type, c_type, compute) == (7, 14, 14, 14, 68)
    pointers = [(ctypes.c_int64 * groups).from_address(each.value) for each in (a, b, c)]
    for group in range(groups):
        assert (of_b[group], ones[group], zeros[group], sizes[group]) == (0, 1.0, 0.0, 1)
        own = [each[group] for each in pointers]
        weight = as_columns(own[0], lda[group], m[group] if of_a[group] else k[group], torch.bfloat16).float()
        rows = as_columns(own[1], ldb[group], n[group], torch.bfloat16).float()
        y = (weight.T if of_a[group] else weight) @ rows
        as_columns(own[2], ldc[group], n[group], torch.bfloat16).copy_(y)
    return 0


@pytest.mark.parametrize("op", ["up", "down", "dx"])
def test_cublas_gets_a_group_for_each_expert_with_rows(op: str) -> None:
    task = Task.drawn(op, ProductSizes((3, 0, 40, 16), 48, 24, "bfloat16"), 0, CPU)
    y = task.x.new_full((len(task.x), task.weight.shape[1]), torch.nan)
    groups = GroupArrays.of(task, y)
    assert groups.addresses.shape == (3, 3)
    groups.multiply(multiply_groups, 7)
    assert by_places(task, lambda: y).error(y) <= BOUNDS[torch.bfloat16]
    with pytest.raises(Unavailable, match="status 15"):
        groups.multiply(lambda *_: 15, 7)
    with pytest.raises(Unavailable, match="on GPUs"):
        SYSTEMS["cublas"](task)


@pytest.mark.parametrize("op", ["dx", "dw"])
@pytest.mark.parametrize("name", FP8_SYSTEMS)
def test_8_bit_systems_have_no_gradients(name: str, op: str) -> None:
    with pytest.raises(Unavailable, match="no gradients"):
        SYSTEMS[name](Task.drawn(op, ProductSizes((3, 0, 40, 16), 48, 24, "bfloat16"), 0, CPU))


@pytest.mark.parametrize("op", ["up", "down"])
def test_deep_gemm_gets_8_bit_rows_as_it_needs_them(op: str) -> None:
    task = Task.drawn(op, ProductSizes((3, 0, 40, 16), 144, 256, "bfloat16"), 0, CPU)
    prepared = _deep_gemm_contiguous(task, task.quantised, DeepGemm)
    assert prepared.error(prepared.compute()) <= BOUNDS[torch.bfloat16]


def test_8_bit_results_are_held_to_the_nearest_ones() -> None:
    task = Task.drawn("up_swiglu", ProductSizes((3, 0, 40, 16), 144, 256, "bfloat16"), 0, CPU)
    prepared = SYSTEMS["raymoe_fp8_quantised"](task)
    values = prepared.compute()
    assert prepared.error(values) <= 1e-6
    last = int(task.checked[-1])
    for wrong in (values[last].float() * 1.25, values[last].float().roll(1), torch.full((256,), torch.nan)):
        changed = values.float()
        changed[last] = wrong
        assert prepared.error(changed.to(values.dtype)) > BOUNDS[torch.bfloat16] * SWIGLU_SLACK


# Systems that fail.


def wrong(task: Task) -> Prepared:
    prepared = Prepared(*by_torch(task)) if task.op == "dw" else SYSTEMS["dense"](task)
    return Prepared(lambda: prepared.compute() * 1.5, prepared.error)


def broken(task: Task) -> Prepared:
    raise RuntimeError("no kernel\nimage")


def absent(task: Task) -> Prepared:
    raise Unavailable("it is not here")


@pytest.mark.parametrize(
    ("fault", "said"),
    [(wrong, "its result has an error of"), (broken, "RuntimeError: no kernel image"), (absent, "it is not here")],
)
def test_another_systems_failure_is_told_in_its_line(monkeypatch: pytest.MonkeyPatch, fault: Any, said: str) -> None:
    monkeypatch.setitem(SYSTEMS, "grouped_mm", fault)
    lines, _ = run_alone(job())
    for line in lines:
        if line["backend"] == "grouped_mm":
            assert said in line["skipped"] and line["samples"] == 0
        if line["backend"] in (OURS, COPY):
            assert line["verified"] is True and line["samples"] == 3


@pytest.mark.parametrize(("fault", "error"), [(wrong, WrongResult), (broken, RuntimeError)])
def test_our_own_failure_ends_the_run(monkeypatch: pytest.MonkeyPatch, fault: Any, error: type[Exception]) -> None:
    monkeypatch.setitem(SYSTEMS, OURS, fault)
    with pytest.raises(error):
        run_alone(job())
    assert OURS in OWN and COPY in OWN and "grouped_mm" not in OWN


# Jobs.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["products.kind=round"], "products.kind"),
        (["products.rows=0"], "products.rows"),
        (["shape.hidden=7170"], "rows of 7170 elements, not a multiple of 8"),
        (["shape.ffn=2052"], "rows of 2052 elements, not a multiple of 8"),
        (["world.ranks=3"], "64 experts"),
        (["world.device=cpu", "steps.graph=true"], "CUDA graphs need GPU ranks"),
    ],
)
def test_jobs_that_cannot_run_are_refused(changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_job("bench_products", changes)


MODELS = ("deepseek_v4_flash", "gpt_oss_120b", "kimi_k2", "mixtral_8x22b", "qwen3_235b")


@pytest.mark.parametrize("name", ["bench_products", *(f"bench_products_{model}" for model in MODELS)])
def test_each_config_fits_a_gpu_of_80_gb(name: str) -> None:
    cases = load_job(name).cases()
    assert max(device_bytes(case) for case in cases) < 75 * 2**30
    assert [case.job.products.rows for case in cases[:3]] == [1, 8, 16]


def test_memory_grows_with_rows_and_counts_the_hot_expert_alone() -> None:
    few, many, hot = (
        products_bytes(load_job("bench_products", [f"matrix.products.{key}" for key in keys]).cases()[0].job)
        for keys in (["rows=[1]"], ["rows=[4096]"], ["rows=[4096]", "kind=[hot]"])
    )
    assert few < hot < many
