"""A run reports metrics from one table, spans on one clock, lines of a rank's log, and ranges for Nsight."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.config import Job
from raymoe.errors import WrongResult
from raymoe.exchange.spec import ExchangeSpec
from raymoe.gang import driver, metrics
from raymoe.gang import supervisor as sv
from raymoe.gang.messages import ClockShift, Message, Profiled, Progressed
from raymoe.gang.metrics import TABLE, Kind, Metric, Record, RunMetrics
from raymoe.gang.rank import MOST_REPORTS, RankLog, Reports
from raymoe.gang.watch import RunWatch
from raymoe.memory.address import boot_id
from raymoe.memory.world import World
from raymoe.report import trace
from raymoe.report.trace import ChromeTrace
from raymoe.workload.measure import Step, Steps, measure
from raymoe.workload.progress import Block, OpWork, Progress, Span, StepWork
from tests.unit.ranks import RankPool


class Recorder:
    """Stands for Ray: what was recorded under each name and tags."""

    def __init__(self) -> None:
        self.counted: dict[tuple[str, ...], float] = {}
        self.now: dict[tuple[str, ...], float] = {}

    def make(self, metric: Metric) -> Record:
        def record(value: float, tags: Mapping[str, str]) -> None:
            assert tuple(tags) and set(tags) == {"run", *metric.tags}, "Ray refuses a tag too few or too many"
            assert all(isinstance(tag, str) for tag in tags.values())
            key = (metric.name, *(tags[tag] for tag in metric.tags))
            if metric.kind is Kind.COUNTER:
                self.counted[key] = self.counted.get(key, 0.0) + value
            else:
                self.now[key] = value

        return record

    def state(self, rank: int) -> str:
        """The one state that a rank is in."""
        (state,) = [key[2] for key, value in self.now.items() if key[:2] == ("raymoe_rank_state", str(rank)) and value]
        return state


def progress(**changes: Any) -> Progress:
    """Ten steps in which a dispatch took 20 us each and a combine, beside which was a product, 30 us each."""
    ops = (
        OpWork("dispatch", 1000.0, {"backend": "host"}),
        OpWork("step"),
        OpWork("combine", 500.0, {"backend": "fused", "l2": "cold", "beside": "product"}),
        OpWork("copy", 7.0, {"transport": "tma"}),
    )
    block = Block(0, 10, began=5.0, ended=5.2, met=5.25, us=(200.0, 1e5, 300.0, 0.0), verified=((2, 5.05, 5.1),))
    return Progress(**{"done": 10, "total": 20, "block": block, "work": StepWork(ops, 16.0, 1.5, 1.25)} | changes)


def test_a_block_of_steps_becomes_counts_under_its_tags() -> None:
    ray = Recorder()
    run = RunMetrics("a-run", ranks=2, make=ray.make)
    for _ in range(2):
        run.block(1, progress())
    expected = {
        ("raymoe_steps", "1", "false"): 18,
        ("raymoe_steps", "1", "true"): 2,
        ("raymoe_steps_seconds", "1", "false"): 0.3,
        ("raymoe_steps_seconds", "1", "true"): 0.1,
        ("raymoe_tokens", "1"): 320,
        ("raymoe_dispatches", "1", "host", "", ""): 20,
        ("raymoe_dispatch_seconds", "1", "host", "", ""): 400e-6,
        ("raymoe_dispatch_bytes", "1", "host", "", ""): 20_000,
        ("raymoe_combines", "1", "fused", "cold", "product"): 20,
        ("raymoe_combine_seconds", "1", "fused", "cold", "product"): 600e-6,
        ("raymoe_combine_bytes", "1", "fused", "cold", "product"): 10_000,
    }
    assert ray.counted == pytest.approx(expected), "a copy that took no time on this rank is not counted"
    assert ray.now["raymoe_expert_load_imbalance", "1"] == 1.5 and ray.now["raymoe_rank_load", "1"] == 1.25
    assert ray.now["raymoe_step_seconds", "1"] == pytest.approx(0.15 / 10), "the verified step is timed once more"


def drive(run: RunMetrics, state: sv.State, *events: sv.Event) -> sv.State:
    for event in events:
        after, _ = sv.decide(state, event, now=0.0)
        run.on(event, state, after)
        state = after
    return state


def test_states_of_ranks_follow_the_supervisor() -> None:
    ray = Recorder()
    run = RunMetrics("a-run", ranks=2, make=ray.make)
    state = sv.State(ranks=2, restarts_left=1)
    seen = [ray.state(0)]
    for event in (sv.Placed(), sv.Started(), sv.Wired()):
        state = drive(run, state, event)
        seen.append(ray.state(0))
    assert seen == ["placing", "starting", "wiring", "running"]
    state = drive(run, state, sv.Lost(1, "rank 1 was killed"), sv.Failed(0, sv.Failure("Aborted", 1, "told", peer=1)))
    assert (ray.state(0), ray.state(1)) == ("failed", "lost") and ("raymoe_restarts",) not in ray.counted
    drive(run, state, sv.Failed(0, sv.Failure("WrongResult", 6, "too late to mean anything")))
    state = drive(run, state, sv.Cleared())
    assert (ray.state(0), ray.state(1)) == ("starting", "starting")
    assert ray.counted == {("raymoe_restarts",): 1.0}
    state = drive(run, state, sv.Started(), sv.Wired(), sv.Finished(1), sv.Finished(0))
    assert (ray.state(0), ray.state(1)) == ("done", "done")
    drive(run, state, sv.Cleared())
    assert ray.counted == {("raymoe_restarts",): 1.0}, "the end of the run is no restart"


def test_gauges_are_set_again_because_ray_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, clock = Recorder(), [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    run = RunMetrics("a-run", ranks=1, make=ray.make)
    run.cases(1, 4)
    run.block(0, progress())
    counted, now = dict(ray.counted), dict(ray.now)
    ray.now.clear()
    run.refresh()
    assert ray.now == {}, "too early"
    clock[0] += 1.0
    run.refresh()
    del now["raymoe_step_seconds", "0"]
    assert ray.now == now and ray.counted == counted, "only gauges, with the values that they had"


FAILURES = {
    "PeerTimeout": ({("raymoe_peer_timeouts", "0", "1"): 1.0, ("raymoe_peer_timeouts", "2", "1"): 1.0}),
    "DataRefused": {("raymoe_refused_steps",): 1.0},
    "WrongResult": {("raymoe_verify_failures",): 1.0},
    "RuntimeError": {},
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_counted(kind: str) -> None:
    ray = Recorder()
    run = RunMetrics("a-run", ranks=3, make=ray.make)
    state = drive(run, sv.State(ranks=3, restarts_left=1), sv.Placed(), sv.Started(), sv.Wired())
    failure = sv.Failure(kind, 5, "said", peer=1)
    drive(run, state, sv.Failed(0, failure), sv.Failed(2, failure))
    assert ray.counted == FAILURES[kind]


def test_the_table_is_fit_for_ray_and_prometheus() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names) and all(name.startswith("raymoe_") for name in names)
    for metric in TABLE:
        assert metric.name.replace("_", "").isalnum() and not metric.name.endswith("_total")
        assert metric.unit not in ("seconds", "bytes") or metric.unit in metric.name
        assert metric.meaning.endswith(".") and "run" not in metric.tags
        Recorder().make(metric)(1.0, {"run": "a-run"} | dict.fromkeys(metric.tags, "x"))
    kinds = {name for name, value in vars(metrics).items() if isinstance(value, Metric)}
    assert all(getattr(metrics, name) in TABLE for name in kinds)


def test_progress_that_stands_still_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the log of a run shows that it is alive."""
    sent: list[Message] = []
    now = Progressed("case", 3, 9, 0.1)
    gang = SimpleNamespace(take_finished=list, take_reports=list, shifts={}, generation=0, progress=now)
    clock = [100.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: clock[0])
    job = Job.model_validate({"name": "test", "workload": "exchange"})
    run = driver.Driver(driver.DriverSettings(job, "a-run", None), sent.append, lambda: None)
    run.gang = gang  # type: ignore[assignment]
    for seconds in (0.0, 1.0, 3.0, 2.0, 1.0):
        clock[0] += seconds
        run._send_progress()
    assert sent == [now, now]
    gang.progress = Progressed("case", 4, 9, 0.1)
    run._send_progress()
    assert sent[2:] == [gang.progress]


