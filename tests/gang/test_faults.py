"""A rank that dies or stops, in every phase, is named in bounded time; the gang restarts only where it may."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from raymoe.config import load_job
from raymoe.gang import supervisor as sv
from raymoe.gang.driver import Driver, DriverSettings
from raymoe.gang.gang import Gang, RankCall
from raymoe.gang.messages import CaseDone, GenerationEnded, Message, Ready, RunOutcome
from raymoe.gang.placement import Location
from raymoe.gang.rank import Rank
from tests.gang import configs, faulty_ranks
from tests.gang.conftest import CALM, Head, Start, in_driver
from tests.gang.fault_lines import Fault
from tests.gang.faulty_ranks import CorruptingRank, RaisingRank

pytestmark = pytest.mark.usefixtures("nothing_left")


def summary_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / "summary.json").read_text())


def test_a_rank_killed_in_a_step_is_named_and_the_gang_restarts(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    config = configs.write(tmp_path, world__ranks=2, matrix={"steps.count": [5, 1000]})
    run = start(config, "--address", head.address)
    victim = run.pids()[1]
    run.wait_for("case 1/2 count=5: done")
    time.sleep(0.1)
    fault.strike("rank-killed-restart", run)
    os.kill(victim, signal.SIGKILL)
    fault.noticed("rank 1 .* died .*: it printed no cause; its log: .*; starting the gang again", seconds=10)
    assert fault.seconds < 3.0  # noticed, its log read, every process ended
    fault.recovered(60)
    said = re.search(r"generation 1: all ranks have done a step (\d+\.\d) s after the loss", run.stderr())
    assert said and fault.recovered_after is not None and fault.noticed_after is not None
    assert fault.noticed_after < float(said[1]) + 0.1 and float(said[1]) <= fault.recovered_after
    assert fault.ended(90) == 0, run.stderr()
    lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    assert {(line["case"], line["generation"]) for line in lines} == {("count=5", 0), ("count=1000", 1)}
    first, second = summary_of(run.out)["generations"]
    assert (first["cause"], first["culprit"]) == ("RankDied", 1) and second["cause"] == "done"


def test_a_crash_with_no_restart_left_exits_4_and_names_signal_and_log(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    config = configs.write(tmp_path, world__ranks=2, world__restarts=0, steps__count=configs.LONG)
    run = start(config, "--address", head.address, first=CALM)
    victim = run.pids()[1]
    fault.strike("rank-crashed", run)
    os.kill(victim, signal.SIGSEGV)
    assert fault.ended(10) == 4
    pattern = rf"rank 1 \(pid {victim}\) died in `(?:run|poll)`: Segmentation fault; its log: (\S+)$"
    match = re.search(pattern, run.last_line())
    assert match is not None, run.last_line()
    assert str(victim) in match[1] and Path(match[1]).is_file()


@pytest.mark.parametrize(
    ("ranks", "stopped", "name"),
    [
        pytest.param(1, 0, "rank-alone-stopped", marks=pytest.mark.thorough),
        (2, 0, "rank-stopped"),
        pytest.param(3, 1, "rank-stopped", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_stops_answering_is_named_and_ends_the_run(
    start: Start, head: Head, tmp_path: Path, fault: Fault, ranks: int, stopped: int, name: str
) -> None:
    """None, one or two other ranks wait for it."""
    run = start(
        configs.write(tmp_path, world__ranks=ranks, steps__count=configs.LONG), "--address", head.address, first=CALM
    )
    run.wait_for(r"case 1/1 default: step")
    fault.strike(name, run)
    os.kill(run.pids()[stopped], signal.SIGSTOP)
    assert fault.ended(20) == 5, run.stderr()
    assert fault.line is not None and fault.line["seconds"] < 2 + 10  # wait_timeout_s + 10
    assert fault.line["processes_left"] == 0, "a stopped rank holds its GPU"
    assert f"rank {stopped}" in run.last_line()
    generations = summary_of(run.out)["generations"]
    assert len(generations) == 1 and generations[0]["culprit"] == stopped


@pytest.mark.thorough
def test_the_ranks_of_all_domains_and_the_summary_name_the_same_culprit(
    start: Start, head: Head, tmp_path: Path
) -> None:
    """Rank 0 waits for rank 2 of the other domain, which waits for rank 3."""
    config = configs.write(tmp_path, world__ranks=4, world__domain=2, shape__experts=8, steps__count=configs.LONG)
    run = start(config, "--address", head.address, first=CALM)
    run.wait_for(r"case 1/1 default: step")
    pids = run.pids()
    os.kill(pids[3], signal.SIGSTOP)
    assert run.end(20) == 5, run.stderr()
    assert summary_of(run.out)["generations"][0]["culprit"] == 3
    for rank in range(3):
        (log,) = head.folder.glob(f"session_latest/logs/worker-*-{pids[rank]}.out")
        (said,) = re.findall(r"failed: (.*)", log.read_text())
        assert re.search(r"waited 2\.\d s for rank 3 |was waiting because of rank 3", said), said


class FaultyDriver(Driver):
    """A driver that calls a function with rank 1's pid just before an action."""

    before: tuple[sv.Action, Callable[[int], None]] | None = None
    generation = 0

    def _act(self, action: sv.Action) -> None:
        if self.before is not None and action is self.before[0] and self.state.generation == self.generation:
            assert self.gang is not None
            self.before[1](self.gang.locations[1].process[0])
        super()._act(action)


