"""Whether a run sends a token: only to a head that asks for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from raymoe import cli
from raymoe.errors import ClusterError
from raymoe.gang import address
from raymoe.gang.address import needs_token
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


def test_the_driver_of_a_run_gets_the_mode(
    head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A driver that stands for Ray's fails with the mode that it sees."""
    monkeypatch.setattr(address, "ASK", "print('token')")
    driver = "raymoe.gang.driver.Driver"
    monkeypatch.setattr(driver, lambda *_: (_ for _ in ()).throw(ClusterError(os.environ.get("RAY_AUTH_MODE", ""))))
    config = write(tmp_path, "workload: exchange\nworld: {device: cpu}\n")
    assert cli.main(["run", config, "--address", head, "--quiet"]) == 1
    assert "the driver failed with ClusterError: token" in capfd.readouterr().err
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_run_at_an_address_without_a_head_ends_with_3(
    server: socket.socket, silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    assert cli.main(["run", "quickstart", "--address", silent, "--quiet"]) == 3
    assert "nothing answers there" in capsys.readouterr().err.splitlines()[-1]