# Reports of a rank.


def test_reports_wait_until_they_are_taken_and_their_number_is_bounded() -> None:
    reports = Reports()
    for index in range(MOST_REPORTS + 5):
        reports.add(Span(str(index), 0.0, 1.0))
    waiting, number = reports.after(0)
    assert (len(waiting), waiting[0].name, number) == (MOST_REPORTS, "5", MOST_REPORTS + 5)
    reports.add(Span("last", 0.0, 1.0))
    assert [span.name for span in reports.after(number)[0]] == ["last"]
    assert [span.name for span in reports.after(number)[0]] == ["last"], "an answer that was lost is given again"


def test_a_ranks_log_begins_each_line_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(3)
    log.line("case \x1b[31mred\nsecond")
    log.progress("too soon")
    log._progress_at -= 6
    log.progress("step 3/9")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["rank 3: case ?[31mred second", "rank 3: step 3/9"]


def test_a_full_disk_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    RankLog(0).line("no room for this")
    assert len(tried) == 1


# Blocks of steps.


def blocks_of(world: World) -> list[Block]:
    heard: list[Block] = []

    def do_step(index: int, *, verify: bool) -> Step:
        return Step((10.0 * (index + 1), 1.0), 0.0 if verify else None)

    measure(world, Steps(warmup=2, count=60, verify=True, bound=1.0), do_step, heard.append, "test")
    return heard


