"""Faults that take long: Ray's own time limits, memory, disks, every phase, many kills. `make soak` runs them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.gang.rank import SILENT_S
from tests.gang import configs, faulty_ranks, phases
from tests.gang.conftest import Command, Head, Start, in_driver, ray_head
from tests.gang.fault_lines import Fault
from tests.gang.nodes import Nodes, cluster
from tests.gang.processes import alive_after, descendants
from tests.short_folder import short_base

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left")]

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]


def summary_of(run: Command) -> dict[str, object]:
    return json.loads((run.out / "summary.json").read_text())


def causes(run: Command) -> list[str]:
    return [generation["cause"] for generation in summary_of(run)["generations"]]  # type: ignore[attr-defined]


def in_steps(folder: Path, start: Start, *arguments: str, **changes: object) -> Command:
    """A run of two ranks in its steps."""
    run = start(configs.write(folder, world__ranks=2, steps__count=configs.LONG, **changes), *arguments)
    run.wait_for(r"case 1/1 default: step")
    return run


# Every signal in every phase.


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("phase", phases.PHASES)
def test_a_signal_in_any_phase_stops_the_run_within_5_s(
    start: Start, head: Head, tmp_path: Path, fault: Fault, phase: str, number: signal.Signals
) -> None:
    """A rank is killed to enter `ending` and `clearing`; without the signal the gang would start again."""
    note, lose_rank = tmp_path / "struck", phase in ("ending", "clearing")
    config = configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG)
    run = start(config, "--address", head.address, first=phases.first(phase, number, note))
    if lose_rank:
        os.kill(run.pids()[1], signal.SIGKILL)
    fault.strike("soak-signals", run)
    run.end(60)
    phases.since(note, fault)
    assert fault.ended(60) == 128 + number, run.stderr()
    assert fault.line is not None and fault.line["seconds"] < 5.0 and fault.line["processes_left"] == 0, fault.line
    assert run.last_line() == f"stopped by {number.name}; finished cases are kept"
    assert (summary_of(run)["status"], summary_of(run)["exit_code"]) == ("stopped", 128 + number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_after_the_last_case_takes_no_success_back(
    start: Start, head: Head, tmp_path: Path, number: signal.Signals
) -> None:
    first = phases.first("clearing", number, tmp_path / "struck")
    run = start(configs.write(tmp_path, world__ranks=2), "--address", head.address, first=first)
    assert run.end(60) == 0, run.stderr()
    assert (tmp_path / "struck").exists() and summary_of(run)["status"] == "done"


# Ray's own time limits.


@pytest.fixture
def nodes(tmp_path: Path, nothing_left: None) -> Iterator[Nodes]:
    """A head without CPUs and with Ray's own settings; its nodes end with it."""
    with cluster(tmp_path) as it:
        yield it
        it.kill_added()


def test_a_gcs_of_a_cluster_that_is_killed_is_exit_3(start: Start, nodes: Nodes, tmp_path: Path, fault: Fault) -> None:
    nodes.add(cpus=2)
    run = in_steps(tmp_path, start, "--address", nodes.address)
    fault.strike("soak-cluster-gcs-killed", run)
    os.kill(nodes.head.pids["gcs_server"][0], signal.SIGKILL)
    assert fault.ended(120) == 3, run.stderr()
    assert run.last_line().startswith("lost the Ray cluster: its GCS ended")
    assert fault.line is not None and fault.line["seconds"] < 75


def test_a_run_in_its_steps_does_not_need_the_gcs_of_its_cluster(
    start: Start, nodes: Nodes, tmp_path: Path, fault: Fault
) -> None:
    nodes.add(cpus=2)
    config = configs.write(tmp_path, world__ranks=2, matrix={"steps.count": [100, 5000]})
    run = start(config, "--address", nodes.address)
    run.wait_for("case 1/2 count=100: done")
    fault.strike("soak-cluster-gcs-stopped", run)
    os.kill(nodes.head.pids["gcs_server"][0], signal.SIGSTOP)
    run.end(120)
    assert alive_after(SILENT_S + 10, fault.processes) == [], "ranks on another node end without its help"
    assert fault.ended(1) == 0, run.stderr()
    os.kill(nodes.head.pids["gcs_server"][0], signal.SIGCONT)
    assert set(summary_of(run)["cases"].values()) == {"done"}  # type: ignore[attr-defined]


