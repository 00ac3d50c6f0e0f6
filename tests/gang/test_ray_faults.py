"""Lose the servers of the run's own Ray, or the driver: each ends in bounded time and names what was lost."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import CALM, CALM_LOCAL, Command, Head, Start
from tests.gang.fault_lines import Fault
from tests.gang.processes import descendants

pytestmark = pytest.mark.usefixtures("nothing_left")

NO_DIRECTORY = """
from raymoe.gang import private_ray
def full(**_):
    raise OSError(28, "No space left on device")
private_ray.tempfile.mkdtemp = full
"""
NO_SPACE = "from raymoe.gang import local_ray; local_ray.NEEDED_BYTES = 2**60"
SILENT_SOON = "from raymoe.gang import main_process; main_process.SILENT_S = 4.0"


def process_of(run: Command, name: str) -> int:
    """The driver, which is the only child of the command, or a server of its Ray."""
    below = descendants(run.process.pid)
    return next(pid for pid, its_name in below.items() if name in ("driver", its_name))


def summary_of(run: Command) -> dict[str, object]:
    return json.loads((run.out / "summary.json").read_text())


KILLED = [("own-raylet-killed", "raylet", signal.SIGKILL), ("own-gcs-killed", "gcs_server", signal.SIGKILL)]
STOPPED = [("own-raylet-stopped", "raylet", signal.SIGSTOP)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("losses", "state", "seconds"),
    [(KILLED, "ended", 10), (STOPPED, "is stopped", 25)],  # Ray gives a stopped raylet up after 3 s
    ids=["killed", "stopped"],
)
def test_the_loss_of_a_server_of_its_own_ray_is_exit_3_and_names_it(
    start: Start, tmp_path: Path, fault: Fault, losses: list[tuple[str, str, int]], state: str, seconds: float
) -> None:
    config = configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG)
    runs = [start(config, first=CALM_LOCAL) for _ in losses]
    for run in runs:
        run.wait_for(r"case 1/1 default: step")
    struck = []
    for run, (name, server, number) in zip(runs, losses, strict=True):
        pid = process_of(run, server)
        struck.append((run, fault.another(), server, pid))
        struck[-1][1].strike(name, run)
        os.kill(pid, number)
    for run, its, server, pid in struck:  # the loss of a raylet is noticed first
        assert its.ended(60) == 3, run.stderr()
        assert its.line is not None and its.line["seconds"] < seconds
        assert run.last_line() == f"lost the Ray that this run started: its {server} (pid {pid}) {state}"
        assert "(raylet)" not in run.stderr(), "Ray's own warnings go to driver.log"
        assert [generation["cause"] for generation in summary_of(run)["generations"]] == ["RayLost"]  # type: ignore[attr-defined]
        logs = re.search(r"^Ray's logs are kept in (\S+/logs)", run.stderr(), re.MULTILINE)
        assert logs and (Path(logs[1]) / f"{server}.out").is_file()


@pytest.mark.thorough
def test_servers_that_stop_when_all_is_done_take_nothing_back(start: Start, tmp_path: Path, fault: Fault) -> None:
    first = """
import os, signal
from pathlib import Path
from raymoe.gang import main_process
run_child = main_process._run_child
def stop_servers():
    for entry in Path("/proc").glob("[0-9]*"):
        name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        if name in ("raylet", "gcs_server") and int(rest.split()[1]) == os.getpid():
            os.kill(int(entry.name), signal.SIGSTOP)
def stopping(work, parent, output):
    def send(message):
        parent.send(message)
        if type(message).__name__ == "Ending":
            stop_servers()
    run_child(lambda _, stopped: work(send, stopped), parent, output)
main_process._run_child = stopping
"""
    run = start(configs.write(tmp_path, world__ranks=2), first=first)
    run.wait_for("case 1/1 default: done")
    fault.strike("own-servers-stopped-done", run)
    assert fault.ended(60) == 0, run.stderr()
    assert summary_of(run)["status"] == "done"


@pytest.mark.thorough
def test_a_gcs_that_stops_while_ranks_are_placed_is_named(start: Start, tmp_path: Path, fault: Fault) -> None:
    run = start(configs.write(tmp_path, world__ranks=2), first=SILENT_SOON)
    run.wait_for("placing ranks")
    pid = process_of(run, "gcs_server")
    fault.strike("own-gcs-stopped", run)
    os.kill(pid, signal.SIGSTOP)
    assert fault.ended(40) == 3, run.stderr()
    said = f"lost the Ray that this run started: its gcs_server (pid {pid}) is stopped, so a call to it did not return"
    assert run.last_line().startswith(said)


@pytest.mark.thorough
def test_a_driver_that_is_stopped_or_killed_takes_its_ranks_along(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    config = configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG)
    stopped = start(config, "--address", head.address, first=SILENT_SOON + CALM)
    killed = start(config, "--address", head.address, first=CALM)
    for run in (stopped, killed):
        run.wait_for(r"case 1/1 default: step")
    driver = process_of(stopped, "driver")
    fault.strike("driver-stopped", stopped)
    os.kill(driver, signal.SIGSTOP)
    killed_driver, other = process_of(killed, "driver"), fault.another()
    other.strike("driver-killed", killed)
    os.kill(killed_driver, signal.SIGKILL)

    assert other.ended(20) == 1, killed.stderr()
    assert other.line is not None and other.line["seconds"] < 10 and other.line["processes_left"] == 0
    assert killed.last_line() == f"the driver process (pid {killed_driver}) was killed by SIGKILL and gave no reason"
    assert [generation["cause"] for generation in summary_of(killed)["generations"]] == ["unknown"]  # type: ignore[attr-defined]
    assert fault.ended(30) == 5, stopped.stderr()
    assert stopped.last_line() == f"the driver process (pid {driver}) is stopped and said nothing for 4 s"
    assert fault.line is not None and fault.line["processes_left"] == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "first", "reason"),
    [
        ("no-ray-space", NO_SPACE, r"has \d+ MiB free of the \d+ it needs"),
        ("no-ray-files", "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 64))", "64 files here of the 256"),
        ("no-ray-directory", NO_DIRECTORY, r"no directory can be made in \S+ \(No space left on device\)"),
    ],
)
def test_a_machine_on_which_ray_cannot_start_is_exit_3_at_once(
    start: Start, tmp_path: Path, fault: Fault, name: str, first: str, reason: str
) -> None:
    run = start(configs.write(tmp_path), first=first)
    fault.strike(name, run)
    assert fault.ended(30) == 3, run.stderr()
    assert run.last_line().startswith("asked for a local Ray, and ") and re.search(reason, run.last_line())
    assert "Traceback" not in run.stderr()
    summary = summary_of(run)
    assert (summary["exit_code"], summary["message"]) == (3, run.last_line())
    assert (run.out / "report.html").exists()


@pytest.mark.thorough
def test_a_ray_whose_processes_do_not_start_is_exit_3(start: Start, tmp_path: Path) -> None:
    first = """
import ray._private.services
def no_server(*_, **__):
    raise Exception("The current node timed out during startup.")
ray._private.services.start_gcs_server = no_server
"""
    run = start(configs.write(tmp_path), first=first)
    assert run.end(30) == 3, run.stderr()
    assert run.last_line().endswith("ray.init failed: The current node timed out during startup.")
