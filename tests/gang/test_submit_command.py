"""`raymoe submit`, `attach` and `jobs` against real heads: exit codes, signals, results, with the token and without."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from raymoe.config.submission import JobRequest
from raymoe.gang.follow import output_of
from raymoe.gang.jobs_api import JobsApi
from tests.gang import configs
from tests.gang.conftest import RUN_S, Command, Head, Tool, ray_head
from tests.gang.fault_lines import Fault
from tests.gang.processes import end_session

BIN = Path(sys.executable).parent


def job_file(folder: Path, config: str, **keys: object) -> str:
    """A job whose config is a file in the directory that is uploaded."""
    (folder / "job.yaml").write_text(yaml.safe_dump({"config": config, "runtime_env": {"working_dir": "."}, **keys}))
    return str(folder / "job.yaml")


def unplaceable(folder: Path) -> str:
    """A config that ends with exit code 3, without the start of a rank."""
    folder.mkdir(exist_ok=True)
    return Path(configs.write(folder, "large", world__cpus=64)).name


def log_of(command: Command) -> str:
    return command.out.read_text()


def wait_for_log(command: Command, pattern: str) -> None:
    """Wait until the job's log, which the command prints, holds the pattern."""
    deadline = time.monotonic() + RUN_S
    while not re.search(pattern, log_of(command)):
        assert command.process.poll() is None and time.monotonic() < deadline, log_of(command) + command.stderr()
        time.sleep(0.05)


def job_id(command: Command) -> str:
    return command.wait_for(r"^job (\S+) is submitted to")[1]