def test_a_driver_that_is_stopped_is_named_after_30_s(start: Start, head: Head, tmp_path: Path, fault: Fault) -> None:
    run = in_steps(tmp_path, start, "--address", head.address)
    driver = min(descendants(run.process.pid))
    fault.strike("soak-driver-stopped", run)
    os.kill(driver, signal.SIGSTOP)
    assert fault.ended(60) == 5, run.stderr()
    assert run.last_line() == f"the driver process (pid {driver}) is stopped and said nothing for 30 s"
    assert fault.line is not None and fault.line["processes_left"] == 0


def test_a_gcs_of_the_runs_own_ray_that_is_stopped_is_named_after_30_s(
    start: Start, tmp_path: Path, fault: Fault
) -> None:
    run = start(configs.write(tmp_path, world__ranks=2))
    run.wait_for("placing ranks")
    [pid] = [pid for pid, name in descendants(run.process.pid).items() if name == "gcs_server"]
    fault.strike("soak-own-gcs-stopped", run)
    os.kill(pid, signal.SIGSTOP)
    assert fault.ended(90) == 3, run.stderr()
    assert run.last_line().startswith(f"lost the Ray that this run started: its gcs_server (pid {pid}) is stopped")


def test_ranks_go_on_on_another_node_once_ray_gives_the_first_one_up(
    start: Start, nodes: Nodes, tmp_path: Path, fault: Fault
) -> None:
    added = [nodes.add(cpus=2), nodes.add(cpus=2)]
    config = configs.write(tmp_path, world__ranks=2, world__cpus=1, matrix={"steps.count": [5, 1000]})
    run = start(config, "--address", nodes.address)
    run.wait_for("case 1/2 count=5: done")
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    first, second = sorted(added, key=lambda node: node.id != ranks[0]["node"])
    fault.strike("soak-node-killed", run)
    first.kill()
    run.wait_for("^generation 1: 2 ranks ready", 90)
    fault.noticed_after = fault.seconds
    fault.recovered(90)
    assert fault.ended(90) == 0, run.stderr()
    assert causes(run) == ["NodeLost", "done"]
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    assert {rank["node"] for rank in ranks} == {second.id}


def test_a_node_that_is_frozen_is_exit_5(start: Start, nodes: Nodes, tmp_path: Path, fault: Fault) -> None:
    node = nodes.add(cpus=2)
    run = in_steps(tmp_path, start, "--address", nodes.address)
    fault.strike("soak-node-stopped", run)
    node.kill(signal.SIGSTOP)
    run.end(120)
    fault.noticed_after = fault.seconds
    assert "has not answered" in run.last_line()
    node.kill(signal.SIGCONT)
    assert fault.ended(1) == 5, run.stderr()
    assert fault.line is not None and fault.line["processes_left"] == 0, "ranks end when their node wakes up"


# Memory and disks.


