"""Watch a run: metrics in a real Prometheus, every query of the dashboard, names of tasks, logs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.parse
import urllib.request
from itertools import combinations
from pathlib import Path

import pytest

from raymoe.gang.dashboard import PANELS, WINDOW
from tests.gang import configs
from tests.gang.conftest import CALM, METRICS_EVERY_SECOND, Command, Head, Start
from tests.gang.prometheus import prometheus

ZERO = {"Peer timeouts", "Refused steps", "Verify failures"}
"""Panels whose documented answer is 0 in a run without these failures."""


def run_name(command: Command) -> str:
    return (command.out / "config.yaml").read_text().splitlines()[0].removeprefix("# raymoe run ")


def tasks_named(head: Head, name: str) -> int:
    """Count the tasks of a name in the task table of Ray's dashboard. Without a filter it shows 10,000 of all tasks."""
    chosen = urllib.parse.urlencode({"filter_keys": "name", "filter_predicates": "=", "filter_values": name})
    with urllib.request.urlopen(f"{head.dashboard}/api/v0/tasks?{chosen}", timeout=10) as answer:
        return len(json.load(answer)["data"]["result"]["result"])


def wait_for_task(head: Head, name: str) -> None:
    """Wait until the table has a task of this name. Processes send the events of their tasks once a second."""
    deadline = time.monotonic() + 20
    while not tasks_named(head, name):
        assert time.monotonic() < deadline, f"no task {name}"
        time.sleep(0.2)


Row = list[tuple[str, float, float]]
"""Spans of a row by their begin: name, begin and end."""


