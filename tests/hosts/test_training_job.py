"""The job of docs/training_job.md: torchtitan on Ray Train, as the page submits it, with a worker that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gang.conftest import UNSET, Head, ray_head
from tests.hosts.conftest import ROOT, python_of

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
JOB_S = 600.0  # for a job; two idle cores need 60 s
CHECKPOINTS = 8  # steps between them, in examples/torchtitan_on_ray/config_registry.py


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the cluster's user, in which jobs leave what they make."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def head(home: Path) -> Iterator[Head]:
    """A cluster of one node, whose Python has torchtitan and Ray Train, and not raymoe."""
    env = {"HOME": str(home), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": UNSET}
    with ray_head(home, cpus=4, env=env, python=str(python_of("torchtitan"))) as it:
        yield it


def submit(head: Head, folder: Path, job: str) -> subprocess.Popen[bytes]:
    """Submit a job from this environment, which needs no torchtitan. Its log goes to a file beside its results."""
    command = [sys.executable, "-m", "raymoe", "submit", job, "--address", head.dashboard, "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder.parent)}
    with log_of(folder).open("w") as log:
        return subprocess.Popen(command, env=environment, cwd=folder.parent, stdout=log, stderr=log)


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def end(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until a job has ended well; return its log."""
    try:
        code = process.wait(timeout=JOB_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=10)
    log = log_of(folder).read_text()
    assert code == 0, log[-6000:]
    return log


def steps_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    # The last line may be in the making.
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def kill_a_rank_after(checkpoint: int, job: subprocess.Popen[bytes], runs: Path, log: Path) -> int:
    """Kill rank 1 once steps after a checkpoint were reported; return the last reported step."""
    deadline = time.monotonic() + JOB_S
    while True:
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        for folder in runs.glob("*"):
            lines = steps_of(folder)
            if lines and lines[-1]["step"] > checkpoint:
                os.kill(int(lines[-1]["ranks"][1].partition(":")[2]), signal.SIGKILL)
                return int(lines[-1]["step"])
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(head: Head, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a job that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    end(submit(head, folder, "train"), folder)
    for made in (home / "raymoe_runs").iterdir():  # so that the next job finds no other
        made.rename(home / made.name)
    return folder


def test_it_trains_and_tells_the_load_of_each_expert(undisturbed: Path) -> None:
    log = log_of(undisturbed).read_text()
    for layer in (0, 1):
        assert f"raymoe.integrations.torchtitan.dispatcher: model_spec.model.layers.{layer}" in log
    lines = steps_of(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert lines[0]["loss"] - sum(line["loss"] for line in lines[-4:]) / 4 > 1, "it learns"
    for line in lines:
        for load in line["load"]:
            assert len(load) == 64 and sum(load) / 64 == pytest.approx(1, abs=1e-3)
    assert sorted(path.name for path in undisturbed.iterdir()) == [
        *(".copied.json", "environment.json", "load.svg", "loss.svg", "metrics.jsonl"),
    ]


def test_a_killed_worker_changes_no_loss(head: Head, home: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A rank is killed after the first checkpoint. Every step has the loss that it has undisturbed."""
    killed = tmp_path / "killed"
    process = submit(head, killed, "train")
    last = kill_a_rank_after(CHECKPOINTS, process, home / "raymoe_runs", log_of(killed))
    log = end(process, killed)
    lines = steps_of(killed)
    again = [line for line in lines if line["attempt"] == 1]
    begin = again[0]["step"]
    assert begin % CHECKPOINTS == 1 and CHECKPOINTS < begin <= last + 1, "it goes on from the last checkpoint"
    assert [line["step"] for line in again] == list(range(begin, 25))
    assert f"from the checkpoint of step {begin - 1}" in log and re.search(r"attempt 1 ended \(.*rank 1: \w+Error", log)
    whole = steps_of(undisturbed)
    for line in lines:
        wanted = whole[line["step"] - 1]
        assert line["loss"] == pytest.approx(wanted["loss"], abs=1e-5), (line["step"], line["attempt"])
        assert line["load"] == wanted["load"]
    assert "attempt 2" in (killed / "loss.svg").read_text()


def test_another_job_goes_on_where_one_ended(head: Head, tmp_path: Path) -> None:
    """Two jobs with one `out`, the second with more steps. What follows `--` are options of torchtitan."""
    job = yaml.safe_load((ROOT / "jobs" / "train.yaml").read_text())
    env = job["runtime_env"]
    env["working_dir"], env["py_modules"] = str(ROOT), [str(ROOT / "examples" / "torchtitan_on_ray")]
    small = ["--", "--training.seq_len", "32", "--checkpoint.interval", "4"]
    for steps in ("4", "6"):
        job |= {"out": str(tmp_path / "shared"), "runtime_env": env}
        job["program"]["arguments"] = ["--steps", steps, *small]
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        folder = tmp_path / f"steps{steps}"
        log = end(submit(head, folder, str(tmp_path / "job.yaml")), folder)
    assert "from the checkpoint of step 4" in log
    lines = steps_of(folder)
    assert [(line["step"], line["attempt"]) for line in lines] == [
        *((step, 0) for step in (1, 2, 3, 4)),
        (5, 1),
        (6, 1),
    ]
    assert lines[-1]["tokens"] == 6 * 2 * 2 * 32
