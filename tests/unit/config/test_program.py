"""Jobs that run a program: the errors of a wrong one, the request, and the command that becomes the program."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from raymoe import __version__, cli
from raymoe.config.submission import load_submission, submission_schema
from raymoe.errors import ConfigError
from raymoe.report.directory import RAY_JOB
from tests.python_path import REPOSITORY, python_path

UPLOADED = "runtime_env: {working_dir: ., py_modules: [mine/package]}"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program and a package."""
    for name in ("work/train.py", "work/mine/package/go.py", "work/mine/package/sub/__main__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def problems(text: str, *sets: str) -> list[str]:
    Path("job.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_submission("job.yaml", sets)
    return [str(problem).removeprefix("job.yaml: ") for problem in caught.value.problems]


ONE_OF = "give one of file and module"
LINES = [
    (
        "config: quickstart\nprogram: {file: train.py}",
        "line 2, program: a job has a config or a program, and this one has both, leave one of them out",
    ),
    ("program: train.py", "line 1, program = train.py: a mapping is wanted, found text"),
    ("program: {fle: train.py}", "line 1, program.fle = train.py: unknown key, did you mean 'file'?"),
    (f"program: {{}}\n{UPLOADED}", f"line 1, program: has no file, {ONE_OF}"),
    (f"program: {{file: train.py, module: a}}\n{UPLOADED}", f"line 1, program: has both file and module, {ONE_OF}"),
    (
        "program: {file: train.py, arguments: [--steps, 3]}",
        "line 1, program.arguments.1 = 3: text is wanted, put it in quotes",
    ),
    (
        f"program: {{file: nowhere.py}}\n{UPLOADED}",
        "line 1, program.file = nowhere.py: no such file, looked for nowhere.py",
    ),
    (f"program: {{file: mine}}\n{UPLOADED}", "line 1, program.file = mine: no such file, looked for mine"),
    (
        "program: {file: train.py}",
        "line 1, program.file = train.py: the cluster has no such file, since runtime_env.working_dir names no "
        "directory here, set runtime_env.working_dir to a directory that holds it",
    ),
    (
        "program: {file: train.py}\nruntime_env: {working_dir: 's3://b/x.zip'}",
        "line 1, program.file = train.py: the cluster has no such file, since runtime_env.working_dir names no "
        "directory here, set runtime_env.working_dir to a directory that holds it",
    ),
    (
        f"program: {{file: {Path(__file__)}}}\n{UPLOADED}",
        f"line 2, runtime_env.working_dir = .: does not hold {Path(__file__)}, which is the program, "
        "name a directory above it",
    ),
    (
        "program: {module: train.py}",
        "line 1, program.module = train.py: not the name of a Python module, use file for a path",
    ),
    (
        "program: {module: a b}",
        "line 1, program.module = a b: not the name of a Python module, write it as package.module",
    ),
    (
        f"program: {{module: package.stop}}\n{UPLOADED}",
        "line 1, program.module = package.stop: the directory that is uploaded has no such module, "
        "looked for mine/package/stop.py",
    ),
    (
        f"program: {{module: mine.package}}\n{UPLOADED}",
        "line 1, program.module = mine.package: the directory that is uploaded has no such module, "
        "looked for mine/package.py",
    ),
    (
        f"program: {{file: train.py}}\nset: {{world.ranks: 2}}\n{UPLOADED}",
        "line 2, set: changes keys of a config, and this job runs a program, use program.arguments",
    ),
    (
        f"program: {{file: train.py}}\nout: 's3://bucket/{{run}}'\n{UPLOADED}",
        'line 2, out = "s3://bucket/{run}": is a URL, and a program writes into a directory, '
        "write an absolute path or ~/…",
    ),
]


@pytest.mark.parametrize(("text", "told"), LINES, ids=[text for text, _ in LINES])
def test_each_mistake_is_told_with_line_and_key(text: str, told: str) -> None:
    assert problems(text) == [told]


def test_all_mistakes_are_told_at_once_and_so_is_a_setting_of_the_command_line() -> None:
    told = problems("program: {file: a.py}\nout: here\nruntime_env: {working_dir: .}\ncpus: 1", "steps.count=2")
    assert [line.partition(":")[0] for line in told] == [
        *("line 1, program.file = a.py", "line 2, out = here", "line 4, cpus = 1", "--set steps.count=2"),
    ]
    assert "this job runs a program" in told[3]


def request_of(text: str) -> tuple[tuple[str, ...], dict[str, str], str]:
    Path("jobs").mkdir(exist_ok=True)
    Path("jobs/job.yaml").write_text(text)
    job, request = load_submission("jobs/job.yaml")
    assert job is None
    return request.entrypoint, dict(request.metadata), request.name


def test_a_request_names_the_program_as_the_cluster_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    words, metadata, name = request_of(
        "program: {file: ../train.py, arguments: [--out, '{out}', it's]}\nruntime_env: {working_dir: ..}\n"
        "out: /results/{run}\nmetadata: {team: x}"
    )
    assert words == ("python", "-m", "raymoe.program", "train.py", "--out", "{out}", "it's")
    assert metadata == {
        "job_name": "train",
        "team": "x",
        "raymoe_version": __version__,
        "raymoe_program": "../train.py",
        "raymoe_out": "/results/{run}",
    }
    assert name == "train"
    assert cli.main(["submit", "jobs/job.yaml", "--dry-run", "--address", "http://h:1"]) == 0
    line = shlex.split(capsys.readouterr().out)
    assert tuple(line[line.index("--") + 1 :]) == words
    uploaded = json.loads(line[line.index("--runtime-env-json") + 1])
    assert uploaded["working_dir"] == str(Path.cwd())


@pytest.mark.parametrize("module", ["package.go", "package.sub", "mine.package.go", "installed.there"])
def test_a_module_is_uploaded_or_installed_on_the_cluster(module: str) -> None:
    text = f"program: {{module: {module}}}\nruntime_env: {{working_dir: .., py_modules: [../mine/package]}}"
    assert request_of(text) == (
        ("python", "-m", "raymoe.program", "-m", module),
        {"job_name": module, "raymoe_version": __version__, "raymoe_program": module},
        module,
    )


def test_editors_refuse_what_raymoe_refuses() -> None:
    schema = submission_schema()
    for right in ({"program": {"file": "x", "arguments": ["a"]}}, {"config": "x", "set": {"a": 1}}):
        jsonschema.validate(right, schema)
    both, settings = {"program": {"file": "x"}, "config": "x"}, {"program": {"file": "x"}, "set": {"a": 1}}
    for wrong in (both, settings, {"program": "x"}, {"program": {"fle": "x"}}, {"program": {"arguments": [1]}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_jobs_of_the_pages_are_valid(project: Path) -> None:
    def block(page: str, number: int) -> str:
        return (REPOSITORY / "docs" / page).read_text().split("```yaml\n")[number].partition("```")[0]

    packaged = (REPOSITORY / "jobs" / "train.yaml").read_text()
    assert yaml.safe_load(block("training_job.md", 1)) == yaml.safe_load(packaged)
    (project / "my_package").mkdir()
    (project / "job.yaml").write_text(block("submit.md", 2).replace("../my_package", "my_package"))
    words = load_submission("job.yaml")[1].entrypoint
    assert words == ("python", "-m", "raymoe.program", "train.py", "--out", "{out}", "--steps", "24")


# The command on the cluster.

PROGRAM = """
import json, os, sys, time
from pathlib import Path

out = Path(os.environ["RAYMOE_OUT"])
(out / "words.json").write_text(json.dumps([os.getpid(), *sys.argv[1:]]))
if sys.argv[1] == "wait":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


def started(*words: str, out: Path | None = None, job: str = "job/1") -> subprocess.Popen[str]:
    """Start the command as a Ray job of this ID would."""
    metadata = {"job_submission_id": job, **({} if out is None else {"raymoe_out": str(out)})}
    environment = {**os.environ, "PYTHONPATH": python_path(), RAY_JOB: json.dumps({"metadata": metadata})}
    command = [sys.executable, "-m", "raymoe.program", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=60)[1]
    return process.returncode, said.rstrip("\n").rpartition("\n")[2]


def test_it_becomes_the_program_with_its_exit_code_and_a_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(PROGRAM)
    monkeypatch.setenv("HOME", str(project / "home"))
    process = started("train.py", "7", "{out}/x", "{run}", '{"capacity": 1.5}')
    code, said = ended(process)
    out = project / "home" / "raymoe_runs" / "job-1"
    assert code == 7 and said == f"the program's directory for results is {out}"
    assert json.loads((out / "words.json").read_text()) == [
        *(process.pid, "7", f"{out}/x", "job-1", '{"capacity": 1.5}'),
    ]
    facts = json.loads((out / "environment.json").read_text())
    assert facts["ray_job"] == "job/1" and facts["program"][:2] == ["train.py", "7"]


def test_another_job_goes_on_in_the_directory_of_a_program_and_in_no_other(project: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    out = project / "out"
    assert ended(started("train.py", "0", out=out))[0] == 0
    assert ended(started("train.py", "0", out=out, job="second"))[0] == 0
    assert json.loads((out / "environment.json").read_text())["ray_job"] == "second"
    for held, told in (("config.yaml", "holds the results of a run"), ("mine.txt", "has files that no program")):
        other = project / held
        other.mkdir()
        (other / held).touch()
        code, said = ended(started("train.py", "0", out=other))
        assert code == 2 and told in said and "the key out of the job" in said
        assert [path.name for path in other.iterdir()] == [held]


def test_two_programs_do_not_write_into_one_directory(project: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    out = project / "out"
    first = started("train.py", "wait", out=out)
    try:
        deadline = time.monotonic() + 30
        while not (out / "words.json").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        code, said = ended(started("train.py", "0", out=out, job="second"))
        assert code == 2 and f"is being written to by process {first.pid}" in said
        assert json.loads((out / "environment.json").read_text())["ray_job"] == "job/1"
    finally:
        first.send_signal(signal.SIGTERM)
        assert ended(first)[0] == -signal.SIGTERM, "signals are the program's"
    assert ended(started("train.py", "0", out=out, job="third"))[0] == 0


def test_outside_a_job_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAY_JOB, raising=False)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "raymoe.program", "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "submit it by `raymoe submit`" in done.stderr
