"""Which server of a run's own Ray the driver calls lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from raymoe.config.job import Job
from raymoe.gang import driver as module
from raymoe.gang.driver import STOPPED_S, Driver, DriverSettings
from raymoe.gang.processes import is_stopped, start_time


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def driver(server: subprocess.Popen[bytes]) -> Driver:
    watching = Driver(
        DriverSettings(Job.model_validate({"name": "test", "workload": "exchange"}), "run", None),
        lambda _: None,
        lambda: None,
    )
    watching.servers = {"raylet": (server.pid, start_time(server.pid))}
    return watching


def stop(driver: Driver) -> None:
    process = driver.servers["raylet"]
    os.kill(process[0], signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not is_stopped(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + seconds)


def test_a_server_that_is_stopped_for_long_is_lost_though_ray_has_not_said_so(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver._lost_server(given_up=False) is None
    stop(driver)
    assert driver._lost_server(given_up=False) is None, "it may go on"
    pid = driver.servers["raylet"][0]
    lost = f"lost the Ray that this run started: its raylet (pid {pid}) is stopped"
    assert driver._lost_server(given_up=True) == lost
    later(monkeypatch, STOPPED_S + 1)
    assert driver._lost_server(given_up=False) == lost


def test_a_server_that_went_on_is_not_lost(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    stop(driver)
    assert driver._lost_server(given_up=False) is None
    process = driver.servers["raylet"]
    os.kill(process[0], signal.SIGCONT)
    deadline = time.monotonic() + 5
    while is_stopped(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    later(monkeypatch, STOPPED_S + 1)
    assert driver._lost_server(given_up=False) is None
    stop(driver)
    assert driver._lost_server(given_up=False) is None, "it was seen running since"


def test_a_server_that_ended_is_lost_at_once(driver: Driver, server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
    assert driver._lost_server(given_up=False) == (
        f"lost the Ray that this run started: its raylet (pid {server.pid}) ended"
    )
