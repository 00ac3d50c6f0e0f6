"""Exchanges beside a product: refused jobs, one step on fake streams, and the table."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import load_job  # noqa: E402
from raymoe.config.sections import OverlapSection  # noqa: E402
from raymoe.errors import ConfigError  # noqa: E402
from raymoe.exchange.exchange import Exchange  # noqa: E402
from raymoe.report.tables import (  # noqa: E402
    overlap_times,
    render,
)
from raymoe.workload.inputs import (  # noqa: E402
    Inputs,
    Routing,
)
from raymoe.workload.memory_needed import device_bytes, spec_of  # noqa: E402
from raymoe.workload.overlap import run_overlap as overlap_run  # noqa: E402
from raymoe.workload.overlap.run_overlap import OPS, OverlapStep  # noqa: E402
from tests.unit.report.lines import GPU_SHAPE, SETTING, complete_line  # noqa: E402
from tests.unit.worlds import close, each, wired  # noqa: E402

BASE = ["matrix.exchange.backend=[fused]", "matrix.exchange.sms=[auto]"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["matrix.exchange.backend=[collective]"], "collective cannot run beside a matrix product"),
        (["matrix.exchange.backend=[row_push]"], "row_push cannot run beside a matrix product"),
        (["world.device=cpu"], "workload overlap has no CPU ranks"),
        (["steps.graph=true"], "timed without CUDA graphs"),
        (["overlap.rows=0"], "overlap.rows"),
        (["workload=exchange", "overlap.rows=8"], "overlap"),
    ],
)
def test_impossible_overlap_jobs_are_refused(sets, said):
    with pytest.raises(ConfigError) as refused:
        job = load_job("bench_overlap", [*BASE, *sets])
        if "workload=exchange" in sets:
            assert "overlap" not in job.resolved()
            raise ConfigError("overlap is left out of a job that is none")
    assert said in str(refused.value) + "".join(str(each) for each in refused.value.problems)


def test_the_memory_that_a_rank_needs_includes_the_product():
    small, large = (
        device_bytes(load_job("bench_overlap", [*BASE, f"overlap.rows={rows}"]).cases()[0]) for rows in (1024, 2048)
    )
    assert large - small == 1024 * (7168 + 2 * 4096) * 2


class Stream:
    """A stream that runs everything at once, in the order of enqueueing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, event: Any) -> None:
        assert event.recorded, "the stream waits for an event that was not recorded"


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.recorded = enable_timing, False

    def record(self, _: Any) -> None:
        self.recorded = True


class Clock:
    def __init__(self, *_: Any, **options: Any) -> None:
        self.captured = options["captured"]

    def cold_us(self, work) -> float:
        work()
        return 5.0

    def since_begin(self, event: Event) -> float:
        assert event.timed and event.recorded
        return 3.0

    def close(self) -> None: ...


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    monkeypatch.setattr(overlap_run, "OpClock", Clock)
    monkeypatch.setattr(Exchange, "check", lambda _: None)


@pytest.mark.parametrize("wrong", ["", "exchange", "product"])
def test_a_step_times_every_operation_and_checks_exchange_and_product(without_cuda, monkeypatch, wrong):
    asked = load_job("host_exchange", ["shape={tokens: 8, hidden: 16, experts: 4, topk: 2, dtype: float32}"])
    spec = spec_of(asked.cases()[0].job)
    routing = Routing("uniform", seed=0, ranks=2, tokens=8, experts=4, topk=2)

    def step(world) -> Any:
        world.__dict__["_gpu"] = None
        with Exchange(world, spec, "host") as exchange:
            overlap_step = OverlapStep(
                world,
                exchange,
                Inputs(routing, world.rank, 16, torch.float32),
                OverlapSection(rows=8, columns=4),
            )
            if wrong == "product":
                overlap_step._product.want[3, 2] += 1
            if wrong == "exchange":
                real = overlap_step._run_experts

                def run_and_spoil() -> None:
                    real()
                    overlap_step.rows[:2] = overlap_step.rows[:2].flip(0) + 1

                overlap_step._run_experts = run_and_spoil
            return overlap_step(0, verify=True), overlap_step(1, verify=False), overlap_step.ops

    monkeypatch.setattr("raymoe.memory.world.World.gpu", type("Gpu", (), {"synchronise": staticmethod(lambda: None)})())
    worlds = wired(2)
    answers = each(worlds, step)
    close(worlds)
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    for verified, plain, ops in answers:
        assert len(ops) == len(OPS) == len(verified.us) == len(plain.us) == 9
        assert verified.us == (5.0, 5.0, 5.0, 3.0, 3.0, 5.0, 3.0, 3.0, 5.0) and plain.error is None
        assert (verified.error <= 1e-5) == (not wrong), verified.error


def lines_of(case: str, dispatch: tuple[float, float, float], product: float = 500.0, alone: float = 480.0):
    beside, product_beside, both = dispatch
    times = [alone, 490.0, product, beside, product_beside, both, 600.0, 650.0, 650.0]
    keys = {**GPU_SHAPE, **SETTING, "workload": "overlap", "backend": "fused", "samples": 30, "l2": "cold"}
    keys |= {"device": "NVIDIA H200", "graph": False, "tokens": 4096, "verified": True, "max_error": 4e-3}
    return [
        complete_line({**keys, "case": case, "op": op, "beside": other, "us_p50": time})
        for (op, other), time in zip(OPS, times, strict=True)
    ]


def test_the_table_shows_both_slowdowns_and_the_fastest_case():
    lines = lines_of("sms=16", (700.0, 560.0, 700.0)) + lines_of("sms=32", (528.0, 620.0, 620.0))
    assert [round(times.saved, 3) for times in overlap_times(lines, "dispatch")] == [0.286, 0.367]
    title, head, _, few, many = render(lines).split("\n\n")[1].splitlines()
    assert title == "dispatch beside a product, us: alone, beside, slower by; both finish first with sms=32"
    assert head.split() == ["case", "dispatch", "beside", "slower", "product", "beside", "slower", "both", "saved"]
    assert few.split() == ["sms=16", "480.0", "700.0", "+46%", "500.0", "560.0", "+12%", "700.0", "29%"]
    assert many.split()[-2:] == ["620.0", "37%"]
    assert "combine beside a product" in render(lines)
    assert "beside a product" not in render([line for line in lines if line["beside"] is None])