def test_blocks_say_what_was_done_and_when(pool: RankPool) -> None:
    """Ranks of one host measure by one clock: each leaves a block only after all have done their steps."""
    by_rank: list[list[Block]] = pool.run(2, blocks_of)
    for blocks in by_rank:
        assert [block.first for block in blocks] == [0, *(block.done for block in blocks[:-1])] and len(blocks) > 1
        assert blocks[-1].done == 62
        assert sum(block.us[0] for block in blocks) == sum(10.0 * (index + 1) for index in range(62))
        assert sum(block.us[1] for block in blocks) == 62.0
        assert [index for block in blocks for index, *_ in block.verified] == [2, 52, 61]
        for block in blocks:
            assert block.began < block.ended < block.met
            assert all(block.began <= began < ended <= block.ended for _, began, ended in block.verified)
        assert all(before.met <= after.began for before, after in pairwise(blocks))
    for block, other in zip(*by_rank, strict=True):
        assert block.met > other.ended and other.met > block.ended


def loads(world: World, ids: list[list[list[int]]]) -> tuple[Any, float | None]:
    """Return the load of the experts, and the imbalance that this rank reports with its progress."""
    from raymoe.workload.inputs import Draw
    from raymoe.workload.traffic import ExchangeTraffic, expert_load, work_of

    draws = [Draw(torch.tensor(draw), torch.ones(len(draw), len(draw[0]))) for draw in ids]
    spec = ExchangeSpec(tokens=2, hidden=64, experts=20_000, topk=2, alignment=4)
    load, by_token = (expert_load(world, draws, replace(spec, layout=layout)) for layout in ("expert", "token"))
    assert by_token.by_expert == load.by_expert and by_token.busiest_rows == 4 == by_token.capacity
    return load, work_of(world, draws, load, ExchangeTraffic.of([[0, 0], [0, 0]], 1), ()).imbalance


def test_the_load_of_experts_is_that_of_all_ranks(pool: RankPool) -> None:
    """Over all ranks' tokens and all draws; also with more experts than one message holds."""
    ids = [[[0, 15_000], [0, 15_001]], [[0, -1], [-1, 15_001]]]  # each rank: 3 rows of expert 0, 2 of 15001; 6 in all
    (first, ours), (second, theirs) = pool.run(2, loads, ids)
    assert first == second and len(first.by_expert) == 20_000
    assert {expert: rows for expert, rows in enumerate(first.by_expert) if rows} == {0: 3.0, 15_000: 1.0, 15_001: 2.0}
    # The first draw gives 4 rows to expert 0, and 2 + 2 to 15,000 and 15,001, each up to a multiple of 4.
    assert first.busiest_rows == 8 and first.capacity == 30_008
    assert [ours, theirs] == pytest.approx([20_000 * 6 / 12, 20_000 * 4 / 12])