def test_a_job_is_run_followed_and_its_results_are_brought_by_a_second_job(
    tool: Tool, head: Head, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    for hidden in (".git", ".venv", "runs"):
        (work / hidden).mkdir(parents=True)
        (work / hidden / "large").write_text("not for the cluster")
    config = configs.write(work, "mine", world__ranks=1)
    job = job_file(work, Path(config).name, set={"steps.count": 3}, metadata={"team": "tests"})

    command = tool("submit", job, "--address", head.dashboard, "--set", "steps.warmup=0")
    assert command.end() == 0, command.stderr() + log_of(command)
    name = job_id(command)
    assert "generation 0: 1 ranks ready" in log_of(command) and "p50 us" in log_of(command)
    run = tmp_path / "runs" / name
    assert command.last_line() == f"results are in {Path('runs') / name}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done" and json.loads((run / "environment.json").read_text())["ray_job"] == name
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["steps"]["count"] == 3 and resolved["steps"]["warmup"] == 0
    assert not (Path(os.environ["HOME"]) / "raymoe_runs").exists(), "this home is not that of the driver"

    api = JobsApi(head.dashboard)
    state = api.state(name)
    assert state.metadata["team"] == "tests" and state.metadata["raymoe_version"]
    assert [reader.status for reader in api.states() if reader.id.startswith(f"{name}-results-")] == ["SUCCEEDED"]
    seen = output_of(api, f"{name}-ls", JobRequest(("ls", "-A"), dict(state.runtime_env)), 60)
    assert "mine.yaml" in seen and not re.search(r"^(\.git|\.venv|runs)$", seen, re.MULTILINE), seen

    listed = tool("jobs", "--address", head.address)  # the head tells the address of its dashboard
    assert listed.end() == 0, listed.stderr()
    assert "-results-" not in log_of(listed)
    assert re.search(rf"^{name}\s+mine.yaml\s+SUCCEEDED\s+2\d\d\d-\S+ \S+\s+\d+ s$", log_of(listed), re.MULTILINE)


@pytest.mark.thorough
def test_a_detached_job_is_attached_to_and_its_own_exit_code_is_returned(
    tool: Tool, head: Head, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    job = job_file(work, unplaceable(work), out=str(tmp_path / "shared" / "{run}"), entrypoint={"cpus": 1})
    command = tool("submit", job, "--address", head.dashboard, "--detach")
    assert command.end() == 0, command.stderr()
    name = log_of(command).strip()
    assert f"raymoe attach {name} --address {head.dashboard}" in command.stderr()

    # RESULTS_S = 0: results that come at all are read from the directory, not by a second job.
    follow = tool(
        "attach",
        name,
        "--out",
        "got",
        env={"RAY_ADDRESS": head.dashboard},
        first="import raymoe.submit as s; s.RESULTS_S = 0",
    )
    assert follow.end() == 3, follow.stderr()
    assert "64 CPU" in log_of(follow)
    assert re.fullmatch(
        rf"job {name} failed with exit code 3: asked for 2 ranks with 64 CPU each.*", follow.last_line()
    )
    for copy in (tmp_path / "got", tmp_path / "shared" / name):
        assert json.loads((copy / "summary.json").read_text())["exit_code"] == 3
    again = tool("attach", name, "--out", "got", "--address", head.dashboard)
    unknown = tool("attach", "nobody", "--address", head.dashboard)
    assert again.end() == 2 and "--out got is not an empty directory" in again.last_line()
    assert unknown.end() == 2 and "does not know this job" in unknown.last_line()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_ctrl_c_stops_a_job_and_twice_or_in_attach_leaves_it(
    tool: Tool, head: Head, tmp_path: Path, fault: Fault
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    config = Path(configs.write(work, "long", world__ranks=1, steps__count=configs.LONG)).name
    command = tool("submit", job_file(work, config), "--address", head.dashboard)
    name = job_id(command)
    wait_for_log(command, "ranks ready")
    command.signal(signal.SIGINT)
    command.wait_for("press Ctrl-C again to leave it running")
    command.signal(signal.SIGINT)
    assert command.end(15) == 130
    again = f"raymoe attach {name} --address {head.dashboard}"
    told = f"left job {name}, which goes on; `{again}` follows it, `{again.replace('attach', 'stop')}` stops it"
    assert command.last_line() == told
    api = JobsApi(head.dashboard)
    assert api.state(name).status == "RUNNING"

    hangs_up = tool("attach", name, "--address", head.dashboard)
    detaches = tool("attach", name, "--address", head.dashboard)
    wait_for_log(hangs_up, "ranks ready")
    hangs_up.signal(signal.SIGHUP)
    assert hangs_up.end(15) == 129 and api.state(name).status == "RUNNING"

    detaches.wait_for("Ctrl-C leaves it running")
    wait_for_log(detaches, "ranks ready")
    detaches.signal(signal.SIGINT)
    assert detaches.end(15) == 130 and detaches.last_line() == told
    printed, listed = (tool(*words, "--address", head.dashboard) for words in (("logs", name), ("jobs",)))
    assert printed.end() == 0 and "ranks ready" in log_of(printed)
    assert listed.end() == 0 and re.search(rf"^{name} .*RUNNING .* case 1/1", log_of(listed), re.MULTILINE)

    other = tool("submit", job_file(work, config), "--address", head.dashboard, "--out", "stopped")
    wait_for_log(other, "ranks ready")
    fault.strike("job-stop", other)
    other.signal(signal.SIGINT)
    assert fault.ended(60, tmp_path / "stopped") == 130, other.stderr()
    stopped = job_id(other)
    assert api.state(stopped).status == "STOPPED" and api.state(name).status == "RUNNING"
    assert other.last_line() == f"stopped by SIGINT; job {stopped} is STOPPED, finished cases are kept"
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["exit_code"] == 143

    stop = tool("stop", name, "--address", head.dashboard)
    assert stop.end() == 0 and stop.last_line().startswith(f"job {name} has ended: STOPPED; "), stop.stderr()
    late = tool("attach", name, "--address", head.dashboard)
    assert late.end() == 143, late.stderr()
    assert late.last_line().startswith(f"job {name} was stopped: stopped by SIGTERM")


@pytest.mark.thorough
def test_a_runtime_env_that_fails_is_exit_3(tool: Tool, head: Head, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("config: quickstart\nruntime_env: {conda: no-such-environment}\n")
    command = tool("submit", "job.yaml", "--address", head.dashboard)
    assert command.end() == 3, command.stderr()
    assert re.match(r"job \S+ did not run \(runtime env setup failure\): ", command.last_line())


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_token_is_sent_where_there_is_one_and_the_printed_line_works_by_hand(
    tool: Tool, tmp_path: Path, guarded: tuple[Head, Path]
) -> None:
    asking, home = guarded
    work = tmp_path / "work"
    job = job_file(work, unplaceable(work))
    refused = tool("submit", job, "--address", asking.dashboard)
    command = tool("submit", job, "--address", asking.dashboard, env={"HOME": str(home)})
    other = {"HOME": str(home), "RAY_ADDRESS": "http://127.0.0.1:1"}
    line = tool("submit", job, "--address", asking.dashboard, "--dry-run", env=other)
    assert refused.end() == 3
    assert re.fullmatch(r"asked for .*, and it asks for a token; put the token of .*", refused.last_line())

    # This job also ends with 3, and the last line has its own sentence.
    assert command.end() == 3, command.stderr()
    assert "failed with exit code 3: asked for 2 ranks with 64 CPU each" in command.last_line()

    assert line.end() == 0
    typed = log_of(line)
    assert typed.count("\n") == 1 and " ray job submit --address " in typed
    environment = {**os.environ, **other, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", typed], capture_output=True, text=True, timeout=RUN_S, env=environment, check=False, cwd="/"
    )
    assert "failed with exit code 3" in done.stdout + done.stderr and "64 CPU each" in done.stdout, done.stderr

    # The printed job is one of raymoe: its results are brought as those of `submit` are.
    name = re.search(r"Job '(\S+)' submitted successfully", done.stdout + done.stderr)
    assert name
    follow = tool("attach", name[1], "--address", asking.dashboard, env={"HOME": str(home)})
    assert follow.end() == 3 and (tmp_path / "runs" / name[1] / "summary.json").exists(), follow.stderr()


HEAD_TYPE = "ray.head.default"  # the type that the provider gives to the head; of another one it would start nodes
AUTOSCALER = {
    "cluster_name": "test",
    "max_workers": 1,
    "provider": {"type": "fake_multinode", "head_node_id": "f" * 51 + "00000"},
    "head_node_type": HEAD_TYPE,
    "available_node_types": {HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}},
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 5,
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands")},
    **{
        f"{kind}_commands": [] for kind in ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    },
    "file_mounts_sync_continuously": False,
}


@contextmanager
def worker_node(head: Head, tmp: Path, cpus: int) -> Iterator[None]:
    """A second Ray node of this machine; its processes are killed at the end."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head.address}", "--block"]
    command += [f"--num-cpus={cpus}", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
    command += ["--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0", "--disable-usage-stats"]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    deadline = time.monotonic() + 240
    for attempt in itertools.count(1):
        log = tmp / f"worker{attempt}.log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            while process.poll() is None and "Ray runtime started" not in log.read_text():
                assert time.monotonic() < deadline, f"no second node:\n{ends_of_logs(head, tmp)}"
                time.sleep(0.1)
            if process.poll() is None:
                yield
                return
        finally:
            process.kill()
            process.wait(timeout=10)
            end_session(process.pid)
        # Ray gives its raylet 30 s to register, which a busy machine may need.


def ends_of_logs(head: Head, tmp: Path) -> str:
    """The last lines of each log of the second node's starts, and of Ray's own on both nodes."""
    logs = [*sorted(tmp.glob("worker*.log")), *sorted(head.folder.glob("session_latest/logs/*"))]
    wanted = [
        log for log in logs if log.is_file() and re.match(r"worker\d|raylet|gcs_server|.*agent|monitor", log.name)
    ]
    return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-12:]) for log in wanted)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_head_without_cpus_drives_a_run_that_waits_for_the_autoscaler(tool: Tool, tmp_path: Path) -> None:
    """No node can hold the ranks until one joins. An autoscaler runs, so the run waits for that."""
    work, scaling = tmp_path / "work", tmp_path / "autoscaler.json"
    work.mkdir()
    scaling.write_text(json.dumps(AUTOSCALER))
    config = Path(configs.write(work, "waits", world__ranks=2, world__placement_timeout_s=300)).name
    env = {"HOME": str(tmp_path), "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with ray_head(tmp_path, cpus=0, env=env, more=[f"--autoscaling-config={scaling}"]) as head:
        command = tool("submit", job_file(work, config), "--address", head.dashboard)
        wait_for_log(command, "no node can hold it, waiting for the autoscaler; free: 0 of 0 CPU on ")
        with worker_node(head, tmp_path, cpus=2):
            assert command.end(200) == 0, log_of(command) + command.stderr()
            run = tmp_path / "runs" / job_id(command)
            facts = json.loads((run / "environment.json").read_text())
            assert len(facts["ranks"]) == 2
            assert len({rank["node"] for rank in facts["ranks"]} - {JobsApi(head.dashboard).state(run.name).node}) == 1
