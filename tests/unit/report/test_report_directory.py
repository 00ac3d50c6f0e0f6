"""The run directory: its path, refused paths, resume, and the lock."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raymoe.errors import CannotWrite, ConfigError
from raymoe.report.directory import RAY_JOB, RunDirectory
from raymoe.report.results import Generation, Record, Summary
from tests.unit.report.lines import copy_case, exchange_case

CONFIG = {"name": "quick", "world": {"ranks": 4}, "matrix": {"exchange.backend": ["host", "collective"]}, "x": 1e-05}


def start(path: Path | None) -> RunDirectory:
    directory = RunDirectory.create(path, "quick")
    directory.write_config(CONFIG)
    return directory


def test_a_run_writes_config_environment_results_and_summary(tmp_path):
    with start(tmp_path / "a" / "b") as run:
        run.write_environment({"cpu": "x"})
        run.add_case(exchange_case("host", 100.0, run.run))
        run.add_case(exchange_case("collective", 200.0, run.run))
        assert run.finished() == {"backend=host", "backend=collective"}
        run.write_summary(Summary.of(0, "", ["backend=host", "backend=collective"], run.finished(), [Generation(1.0)]))
    assert sorted(path.name for path in run.path.iterdir() if not path.name.startswith(".")) == [
        *("config.yaml", "environment.json", "results.jsonl", "summary.json")
    ]
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == CONFIG
    assert json.loads((run.path / "environment.json").read_text()) == {"cpu": "x"}
    lines = [json.loads(line) for line in (run.path / "results.jsonl").read_text().splitlines()]
    assert lines == run.lines()
    assert [line["op"] for line in lines] == ["dispatch", "combine", "exchange"] * 2
    assert json.loads((run.path / "summary.json").read_text())["status"] == "done"


def test_without_out_the_directory_is_named_after_job_time_and_random_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with start(None) as one, start(None) as two:
        assert one.path != two.path
        assert one.path.parent == tmp_path / "runs"
        assert re.fullmatch(r"quick-\d{8}T\d{6}Z-[a-z]{4}", one.path.name)
        assert one.run == one.path.name
        assert one.notices == []


def test_with_out_the_run_still_has_its_own_name(tmp_path):
    with start(tmp_path / "out") as run:
        assert run.path == tmp_path / "out"
        assert re.fullmatch(r"quick-\d{8}T\d{6}Z-[a-z]{4}", run.run)


def test_a_relative_out_survives_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with start(Path("out")) as run:
        monkeypatch.chdir("/")
        run.write_environment({})
    assert (tmp_path / "out" / "environment.json").exists()


def test_under_a_ray_job_results_go_to_the_home_directory_and_a_notice_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(RAY_JOB, "{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    with start(None) as run:
        assert run.path.parent == tmp_path / "raymoe_runs"
        assert len(run.notices) == 1
        assert str(run.path) in run.notices[0]


def test_under_a_ray_job_a_relative_out_is_refused_with_advice(tmp_path, monkeypatch):
    monkeypatch.setenv(RAY_JOB, "{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--out here/x is relative.*--out /.*/raymoe_runs/x"):
        start(Path("here/x"))
    assert list(tmp_path.iterdir()) == []
    start(tmp_path / "absolute").close()


@pytest.mark.parametrize("name", ["config.yaml", "results.jsonl", "summary.json", "environment.json"])
def test_out_that_holds_results_is_refused(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=rf"already holds {name}.*--resume"):
        start(tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_out_may_exist_and_hold_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    start(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_resume_keeps_finished_cases_name_config_and_generations(tmp_path):
    with start(tmp_path / "r") as first:
        first.write_environment({})
        first.add_case(exchange_case("host", 100.0))
        first.write_summary(Summary.of(4, "rank 1 died", ["a"], [], [Generation(2.0, "rank 1 died", 1)]))
    with RunDirectory.resume(tmp_path / "r") as second:
        assert second.run == first.run
        assert second.read_config() == CONFIG
        assert second.finished() == {"backend=host"}
        assert (second.path / "summary.json").exists()
        second.write_environment({})
        assert not (second.path / "summary.json").exists(), "the summary of a run that goes on must be removed"
        second.add_case(exchange_case("collective", 200.0))
        second.write_summary(Summary.of(0, "", ["a"], ["a"], [Generation(3.0, number=1, began="resume")]))
    record = Record.read(tmp_path / "r")
    assert record.generations == (Generation(2.0, "rank 1 died", 1), Generation(3.0, number=1, began="resume"))
    assert [line["case"] for line in record.lines] == ["backend=host"] * 3 + ["backend=collective"] * 3


def test_add_case_takes_one_new_case(tmp_path):
    with start(tmp_path / "r") as run:
        run.add_case(copy_case())
        with pytest.raises(ValueError, match="already in"):
            run.add_case(copy_case())
        with pytest.raises(ValueError, match="of 2 cases"):
            run.add_case([*exchange_case("a", 1.0), *exchange_case("b", 1.0)])
        with pytest.raises(ValueError, match="0 lines"):
            run.add_case([])
        assert run.finished() == {"default"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, r"no config.yaml that a run wrote"),
        ({"config.yaml": "name: quick\n"}, r"no config.yaml that a run wrote"),
        ({"config.yaml": b"\xff\xfe"}, "it is not text"),
        ({"config.yaml": "# raymoe run a-b\n: ["}, "config.yaml is damaged"),
        ({"config.yaml": "# raymoe run a-b\n- 1\n"}, "holds no mapping"),
        ({"config.yaml": "# raymoe run a-b\na: 1\n", "results.jsonl": "{\n"}, r"results.jsonl, line 1 is damaged"),
        ({"config.yaml": "# raymoe run a-b\na: 1\n", "summary.json": "[]"}, r"summary.json is damaged"),
    ],
)
def test_resume_refuses_a_foreign_directory_and_leaves_it_unchanged(tmp_path, files, reason):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=reason):
        RunDirectory.resume(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_resume_names_the_problem_of_a_wrong_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no such directory"):
        RunDirectory.resume(tmp_path / "none")
    with pytest.raises(ConfigError, match="not a directory"):
        RunDirectory.resume(tmp_path / "file")


HOLD = """
import sys, time
from pathlib import Path
from raymoe.report.directory import RunDirectory
directory = RunDirectory.create(Path(sys.argv[1]), "quick")
directory.write_config({"a": 1})
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_file_of_any_bytes_names_another_process(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff\xfe held")
    with (tmp_path / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"is being written to by .* held; wait for that run"):
            RunDirectory.create(tmp_path, "x")


def test_a_directory_is_locked_while_its_writer_lives(tmp_path):
    path = tmp_path / "r"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match=rf"being written to by process {child.pid} on "):
                RunDirectory.resume(path)
            with pytest.raises(ConfigError, match=rf"being written to by process {child.pid} on "):
                RunDirectory.create(path, "quick")
            assert Record.read(path).config == {"a": 1}, "reading takes no lock"
        finally:
            child.kill()
    with RunDirectory.resume(path) as run:
        assert run.read_config() == {"a": 1}
        assert f"process {os.getpid()} " in (path / ".lock").read_text()


def test_a_file_and_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=r"cannot write .*/file/below: Not a directory; .*--out"):
        start(tmp_path / "file" / "below")
    with pytest.raises(CannotWrite, match=r"cannot write .*/file: it is a file"):
        start(tmp_path / "file")


def test_a_place_where_no_directory_can_be_made_is_refused():
    with pytest.raises(CannotWrite, match=r"cannot write /proc/raymoe-here: "):  # refused to root as well
        start(Path("/proc/raymoe-here"))