# Ranges for Nsight Systems.


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges as they are pushed and popped; on this machine torch may have none."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    return seen


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_phases_are_ranges_on_a_gpu_alone(ranges: list[str], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def do_step(index: int, *, verify: bool) -> Step:
        if index == 1:
            raise WrongResult("at step 1")
        return Step((1.0,))

    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        monkeypatch.setattr(world, "device", torch.device(device))
        with pytest.raises(WrongResult):
            measure(world, Steps(0, 9, False, 0.0), do_step, lambda _: None, "case {a}")
        monkeypatch.setattr(world, "device", torch.device("cpu"))
    pushed = ["case {a}", "steps 0 to 0", "pop", "steps 1 to"] if device == "cuda" else []
    assert [name[: len(want)] for name, want in zip(ranges, pushed, strict=False)] == pushed
    assert ranges.count("pop") == len(ranges) / 2, "every range ends, also by an error"


# Spans and the trace.


def watch(sent: list[Message]) -> RunWatch:
    return RunWatch("a-run", 2, 3, sent.append, profile=True)


def test_spans_of_the_driver_are_the_supervisors_phases() -> None:
    sent: list[Message] = []
    watched, state = watch(sent), sv.State(ranks=2, restarts_left=1)
    for event in (sv.Placed(), sv.Tick(), sv.Started(), sv.Wired(), sv.Lost(1, "x"), sv.Lost(0, "y"), sv.Cleared()):
        after, _ = sv.decide(state, event, 0.0)
        watched.on(event, state, after)
        state = after
    watched.send_spans()
    (message,) = sent
    assert isinstance(message, Profiled) and message.process == "driver" and message.host == boot_id()
    assert [(span.name, span.generation) for span in message.spans] == [
        (phase, 0) for phase in ("placing", "starting", "wiring", "running", "ending", "clearing")
    ]
    assert all(before.ended == after.began for before, after in pairwise(message.spans))


def test_without_profile_no_span_is_sent() -> None:
    sent: list[Message] = []
    watched = RunWatch("a-run", 2, 3, sent.append, profile=False)
    watched.report(0, 0, progress())
    watched.report(0, 0, Span("case x", 1.0, 2.0))
    watched.send_spans()
    assert sent == []


def test_the_clock_of_another_host_is_shifted_by_the_quickest_answer(tmp_path: Path) -> None:
    """The driver's clock shows 100 when the ranks' shows 5000. A slow answer must not replace a quick one."""
    messages: list[Message] = []
    watched = watch(messages)
    for rank, (sent, there, answered) in enumerate([(99.0, 5000.0, 101.5), (100.0, 5000.01, 100.02)]):
        watched.clock(rank, "other", ClockShift.of_answer(sent, there, answered))
    watched.clock(0, "other", ClockShift.of_answer(98.0, 5000.0, 105.0))
    for rank in (0, 1):
        watched.report(rank, 0, Span("case x", 5001.0 + rank, 5003.0))
    watched.on(sv.Placed(), sv.State(2, 0), sv.State(2, 0, sv.Phase.STARTING))
    watched.send_spans()
    chrome = ChromeTrace("a-run")
    for message in messages:
        assert isinstance(message, Profiled)
        chrome.add(message.process, message.host, message.spans)
        chrome.shift(message.host, message.shift.seconds, message.shift.error)
    document = json.loads(chrome.write(tmp_path).read_text())
    began = {event["pid"]: event["ts"] for event in document["traceEvents"] if event["name"] == "case x"}
    assert sorted(began.values())[1] - sorted(began.values())[0] == pytest.approx(1e6)
    assert document["otherData"]["clock_error_us"] == pytest.approx(10_000)
    shifts = {message.host: message.shift.seconds for message in messages if isinstance(message, Profiled)}
    assert shifts == {boot_id(): 0.0, "other": pytest.approx(-4900.0)}


def test_a_trace_names_its_rows_and_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace, "MOST_SPANS", 3)
    chrome = ChromeTrace("a-run")
    chrome.add("rank 10", "host", [Span("a", 1.0, 2.0, generation=1)])
    chrome.add("rank 9", "host", [Span("b", 1.5, 2.0)])
    chrome.add("driver", "host", [Span("c", 0.5, 2.0), Span("too many", 3.0, 4.0)])
    document = json.loads(chrome.write(tmp_path).read_text())
    assert document["otherData"]["spans_dropped"] == 1
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {names[event["pid"]]: event["args"]["sort_index"] for event in events if "sort_index" in event["name"]}
    assert order == {"driver": 0, "rank 9": 1, "rank 10": 2}
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["tid"] == 1] == [
        "generation 1"
    ]
    assert [(event["name"], event["ts"]) for event in events if event["ph"] == "X"] == [
        ("c", 0),
        ("a", 5e5),
        ("b", 1e6),
    ]