def drive(head: Head, config: str, prepare: Callable[[FaultyDriver], None]) -> tuple[RunOutcome, list[Message]]:
    received: list[Message] = []
    driver = FaultyDriver(
        DriverSettings(load_job(config), f"test-{time.monotonic_ns()}", head.address), received.append, lambda: None
    )
    prepare(driver)
    try:
        return driver.run(), received
    finally:
        ray.shutdown()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("action", [sv.Action.WIRE, sv.Action.RUN])
def test_a_rank_killed_during_wire_or_run_costs_one_restart(head: Head, tmp_path: Path, action: sv.Action) -> None:
    def prepare(driver: FaultyDriver) -> None:
        driver.before = (action, lambda pid: os.kill(pid, signal.SIGKILL))

    outcome, received = drive(head, configs.write(tmp_path), prepare)
    assert outcome.exit_code == 0
    ended = [item for item in received if isinstance(item, GenerationEnded)]
    assert [(item.cause, item.culprit, item.restarting) for item in ended] == [
        ("RankDied", 1, True),
        ("done", None, False),
    ]
    assert [item.generation for item in received if isinstance(item, Ready)] == (
        [1] if action is sv.Action.WIRE else [0, 1]
    )


class EarlyDeath(Driver):
    """A driver whose first generation loses rank 1 before the rank reports its seat."""

    def _act(self, action: sv.Action) -> None:
        super()._act(action)
        if action is sv.Action.START and self.state.generation == 0:
            assert self.gang is not None
            ray.kill(self.gang.actors[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_dies_before_it_reports_its_seat_is_named(
    head: Head, tmp_path: Path, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sv, "ABORT_ANSWER_S", 4.0)  # so that the other ranks report their seats after the death
    config, received = configs.write(tmp_path, world__restarts=restarts), []
    driver = EarlyDeath(
        DriverSettings(load_job(config), f"test-{time.monotonic_ns()}", head.address), received.append, lambda: None
    )
    try:
        outcome = driver.run()
    finally:
        ray.shutdown()
    ended = [(item.cause, item.culprit) for item in received if isinstance(item, GenerationEnded)]
    if restarts:
        assert outcome.exit_code == 0
        assert ended == [("RankDied", 1), ("done", None)]
    else:
        assert (outcome.exit_code, outcome.culprit) == (4, 1)
        assert outcome.message.startswith("rank 1 died in `locate`")
        assert ended == [("RankDied", 1)]


def test_a_dead_rank_stops_the_next_call_in_any_order_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gang needs all seats to number the ranks, whichever rank answers last."""
    answers = {0: Location(0, "n", None, (1, 1)), 1: RayActorError(), 2: Location(2, "n", None, (3, 1))}
    monkeypatch.setattr("raymoe.gang.gang.ray.get", lambda rank: raised(answers[rank]))
    for order in itertools.permutations(answers):
        gang = object.__new__(Gang)
        gang.size, gang.locations, gang.nodes, gang._failed, gang._first_answer = 3, {}, {}, False, None
        gang._calls = {rank: RankCall("locate", rank) for rank in answers}
        events = [event for rank in order for event in gang._on_answer(gang._calls.pop(rank), rank)]
        assert [type(event) for event in events] == [sv.Lost]
        assert events[0].rank == 1


def raised(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_every_case_runs_once_when_a_rank_is_killed_between_cases(head: Head, tmp_path: Path) -> None:
    config = configs.write(tmp_path, matrix={"steps.count": [300, 301, 302]})
    killed: list[str] = []

    def prepare(driver: FaultyDriver) -> None:
        send = driver.send

        def kill_after_first(item: Message) -> None:
            send(item)
            if isinstance(item, CaseDone) and not killed:
                killed.append(item.case)
                assert driver.gang is not None
                os.kill(driver.gang.locations[1].process[0], signal.SIGKILL)

        driver.send = kill_after_first

    outcome, received = drive(head, config, prepare)
    assert outcome.exit_code == 0
    done = [item.case for item in received if isinstance(item, CaseDone)]
    assert done == ["count=300", "count=301", "count=302"], "every case once"


@pytest.mark.thorough
def test_a_rank_stopped_during_wiring_is_named_within_30_s(head: Head, tmp_path: Path) -> None:
    def prepare(driver: FaultyDriver) -> None:
        driver.before = (sv.Action.WIRE, lambda pid: os.kill(pid, signal.SIGSTOP))

    began = time.monotonic()
    outcome, _ = drive(head, configs.write(tmp_path), prepare)
    assert (outcome.exit_code, outcome.culprit) == (5, 1)
    assert time.monotonic() - began < 30


def test_a_poll_answered_after_the_last_poll_is_ignored() -> None:
    """Both polls can be ready at the same time. Taking the finished cases of both would write them twice."""
    gang = object.__new__(Gang)
    gang._polls = {}
    assert gang._on_poll(0, ray.ObjectRef.nil()) == []


@pytest.mark.parametrize(
    ("name", "kind", "code", "message"),
    [
        ("rank-raises", RaisingRank, 1, "^rank 1 raised ValueError: a device was unplugged$"),
        ("rank-wrong-bytes", CorruptingRank, 6, r"step 0 on rank \d has an error of .*, and the bound is 1e-05"),
    ],
)
def test_an_error_of_one_rank_ends_the_run_with_its_code(
    start: Start, head: Head, tmp_path: Path, fault: Fault, name: str, kind: type[Rank], code: int, message: str
) -> None:
    config = configs.write(tmp_path, world__ranks=2)
    run = start(config, "--address", head.address, first=in_driver(faulty_ranks.using(kind)))
    run.pids()
    fault.strike(name, run)
    assert fault.ended(20) == code, run.stderr()
    assert re.search(message, run.last_line())
    assert len(summary_of(run.out)["generations"]) == 1, "no use to try again"
    assert ("Traceback" in run.stderr()) == (code == 1)


@pytest.mark.thorough
def test_a_killed_rank_does_not_touch_another_job_on_the_node(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    other = start(
        configs.write(tmp_path, "other", world__ranks=2, matrix={"steps.count": [5, 2000]}), "--address", head.address
    )
    config = configs.write(tmp_path, world__ranks=2, world__restarts=0, steps__count=configs.LONG)
    run = start(config, "--address", head.address, first=CALM)
    victim = run.pids()[0]
    other.pids()
    fault.strike("two-jobs", run)
    os.kill(victim, signal.SIGKILL)
    assert fault.ended(20) == 4 and f"rank 0 (pid {victim}) died" in run.last_line()
    assert other.end() == 0, other.stderr()
    assert [generation["cause"] for generation in summary_of(other.out)["generations"]] == ["done"]