def test_a_rank_that_uses_up_the_memory_of_its_node_is_named(start: Start, tmp_path: Path, fault: Fault) -> None:
    """Ray's memory monitor ends it at the threshold, 3 GiB above what is in use now."""
    memory = {name: int(value.split()[0]) for name, value in _meminfo()}
    threshold = 1 - (memory["MemAvailable"] - 3 * 2**20) / memory["MemTotal"]
    env = {
        "HOME": str(tmp_path),
        "RAY_memory_usage_threshold": f"{threshold:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    program = in_driver(faulty_ranks.using(faulty_ranks.HungryRank))
    config = configs.write(tmp_path, world__ranks=2, world__restarts=0, world__wait_timeout_s=60)
    with ray_head(tmp_path, env=env) as head:
        run = start(config, "--address", head.address, first=program)
        run.pids()
        fault.strike("soak-out-of-memory", run)
        assert fault.ended(60) == 4, run.stderr()
    assert "Ray ended it because node " in run.last_line() and "ran low on memory" in run.last_line()
    assert causes(run) == ["RankDied"] and fault.line is not None and fault.line["processes_left"] == 0


def _meminfo() -> list[list[str]]:
    return [line.split(":") for line in Path("/proc/meminfo").read_text().splitlines()]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size; skips the test where this user may not mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount: {mounted.stderr.strip()}; tests/gang/test_output_faults.py has a limit")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_without_room_for_the_summary_is_exit_8(start: Start, head: Head, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "64k") as disk:
        config = configs.write(tmp_path, world__ranks=1, matrix={"steps.count": list(range(2, 40))})
        run = start(config, "--address", head.address, out=disk / "run")
        run.wait_for("case 1/38 count=2: done")
        fault.strike("soak-disk-full", run)
        (disk / "filler").write_bytes(b"x" * 2**14)
        assert fault.ended(60) == 8, run.stderr()
        assert run.last_line().startswith(f"cannot write {disk}/run/results.jsonl: No space left on device; make room")
        lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
        assert lines and lines[0]["case"] == "count=2"

        (disk / "filler").unlink()
        again = start("--resume", str(disk / "run"), "--address", head.address)
        again.wait_for(r"^case \d+/38 .*: done")
        assert again.end(60) == 8, again.stderr()
        after = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
        assert after[: len(lines)] == lines and len(after) > len(lines), "it goes on where it stopped"


def test_a_run_goes_on_when_the_disk_of_its_ray_is_full(start: Start, tmp_path: Path, fault: Fault) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="rm-", dir=short_base(11)) as folder,
        small_disk(Path(folder), "80m") as disk,
    ):
        config = configs.write(tmp_path, world__ranks=2, matrix={"steps.count": [100, 20_000, 101]})
        run = start(config, env={"RAY_TMPDIR": str(disk)})
        run.wait_for("case 1/3 count=100: done")
        fault.strike("soak-ray-disk-full", run)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 2**12):
                continue
        assert fault.ended(120) == 0, run.stderr()
        assert set(summary_of(run)["cases"].values()) == {"done"}  # type: ignore[attr-defined]


# Many kills, and many processes.


def test_random_kills_of_random_ranks_lose_no_case(start: Start, head: Head, tmp_path: Path, fault: Fault) -> None:
    draw, kills = random.Random(7), 12
    counts = [5000 + number for number in range(8)]
    config = configs.write(tmp_path, world__ranks=2, world__restarts=100, matrix={"steps.count": counts})
    run = start(config, "--address", head.address)
    noticed = []
    for generation in range(kills):
        pids = run.pids(generation)
        time.sleep(draw.uniform(0.0, 2.0))
        fault.strike("soak-random-kills", run)
        os.kill(draw.choice(pids), signal.SIGKILL)
        fault.noticed(rf"^generation {generation}: rank \d .*died.*starting the gang again", seconds=10)
        noticed.append(fault.noticed_after)
    fault.noticed_after = max(noticed)
    assert fault.ended(300) == 0, run.stderr()
    assert fault.noticed_after < 3
    assert causes(run) == ["RankDied"] * kills + ["done"]
    lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    done = [line["case"] for line in lines if line["op"] == "step" or line["op"] == "exchange"]
    assert list(dict.fromkeys(done)) == [f"count={count}" for count in counts]
    assert len({(line["case"], line["op"], line["src"]) for line in lines}) == len(lines), "every case once"


def test_two_jobs_on_a_busy_cluster_do_not_disturb_one_another(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    """Two processes keep both CPUs busy. One job loses a rank and starts again; the other one does not notice."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        matrix = {"steps.count": [50, 2000]}
        runs = [
            start(
                configs.write(tmp_path, name, world__ranks=2, world__wait_timeout_s=20, matrix=matrix),
                "--address",
                head.address,
            )
            for name in ("loses", "other")
        ]
        pids = [run.pids() for run in runs]
        runs[0].wait_for("case 1/2 count=50: done")
        fault.strike("soak-busy-cluster", runs[0])
        os.kill(pids[0][1], signal.SIGKILL)
        fault.noticed("rank 1 .* died .*starting the gang again", seconds=20)
        fault.recovered(120)
        assert fault.ended(120) == 0, runs[0].stderr()
        assert runs[1].end(120) == 0, runs[1].stderr()
    finally:
        for process in spin:
            process.kill()
            process.wait(timeout=10)
    assert [causes(run) for run in runs] == [["RankDied", "done"], ["done"]]