def rows_of(command: Command) -> dict[tuple[str, int], Row]:
    """The rows of a trace, by process and generation."""
    events = json.loads((command.out / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows: dict[tuple[str, int], Row] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["name"], event["ts"], event["ts"] + event["dur"])
            rows.setdefault((names[event["pid"]], event["tid"]), []).append(span)
    return rows


def check_trace(command: Command) -> None:
    """Spans of a row lie one in the other or one after the other, and ranks and driver have one clock."""
    rows = rows_of(command)
    assert set(rows) == {("driver", 0), ("rank 0", 0), ("rank 1", 0)}
    rounding = 0.01  # microseconds
    for row in rows.values():
        for (_, _, ended), (_, began, inner_ended) in combinations(row, 2):
            assert began >= ended - rounding or inner_ended <= ended + rounding
    (running,) = [span for span in rows["driver", 0] if span[0] == "running"]
    met = {}
    for rank in ("rank 0", "rank 1"):
        names = [name for name, *_ in rows[rank, 0]]
        assert names[:4] == ["open", "wire", "case default", "set up"] and "verified step 1" in names
        (case,) = [span for span in rows[rank, 0] if span[0] == "case default"]
        assert running[1] <= case[1] and case[2] <= running[2], "the driver's clock is the ranks' clock"
        inside = [span for span in rows[rank, 0] if span[0].startswith(("step", "verified", "wait", "set up"))]
        assert all(case[1] <= began and ended <= case[2] + rounding for _, began, ended in inside)
        met[rank] = [(began, ended) for name, began, ended in inside if name == "wait for all ranks"]
    assert len(met["rank 0"]) == len(met["rank 1"]) > 1
    for (began, ended), (other_began, other_ended) in zip(*met.values(), strict=True):
        assert ended > other_began and other_ended > began, "no rank goes on before all have done their steps"


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_every_panel_of_the_dashboard_answers(start: Start, head: Head, tmp_path: Path) -> None:
    """Of an exchange that loses a rank and restarts, beside copies. Both run until every query has an answer."""
    two = {"world__ranks": 2, "world__wait_timeout_s": 20, "steps__count": configs.LONG}
    copies = {"workload": "p2p", "p2p": {"transports": ["host"], "bytes": ["64KiB"], "pattern": "all_to_all"}}
    runs = [
        start(
            configs.write(tmp_path, name, **two, **more),
            "--address",
            head.address,
            "--profile",
            env=METRICS_EVERY_SECOND,
            first=CALM,
        )
        for name, more in (("exchange", {}), ("copies", copies))
    ]
    with prometheus(head.folder, tmp_path) as server:
        pids = [run.pids() for run in runs]
        exchange = run_name(runs[0])
        server.wait_for(f'ray_raymoe_rank_state{{run="{exchange}",rank="1",state="running"}} == 1')
        os.kill(pids[0][1], signal.SIGKILL)
        runs[0].pids(generation=1)
        answers = {}
        for panel in PANELS:
            for query in panel.queries:
                expression = query.expression.replace(WINDOW, "20s").replace("$SessionName", ".*")
                chosen = "|".join(run_name(run) for run in runs)
                answers[panel.title] = server.wait_for(expression.replace("$run", chosen))
        server.wait_for(f'sum(ray_raymoe_rank_state{{run="{exchange}",state="running"}}) == 2')
        for rank in range(2):
            wait_for_task(head, f"rank{rank} run")
            assert tasks_named(head, f"rank{rank} poll") == 0
        for run in runs:
            run.signal(signal.SIGTERM)
    assert [run.end(10) for run in runs] == [143, 143]

    values = {title: {series.value for series in answer} for title, answer in answers.items()}
    assert values["Restarts"] == {1.0}
    assert {title for title, answer in values.items() if answer == {0.0}} == ZERO
    for title in ("Seconds of a dispatch", "Seconds of a combine", "Seconds of a copy"):
        assert all(1e-6 < seconds < 1 for seconds in values[title]), answers[title]
    assert {series.labels["backend"] for series in answers["Bandwidth of a dispatch"]} == {"host"}
    assert sum(series.value for series in answers["Rank load"]) == pytest.approx(2), "the mean of both ranks is 1"
    assert min(values["Expert load imbalance"]) >= 0.5 and max(values["Expert load imbalance"]) > 1
    assert {process for process, _ in rows_of(runs[0])} == {"driver", "rank 0", "rank 1"}
    assert {generation for _, generation in rows_of(runs[0])} == {0, 1}, "a run that is stopped leaves its trace too"


@pytest.mark.timeout(120)
def test_a_short_run_leaves_its_metrics_its_trace_and_its_log(start: Start, head: Head, tmp_path: Path) -> None:
    """A run that is over before Ray exports for the first time: what it counted goes out when its driver leaves."""
    config = configs.write(tmp_path, world__ranks=2, steps__count=30)
    run = start(config, "--address", head.address, "--profile")
    assert run.end() == 0, run.stderr()
    check_trace(run)
    name, sums = run_name(run), {"raymoe_steps": 31, "raymoe_dispatches": 31, "raymoe_tokens": 31 * 16}
    deadline, recorded = time.monotonic() + 20, {}
    while recorded != {metric: {"0": total, "1": total} for metric, total in sums.items()}:
        assert time.monotonic() < deadline, recorded
        with urllib.request.urlopen(f"http://127.0.0.1:{head.metrics_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        for metric in sums:
            recorded[metric] = dict.fromkeys("01", 0.0)
            series = rf'^ray_{metric}_total{{.*rank="(\d)",run="{name}".*}} (\S+)$'
            for rank, value in re.findall(series, text, re.MULTILINE):
                recorded[metric][rank] += float(value)
        time.sleep(0.2)

    session = head.folder / "session_latest" / "logs"
    logs = [path.read_text() for path in session.glob("worker-*.out")]
    own = [log for log in logs if f": {name}, seat" in log]
    assert len(own) == 2
    for log in own:
        lines = re.findall(r"^\d\d:\d\d:\d\d (rank \d): (.*)$", log, re.MULTILINE)
        assert len({who for who, _ in lines}) == 1
        assert [text for _, text in lines][1:] == ["wiring", "ready", "running", "case default", "done"]
