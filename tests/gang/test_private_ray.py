"""The Ray that a run starts for itself, as another user of the machine finds it."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command
from tests.gang.fault_lines import Fault
from tests.gang.processes import descendants
from tests.python_path import python_path
from tests.short_folder import short_base

NOBODY = 65534


@dataclass(frozen=True)
class Running:
    """A run in the middle of its steps."""

    command: Command
    home: Path
    pids: set[int]

    def raylet(self) -> int:
        [pid] = [pid for pid in self.pids if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
        return pid

    def directory(self) -> Path:
        """The directory above that of Ray."""
        words = Path(f"/proc/{self.raylet()}/environ").read_bytes().decode(errors="replace").split("\0")
        [directory] = [word.removeprefix("RAY_TMPDIR=") for word in words if word.startswith("RAY_TMPDIR=")]
        return Path(directory)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Started under umask 022, from a home that others may enter, as homes often are."""
    home = Path(tempfile.mkdtemp(prefix="home-", dir=short_base(24)))
    home.chmod(0o755)
    config = configs.write(home, steps__count=configs.LONG, exchange__backend="collective", world__ranks=2)
    command = [sys.executable, "-m", "raymoe", "run", config, "--out", str(home / "out")]
    environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", "HOME": str(home)}
    with (home / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=environment, cwd=home, umask=0o022)
    started = Command(process, home / "stderr", home / "out")
    try:
        started.wait_for("case 1/1 .*: step")
        yield Running(started, home, {process.pid, *descendants(process.pid)})
    finally:
        process.kill()
        process.wait(timeout=10)
        shutil.rmtree(home)


def sockets_of(pids: set[int]) -> set[str]:
    """The inodes of all sockets of these processes."""
    sockets = set()
    for pid in pids:
        try:
            links = [str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        sockets |= {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    return sockets


def listening(pids: set[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which these processes listen, IPv4 ones within IPv6 as IPv4."""
    inodes, addresses = sockets_of(pids), []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] not in inodes or (table.startswith("tcp") and words[3] != "0A"):
                continue
            text = words[1].partition(":")[0]
            groups = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
            address = ipaddress.ip_address(struct.pack(f"={len(groups)}I", *groups))
            addresses.append(getattr(address, "ipv4_mapped", None) or address)
    return addresses


def as_another_user(attempt: Callable[[], object]) -> str:
    """Make an attempt as another user; returns the name of the error that it met, or what it got."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = f"got {attempt()!r}"
        except BaseException as error:  # noqa: BLE001  the outermost frame of this process
            said = type(error).__name__
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


def test_it_listens_on_the_loopback_address_only(running: Running) -> None:
    addresses = listening(running.pids)
    assert len(addresses) > 5, "Ray's processes and Gloo listen"
    assert [address for address in addresses if not address.is_loopback] == []


def test_its_token_and_its_directory_are_for_this_user_only(running: Running) -> None:
    assert stat.S_IMODE((running.home / ".ray" / "auth_token").stat().st_mode) == 0o600
    directory = running.directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (directory / "ray" / "session_latest" / "sockets").is_dir(), "Ray's files are in it"


def test_its_token_is_in_no_file_of_it_and_in_no_command_line(running: Running) -> None:
    token = (running.home / ".ray" / "auth_token").read_bytes()
    directory = running.directory()
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert [file for file in files if token in file.read_bytes()] == []
    assert [pid for pid in running.pids if token in Path(f"/proc/{pid}/cmdline").read_bytes()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can do")
def test_another_user_gets_nothing_of_it(running: Running) -> None:
    raylet, directory = running.raylet(), running.directory()
    attempts: dict[str, Callable[[], object]] = {
        "read the token": (running.home / ".ray" / "auth_token").read_text,
        "enter the directory": lambda: list(directory.iterdir()),
        "reach a socket": (directory / "ray" / "session_latest" / "sockets").stat,
        "read a log": (directory / "ray" / "session_latest" / "logs" / "raylet.out").read_text,
        "read an environment": Path(f"/proc/{raylet}/environ").read_bytes,
        "open a file of a process": lambda: list(Path(f"/proc/{raylet}/fd").iterdir()),
    }
    assert as_another_user((running.home / "stderr").read_text).startswith("got "), "its home can be entered"
    outcomes = {name: as_another_user(attempt) for name, attempt in attempts.items()}
    assert outcomes == dict.fromkeys(attempts, "PermissionError")


def test_sigterm_ends_it_and_removes_its_directory(running: Running, fault: Fault) -> None:
    """The last test of this file: it ends the run."""
    run, directory = running.command, running.directory()
    fault.strike("sigterm-steps", run)
    run.signal(signal.SIGTERM)
    assert fault.ended(20) == 143, run.stderr()
    assert fault.line is not None and fault.line["seconds"] < 5.0 and fault.line["processes_left"] == 0, fault.line
    assert run.last_line() == "stopped by SIGTERM; finished cases are kept"
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("stopped", 143)
    assert not directory.exists(), "nothing failed, so nobody will read its logs"
