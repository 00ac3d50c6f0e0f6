"""The memory that an exchange between GPUs needs on each GPU."""

from __future__ import annotations

import pytest

from raymoe.config import load_job
from raymoe.exchange.peer.workspace import Bounds, workspace_layout
from raymoe.workload.memory_needed import BESIDE_BYTES, bytes_per_rank, device_bytes, device_bytes_per_rank, spec_of
from tests.unit.config.packaged_commands import variants

ONE = "matrix={exchange.backend: [fused], shape.tokens: [%d]}"


def bytes_of(tokens: int, *settings: str) -> int:
    [case] = load_job("exchange_deepseek_v3", [ONE % tokens, *settings]).cases()
    return device_bytes(case)


def test_the_need_includes_the_workspace_and_the_rows() -> None:
    [case] = load_job("exchange_deepseek_v3", [ONE % 4096, "steps.verify=false"]).cases()
    spec = spec_of(case.job)
    least = workspace_layout(Bounds.of(spec), 4).nbytes + 2 * spec.rows(4) * spec.row_bytes
    assert least < device_bytes(case) < least + 2**30


def test_a_smaller_capacity_or_a_narrow_wire_needs_less_memory() -> None:
    worst = bytes_of(4096)
    rows = 4 * 4096 * 8 + 64 * 15
    assert worst - bytes_of(4096, "exchange.capacity=40000") == pytest.approx(2 * (rows - 40000) * 14336, rel=1e-2)
    by_factor = 1.25 * 4096 * 8 + 64 * 15
    assert worst - bytes_of(4096, "exchange.capacity=1.25") == pytest.approx(2 * (rows - by_factor) * 14336, rel=1e-2)
    assert worst - bytes_of(4096, "exchange.wire=float8_e4m3") == pytest.approx(8 * 4096 * (14336 - 7392), rel=1e-2)


def test_rows_by_token_need_a_kth_of_the_memory_for_rows() -> None:
    by_expert, by_token = (bytes_of(4096, f"exchange.layout={layout}") for layout in ("expert", "token"))
    saved = 2 * 14336 * (4 * 4096 * 8 + 64 * 15 - 4 * 4096)  # in and out of the experts, top-8
    assert by_expert - by_token == pytest.approx(saved, rel=2e-2)


FIT = ("exchange_deepseek_v3", "exchange_kimi_k2", "bench_exchange", "exchange_gpu")


@pytest.mark.parametrize(("name", "sets"), [(name, sets) for name, sets in variants() if name in FIT])
def test_packaged_configs_fit_an_80_gb_gpu_and_need_no_host_memory(name: str, sets: tuple[str, ...]) -> None:
    job = load_job(name, sets)
    assert BESIDE_BYTES < device_bytes_per_rank(job) < 80e9
    assert bytes_per_rank(job) == 0


def test_row_push_needs_its_slots_and_no_rows() -> None:
    asked = "matrix={exchange.backend: [row_push], shape.tokens: [4096]}"
    [case] = load_job("exchange_deepseek_v3", [asked]).cases()
    assert 5 * 4096 * 14336 < device_bytes(case) < bytes_of(4096) / 4
