"""Jobs that run a program, against a real head: exit codes, arguments, uploads, results, logs, stop and signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from raymoe.gang.jobs_api import JobsApi
from tests.gang.conftest import RUN_S, Command, Head, Tool
from tests.gang.test_submit_command import BIN, job_id, log_of, wait_for_log

PROGRAM = """
import json, os, sys, time
from pathlib import Path

import beside
from package import text

out = Path(os.environ["RAYMOE_OUT"])
(out / "result.json").write_text(json.dumps([beside.NAME, text.NAME, os.environ["TEAM"], *sys.argv[1:]]))
(out / ".large").write_text("a checkpoint")
print("step 1/3: begun", flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
print("the last line", flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A project with a program, a module beside it and a package elsewhere."""
    work = tmp_path / "work"
    for name, text in {
        "jobs/go.yaml": "",
        "src/train.py": PROGRAM,
        "src/beside.py": "NAME = 'beside'\n",
        "lib/package/text.py": "NAME = 'uploaded'\n",
        "lib/package/run.py": "import runpy; runpy.run_path('src/train.py', run_name='__main__')\n",
    }.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    return work


def job_of(work: Path, *arguments: str, **keys: object) -> str:
    """Write the job of the program; it is in another folder than the program."""
    env = {"working_dir": "..", "py_modules": ["../lib/package"], "env_vars": {"TEAM": "ours"}}
    program = {"file": "../src/train.py", "arguments": list(arguments)}
    job = {"program": program, "runtime_env": env, **keys}
    (work / "jobs" / "go.yaml").write_text(yaml.safe_dump(job))
    return str(work / "jobs" / "go.yaml")


def result(folder: Path) -> list[str]:
    words: list[str] = json.loads((folder / "result.json").read_text())
    return words


def ended(command: Command, code: int) -> str:
    assert command.end() == code, command.stderr() + log_of(command)
    return command.last_line()


@pytest.mark.thorough
def test_a_program_is_run_with_its_files_and_its_exit_code_and_results_come_back(
    tool: Tool, head: Head, tmp_path: Path, work: Path
) -> None:
    """Exit code 2 is that of argparse. For a config it means that there are no results; a program may have some."""
    command = tool("submit", job_of(work, "2", "{run}", "it's"), "--address", head.dashboard)
    last = ended(command, 2)
    name = job_id(command)
    run = tmp_path / "runs" / name
    assert name.startswith("train-") and last == f"job {name} failed with exit code 2: the last line"
    assert "step 1/3: begun\nthe last line\n" in log_of(command)
    assert result(run) == ["beside", "uploaded", "ours", "2", name, "it's"]
    assert json.loads((run / "environment.json").read_text())["program"][:2] == ["src/train.py", "2"]
    assert not (run / ".large").exists(), "what begins with a dot stays on the cluster"
    state = JobsApi(head.dashboard).state(name)
    assert state.metadata["raymoe_program"] == "../src/train.py" and state.exit_code == 2

    listed = tool("jobs", "--address", head.dashboard)
    ended(listed, 0)
    assert re.search(rf"^{name}\s+../src/train.py\s+FAILED \(2\)\s", log_of(listed), re.MULTILINE)


@pytest.mark.thorough
def test_a_module_goes_on_in_a_directory_that_this_machine_reads(
    tool: Tool, head: Head, tmp_path: Path, work: Path
) -> None:
    """Two jobs with one `out`. The second attaches afterwards, and the typed line of a dry run is the third."""
    shared = tmp_path / "shared"
    job = Path(job_of(work, out=str(shared)))
    keys = yaml.safe_load(job.read_text())
    job.write_text(yaml.safe_dump({**keys, "program": {"module": "package.run", "arguments": ["0", "{out}"]}}))
    env = {"working_dir": "..", "py_modules": ["../lib/package"], "env_vars": {"TEAM": "ours", "PYTHONPATH": "src"}}
    job.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), "runtime_env": env}))
    first = tool("submit", str(job), "--address", head.dashboard, "--out", "first")
    assert ended(first, 0) == "results are in first"
    assert result(tmp_path / "first") == ["beside", "uploaded", "ours", "0", str(shared)]

    detached = tool("submit", str(job), "--address", head.dashboard, "--detach")
    ended(detached, 0)
    name = log_of(detached).strip()
    assert name.startswith("package.run-")
    attached = tool("attach", name, "--address", head.dashboard)
    assert ended(attached, 0) == f"results are in {Path('runs') / name}"
    assert json.loads((shared / "environment.json").read_text())["ray_job"] == name

    line = tool("submit", str(job), "--address", head.dashboard, "--dry-run")
    ended(line, 0)
    typed = f"PATH={BIN}:$PATH {log_of(line)}"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=RUN_S, check=False, cwd="/")
    assert done.returncode == 0 and "the last line" in done.stdout, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_program_is_watched_and_stopped(tool: Tool, head: Head, tmp_path: Path, work: Path) -> None:
    at = ("--address", head.dashboard)
    job = job_of(work, "wait")
    command = tool("submit", job, *at, "--detach")
    ended(command, 0)
    name = log_of(command).strip()
    deadline = time.monotonic() + RUN_S
    while True:
        listed = tool("jobs", *at)
        ended(listed, 0)
        if "step 1/3" in log_of(listed):
            break
        assert time.monotonic() < deadline, log_of(listed)
    assert re.search(rf"^{name} .* RUNNING .*  step 1/3$", log_of(listed), re.MULTILINE)
    printed = tool("logs", name, *at)
    ended(printed, 0)
    assert "step 1/3: begun" in log_of(printed)
    assert ended(tool("stop", name, *at), 0).startswith(f"job {name} has ended: STOPPED; ")
    attached = tool("attach", name, *at, "--out", "stopped")
    assert ended(attached, 143) == f"job {name} was stopped"
    assert result(tmp_path / "stopped")[3:] == ["wait"]

    other = tool("submit", job, *at, "--out", "interrupted")
    wait_for_log(other, "step 1/3")
    other.signal(signal.SIGINT)
    assert ended(other, 130) == f"stopped by SIGINT; job {job_id(other)} is STOPPED"
    assert result(tmp_path / "interrupted")[3:] == ["wait"]


@pytest.mark.thorough
def test_a_directory_of_others_is_refused_before_the_program_starts(
    tool: Tool, head: Head, tmp_path: Path, work: Path
) -> None:
    out = tmp_path / "shared"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    command = tool("submit", job_of(work, "0", out=str(out)), "--address", head.dashboard)
    assert "has files that no program of raymoe wrote; name another place with the key out" in ended(command, 2)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
