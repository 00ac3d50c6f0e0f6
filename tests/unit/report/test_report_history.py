"""A resumed run keeps what each of its generations ran on: environments, numbers, and how they began and ended."""

import io
import json
from pathlib import Path

import pytest

from raymoe import cli
from raymoe.errors import ConfigError
from raymoe.gang.messages import CaseDone, CaseStopped, GenerationEnded, Ready, RunOutcome
from raymoe.report.directory import RunDirectory
from raymoe.report.page import page
from raymoe.report.progress import ProgressBar
from raymoe.report.results import Generation, Record
from raymoe.run import Recorder
from tests.unit.report.lines import exchange_case
from tests.unit.report.test_report_directory import start

CASES = ["backend=host", "backend=collective", "backend=allgather"]


def recorder(directory: RunDirectory, host: str) -> Recorder:
    """Return what a process of `raymoe run` on this host writes with."""
    quiet = ProgressBar(io.StringIO(), 1, quiet=True)
    recording = Recorder(directory, quiet, CASES, facts={"host": host, "commit": f"of {host}"})
    directory.write_environment(recording.facts)
    return recording


def ready(number: int) -> Ready:
    return Ready(number, 1.5, ({"rank": 0, "pid": 100 + number},))


def done(number: int, case: str) -> CaseDone:
    measured = [
        {key: value for key, value in line.items() if key not in ("run", "generation", "commit")}
        for line in exchange_case(case.partition("=")[2], 100.0)
    ]
    return CaseDone(case, number, tuple(measured))


def first_process(path: Path) -> None:
    """Lose a rank, start the gang again, finish a case and be stopped."""
    with start(path) as directory:
        recording = recorder(directory, "alpha")
        recording.receive(ready(0))
        recording.receive(GenerationEnded(0, "RankDied", 1, "rank 1 died", restarting=True))
        recording.receive(ready(1))
        recording.receive(done(1, CASES[0]))
        recording.receive(GenerationEnded(1, "stopped", None, "stopped", restarting=False))
        recording.summarise(RunOutcome(143, "stopped by SIGTERM"))


def resumed(path: Path, host: str, number: int, case: str, *, killed: bool = False) -> None:
    with RunDirectory.resume(path) as directory:
        assert directory.first_generation == number
        recording = recorder(directory, host)
        recording.receive(ready(number))
        recording.receive(done(number, case))
        if not killed:
            recording.receive(GenerationEnded(number, "done", None, "done", restarting=False))
            recording.summarise(RunOutcome(0, "done"))


def document(path: Path, name: str) -> dict[str, object]:
    return dict(json.loads((path / name).read_text()))


def test_each_generation_keeps_its_environment_and_lines_name_it(tmp_path):
    first_process(tmp_path / "r")
    resumed(tmp_path / "r", "beta", 2, CASES[1])
    record = Record.read(tmp_path / "r")
    by_case = {line["case"]: (line["generation"], line["commit"]) for line in record.lines}
    assert by_case == {CASES[0]: (1, "of alpha"), CASES[1]: (2, "of beta")}
    for number, host in ((0, "alpha"), (1, "alpha")):
        environment = document(tmp_path / "r", f"environment-{number}.json")
        assert (environment["host"], environment["generation"]) == (host, number)
        assert environment["ranks"] == [{"rank": 0, "pid": 100 + number}]
    last = document(tmp_path / "r", "environment.json")
    assert (last["host"], last["generation"], last["began"]) == ("beta", 2, "resume")
    assert record.generations == (
        Generation(1.5, "RankDied", 1, 0, "start"),
        Generation(1.5, "stopped", None, 1, "restart"),
        Generation(1.5, "done", None, 2, "resume"),
    )


