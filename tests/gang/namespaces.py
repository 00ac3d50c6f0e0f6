"""Pretended machines: namespaces of their own for network, mounts, IPC, processes and host name, joined by a link.

Ray and ranks in them share no memory, no loopback address and no process numbers. They share the kernel, so the boot id
and the clock are one.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gang.conftest import Command
from tests.python_path import python_path

START_S = 60.0  # for a node of Ray, on two busy cores
PORT = 6379
KINDS = ("--net", "--mount", "--ipc", "--pid", "--uts")
FOLDERS = ("/dev/shm", "/tmp/ray")  # those of the machine itself must not be shared


@dataclass(frozen=True)
class Machine:
    """A pretended machine. `init` is its process 1, by its number outside; with it all its processes end."""

    init: int
    number: int
    folder: Path
    processes: list[subprocess.Popen[bytes]]  # that were started on it

    @property
    def address(self) -> str:
        return f"10.78.0.{self.number}"

    def inside(self, *words: str) -> list[str]:
        """Return the command that runs these words on the machine."""
        return ["nsenter", f"--target={self.init}", *KINDS, *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(self.inside(*words), capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, f"{words} on machine {self.number}: {done.stderr}"
        return done.stdout

    def signal(self, pid: int, name: str) -> None:
        """Send a signal to a process, which the machine itself numbers."""
        self.run("kill", f"-{name}", str(pid))

    def end(self) -> None:
        """End all processes of the machine at once, as a loss of power does."""
        os.kill(self.init, signal.SIGKILL)

    def start_ray(self, head: Machine, cpus: int) -> None:
        """Start a node of the cluster of `head`, and wait for it."""
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if self is head
            else [f"--address={head.address}:{PORT}"]
        )
        words = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        words += [*where, f"--num-cpus={cpus}", f"--node-ip-address={self.address}", "--object-store-memory=80000000"]
        log = self.folder / "ray.log"
        with log.open("w") as output:
            command = self.inside(sys.executable, *words)
            self.processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment(self.folder)))
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert self.processes[-1].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Ray and of runs: a lost node is given up after 3 s, and nothing asks for a token."""
    quick = {"PERIOD_MS": "500", "TIMEOUT_MS": "10000", "FAILURE_THRESHOLD": "3"}
    settings = {f"RAY_health_check_{name.lower()}": value for name, value in quick.items()}
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings["RAY_TMPDIR"] = "/tmp"  # in FOLDERS, also where TMPDIR is another
    return {**os.environ, "PYTHONPATH": python_path(), "PATH": tools, "HOME": str(folder), **settings}


@functools.cache
def permitted(*more: str) -> bool:
    """Return whether this user may make namespaces and links between them, and run these commands there."""
    commands = ["mount -t tmpfs none /dev/shm", "ip link add rg0 type veth peer name rg1", *more]
    words = ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", "sh", "-c", " && ".join(commands)]
    try:
        return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(
    not permitted(), reason="namespaces are not permitted here; two Ray nodes of one machine stand in for machines"
)
needs_slow_links = pytest.mark.skipif(
    not permitted("tc qdisc add dev rg0 root tbf rate 1mbit burst 8kb latency 50ms"),
    reason="namespaces, or links of a given speed, are not permitted here",
)
Machines = tuple[Machine, Machine]


@contextmanager
def ray_machines(folder: Path) -> Iterator[Machines]:
    """Make two machines of a Ray cluster with two CPUs each. The first has the head."""
    with two_machines(folder) as (first, second):
        for machine in (first, second):
            machine.start_ray(first, cpus=2)
        yield first, second


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Make two machines with a link, `link0` on both."""
    with ExitStack() as cleanup:
        machines = tuple(_machine(number, folder, cleanup) for number in (1, 2))
        devices = [f"rg{machine.init}" for machine in machines]
        subprocess.run(
            ["ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1]], timeout=10, check=True
        )
        for machine, device in zip(machines, devices, strict=True):
            move = ["ip", "link", "set", device, "netns", str(machine.init), "name", "link0"]
            subprocess.run(move, check=True, timeout=10)
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "link0")
            machine.run("ip", "link", "set", "link0", "up")
            machine.run("ip", "link", "set", "lo", "up")
        first, second = machines
        yield first, second


def _machine(number: int, folder: Path, cleanup: ExitStack) -> Machine:
    mounts = "; ".join(f"mkdir -p {path} && mount -t tmpfs none {path} || exit 1" for path in FOLDERS)
    script = f"{mounts}; hostname machine{number}; echo ready; exec sleep 1000"
    holder = subprocess.Popen(
        ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    )
    inside: list[subprocess.Popen[bytes]] = []
    cleanup.callback(_end, holder, inside)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    (init,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    # Without it the link would go with the machine, and take the other end and its address along.
    inside.append(subprocess.Popen(["nsenter", f"--target={init}", "--net", "sleep", "1000"]))
    own = folder / f"machine{number}"
    own.mkdir()
    return Machine(int(init), number, own, inside)


def _end(holder: subprocess.Popen[str], inside: list[subprocess.Popen[bytes]]) -> None:
    """End a machine, and with its process 1 all others on it."""
    for process in (holder, *inside):
        process.kill()
    for process in (holder, *inside):
        process.wait(timeout=20)


@contextmanager
def run_on(machine: Machine, config: str, folder: Path) -> Iterator[Command]:
    """Run `raymoe run` on the machine that has the head, with its output in a folder."""
    log, out = folder / "stderr", folder / "out"
    words = ["-m", "raymoe", "run", config, "--address", f"{machine.address}:{PORT}", "--out", str(out)]
    with log.open("w") as stderr, (folder / "stdout").open("w") as stdout:
        command = machine.inside(sys.executable, *words)
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=environment(machine.folder))
    try:
        yield Command(process, log, out)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=20)
