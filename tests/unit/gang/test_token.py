"""Whether a run sends a token: only to a head that asks for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from raymoe.gang import address
from raymoe.gang.address import needs_token
from tests.python_path import python_path
from tests.unit.config.configs_on_disk import write


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def greet(server: socket.socket) -> None:
    """Answer each connection that says something, as a head does."""
    with suppress(OSError):  # the server is closed
        while True:
            connection, _ = server.accept()
            with connection:
                if connection.recv(64):
                    connection.sendall(bytes(9))


@pytest.fixture
def head(silent: str, server: socket.socket) -> str:
    """Listen at the address of a head."""
    threading.Thread(target=greet, args=(server,), daemon=True).start()
    return silent


@pytest.fixture
def silent(server: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Listen, but say nothing, and give this process a token and no mode."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    monkeypatch.chdir(tmp_path)
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("answer", "needed"), [("print('token')", True), ("pass", False), ("raise OSError", False)])
def test_a_head_is_asked_whether_it_wants_the_token(
    head: str, monkeypatch: pytest.MonkeyPatch, answer: str, needed: bool
) -> None:
    monkeypatch.setattr(address, "ASK", f"import sys; assert sys.argv[1] == {head!r}; {answer}")
    assert needs_token(head) is needed
    assert needs_token(None) is False
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert needs_token(head) is False, "the user has chosen"


def test_a_head_that_says_nothing_is_given_up(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(address, "ASK_S", 0.2)
    assert needs_token(head) is False


def test_a_port_that_says_nothing_is_asked_nothing(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "ASK", "print('token')")
    monkeypatch.setattr(address, "PROBE_S", 0.2)
    began = time.monotonic()
    assert needs_token(silent) is False and time.monotonic() - began < 5


DRIVER_THAT_FAILS = """
import os, sys
from raymoe import cli
from raymoe.errors import ClusterError
from raymoe.gang import address, driver

def fail(*_):
    raise ClusterError(os.environ.get("RAY_AUTH_MODE", ""))

address.ASK, driver.Driver = "print('token')", fail
code = cli.main(["run", *sys.argv[1:], "--quiet"])
assert "RAY_AUTH_MODE" not in os.environ
sys.exit(code)
"""


def in_process(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python. A run kills all children of its process at the end, so it needs one of its own."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_driver_of_a_run_gets_the_mode(head: str, tmp_path: Path) -> None:
    """A driver that stands for Ray's fails with the mode that it sees."""
    config = write(tmp_path, "workload: exchange\nworld: {device: cpu}\n")
    ended = in_process("-c", DRIVER_THAT_FAILS, config, "--address", head)
    assert ended.returncode == 1, ended.stderr
    assert "the driver failed with ClusterError: token" in ended.stderr


def test_a_run_at_an_address_without_a_head_ends_with_3(server: socket.socket, silent: str) -> None:
    server.close()
    ended = in_process("-m", "raymoe", "run", "quickstart", "--address", silent, "--quiet")
    assert ended.returncode == 3 and "nothing answers there" in ended.stderr.splitlines()[-1]