def test_a_killed_process_loses_no_generation(tmp_path):
    """Its summary is gone, because a run that goes on has none; environment.json has the generations before."""
    first_process(tmp_path / "r")
    resumed(tmp_path / "r", "beta", 2, CASES[1], killed=True)
    assert not (tmp_path / "r" / "summary.json").exists()
    resumed(tmp_path / "r", "gamma", 3, CASES[2])
    generations = Record.read(tmp_path / "r").generations
    assert [(one.number, one.began, one.cause) for one in generations] == [
        (0, "start", "RankDied"),
        (1, "restart", "stopped"),
        (2, "resume", "killed"),
        (3, "resume", "done"),
    ]
    assert document(tmp_path / "r", "environment-2.json")["host"] == "beta"


def test_a_run_that_is_killed_before_its_gang_is_ready_again_keeps_all_generations(tmp_path):
    first_process(tmp_path / "r")
    with RunDirectory.resume(tmp_path / "r") as directory:
        recorder(directory, "beta")
    with RunDirectory.resume(tmp_path / "r") as directory:
        assert directory.first_generation == 2
    assert document(tmp_path / "r", "environment-1.json")["host"] == "alpha"


def test_the_page_tells_restarts_from_resumes_and_shows_what_each_ran_on(tmp_path):
    first_process(tmp_path / "r")
    resumed(tmp_path / "r", "beta", 2, CASES[1])
    html = page([Record.read(tmp_path / "r")])
    assert "<dt>restarts</dt><dd>1</dd>" in html and "<dt>resumes</dt><dd>1</dd>" in html
    assert "environment of generation 2" in html
    row = '<td class="r">{}</td><td>{}</td><td class="r">1.5 s</td>'
    assert row.format(1, "restart") in html and row.format(2, "resume") in html
    assert html.count("<td>alpha</td>") == 2 and html.count("<td>beta</td>") == 1
    assert f'<td>{CASES[1]}</td><td>done</td><td class="r">2</td>' in html


def test_a_stopped_case_keeps_its_samples_marked_until_it_is_run_again(tmp_path, capsys):
    with start(tmp_path / "r") as directory:
        recording = recorder(directory, "alpha")
        recording.receive(ready(0))
        recording.receive(done(0, CASES[0]))
        partial = tuple(line | {"stopped": True, "samples": 17} for line in done(0, CASES[1]).lines)
        recording.receive(CaseStopped(0, partial))
        recording.receive(GenerationEnded(0, "stopped", None, "stopped", restarting=False))
        recording.summarise(RunOutcome(143, "stopped by SIGTERM"))
    record = Record.read(tmp_path / "r")
    assert [(line["case"], line["stopped"]) for line in record.lines] == [
        *[(CASES[0], None)] * 3,
        *[(CASES[1], True)] * 3,
    ]
    assert record.summary is not None and record.summary["cases"] == {
        CASES[0]: "done",
        CASES[1]: "not done",
        CASES[2]: "not done",
    }
    assert cli.main(["report", str(tmp_path / "r")]) == 0
    assert "1 finished case" in (text := capsys.readouterr().out) and text.count("after 17") == 3
    resumed(tmp_path / "r", "beta", 1, CASES[1])
    assert [line["stopped"] for line in Record.read(tmp_path / "r").lines] == [None] * 6


def test_samples_of_a_case_that_failed_are_not_kept(tmp_path):
    """Its times may be those of the fault."""
    with start(tmp_path / "r") as directory:
        recording = recorder(directory, "alpha")
        recording.receive(ready(0))
        recording.receive(CaseStopped(0, tuple(line | {"stopped": True} for line in done(0, CASES[1]).lines)))
        recording.summarise(RunOutcome(4, "rank 1 died"))
        assert directory.lines() == []


@pytest.mark.parametrize("damage", [{"earlier": 5}, {"earlier": ["x"]}, {"generation": "../x"}, {"generation": 10**9}])
def test_a_damaged_history_is_refused_with_the_file(tmp_path, damage):
    with start(tmp_path / "r") as directory:
        recorder(directory, "alpha").receive(ready(0))
    path = tmp_path / "r" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ConfigError, match=r"environment\.json is damaged"):
        RunDirectory.resume(tmp_path / "r")
