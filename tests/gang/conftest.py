"""Fixtures of the gang tests: the command in a child with a time limit, a shared Ray head, checks for leftovers."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raymoe.gang.address import ADDRESS_FILE
from raymoe.gang.main_process import end_descendants
from raymoe.gang.private_ray import private_ray
from tests.gang.fault_lines import Fault
from tests.gang.nodes import Nodes, cluster
from tests.gang.processes import commands_of, end_session, ray_processes, shared_memory
from tests.python_path import python_path
from tests.short_folder import short_base
from tests.terminal import TERMINAL

PASSED = pytest.StashKey[bool]()
REPO = Path(__file__).resolve().parents[2]
UNSET = "(not set)"  # as a value in env=: remove the variable
METRICS_EVERY_SECOND = {"RAY_metrics_report_interval_ms": "1000"}
RUN_S = 90.0  # no command of these tests takes longer on two busy cores


@dataclass
class Command:
    """A running `raymoe`: its process, its stderr so far, and its run directory."""

    process: subprocess.Popen[str]
    log: Path
    out: Path
    began: float = field(default_factory=time.monotonic)

    def stderr(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, seconds: float = RUN_S) -> re.Match[str]:
        """Wait until stderr holds the pattern. Fail with the whole stderr if the command ends without it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.stderr(), re.MULTILINE):
                return match
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} did not appear in stderr:\n{self.stderr()}")

    def pids(self, generation: int = 0) -> list[int]:
        """Wait until the generation is ready; return the pids of its ranks."""
        line = self.wait_for(rf"^generation {generation}: .*ready.*$").group()
        return [int(pid) for pid in re.findall(r"pid (\d+)", line)]

    def end(self, seconds: float = RUN_S) -> int:
        """Wait for the command to end; return its exit code."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.stderr()}") from None

    def last_line(self) -> str:
        return self.stderr().rstrip("\n").rpartition("\n")[2]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("quickstart", "--set", …)` runs `raymoe run` in a child, which is killed if it outlives the test.

    `first` is Python that the child runs before the command, to shorten a wait. `streams` replaces stdout or stderr.
    """
    commands: list[Command] = []

    def go(
        *arguments: str,
        env: dict[str, str] | None = None,
        out: Path | None = None,
        first: str = "",
        streams: dict[str, int] | None = None,
    ) -> Command:
        number = len(commands)
        log, directory = tmp_path / f"stderr{number}", out or tmp_path / f"out{number}"
        environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        environment |= env or {}
        environment = {name: value for name, value in environment.items() if value != UNSET}
        program = ["-c", f"{first}\nimport sys, raymoe.cli; sys.exit(raymoe.cli.main())"] if first else ["-m", "raymoe"]
        command = [*TERMINAL, sys.executable, *program, "run", *arguments]
        if "--resume" not in arguments:
            command += ["--out", str(directory)]
        with log.open("w") as stderr, (tmp_path / f"stdout{number}").open("w") as stdout:
            to = {"stdout": stdout, "stderr": stderr} | (streams or {})
            process = subprocess.Popen(command, **to, text=True, env=environment, cwd=tmp_path)  # type: ignore[call-overload]
        commands.append(Command(process, log, directory))
        return commands[-1]

    yield go
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait(timeout=10)


Tool = Callable[..., Command]


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Tool]:
    """`tool("submit", …)` runs that command in a child, with a home that has no token; it is ended afterwards."""
    commands: list[Command] = []
    home = tmp_path / "client"
    home.mkdir()

    def go(*words: str, env: dict[str, str] | None = None, first: str = "pass") -> Command:
        log, out = tmp_path / f"stderr{len(commands)}", tmp_path / f"stdout{len(commands)}"
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "HOME": str(home),
            "RAY_AUTH_MODE": UNSET,
            **(env or {}),
        }
        environment = {name: value for name, value in environment.items() if value != UNSET}
        program = f"{first}; import sys, raymoe.cli; sys.exit(raymoe.cli.main())"
        with log.open("w") as stderr, out.open("w") as stdout:
            process = subprocess.Popen(
                [*TERMINAL, sys.executable, "-c", program, *words],
                stdout=stdout,
                stderr=stderr,
                text=True,
                env=environment,
                cwd=tmp_path,
            )
        commands.append(Command(process, log, out))
        return commands[-1]

    yield go
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait(timeout=10)


IN_DRIVER = """
from raymoe.gang import main_process
run_child = main_process._run_child
def run_child_with_program(work, parent, output):
    def prepared(send, stopped):
        exec({program!r}, {{}})
        return work(send, stopped)
    run_child(prepared, parent, output)
main_process._run_child = run_child_with_program
"""


def in_driver(program: str) -> str:
    """Make a `first` that runs a program in the driver process, before its work."""
    return IN_DRIVER.format(program=program)


_CALM = "from tests.gang import faulty_ranks as f; import raymoe.gang.gang as g; g.RankActor = f.actor(f.CalmRank)"
CALM = in_driver(_CALM)
"""A `first` for runs with steps that only a fault ends: their ranks sleep in each."""

CALM_LOCAL = in_driver(f"import os; from raymoe.gang.local_ray import configure; configure(os.environ); {_CALM}")
"""The same for a run with a Ray of its own, which is configured before Ray is imported."""


def free_port() -> int:
    """Return a port on which nothing listens, above the ports of Ray's workers.

    It is below the ephemeral ports if these begin above 30000. The kernel may give an ephemeral port to any outgoing
    connection before the intended process listens on it.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(20000, max(first_ephemeral, 30000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Head:
    """A Ray head that the tests started, its ports, and the folder of its sessions."""

    address: str
    dashboard: str
    metrics_port: int
    folder: Path


@contextmanager
def ray_head(
    tmp: Path,
    cpus: int = 8,
    gpus: int | None = None,
    env: dict[str, str] | None = None,
    more: Sequence[str] = (),
    python: str = sys.executable,
) -> Iterator[Head]:
    """Run `ray start --head --block` on free ports; at the end kill its session and remove its files.

    Jobs run by the interpreter of the head, which may be that of another environment.
    """
    port, dashboard, metrics = free_port(), free_port(), free_port()
    command = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--dashboard-port={dashboard}", f"--metrics-export-port={metrics}"]
    command += [f"--num-cpus={cpus}", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    command += [] if gpus is None else [f"--num-gpus={gpus}"]
    command += ["--include-dashboard=true", f"--ray-client-server-port={free_port()}"]
    # An agent's ports are fixed by default, so the agent of a second head on the machine could not start.
    command += ["--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0"]
    # The file that tells jobs their cluster's address is also shared by default. Sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="raymoe-", dir=short_base(24)))
    command += [f"--temp-dir={folder}", *more]
    environment = {**os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}", **(env or {})}
    environment = {name: value for name, value in environment.items() if value != UNSET}
    log = tmp / "head.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, f"no head:\n{log.read_text()}"
            time.sleep(0.1)
        yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", metrics, folder)
    finally:
        process.terminate()
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        end_session(process.pid)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """One head for every test that does not end it. Its home holds no auth token, so it asks for none.

    It exports metrics every second, not every 10 s; so does a driver with the same variable.
    """
    folder = tmp_path_factory.mktemp("head")
    with ray_head(folder, env={"HOME": str(folder), **METRICS_EVERY_SECOND}) as it:
        yield it


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Head, Path]]:
    """A head that asks for a token, and the home that has it, as a local run makes it."""
    folder, before = tmp_path_factory.mktemp("guarded"), os.environ["HOME"]
    os.environ["HOME"] = str(folder)
    with private_ray({}):
        os.environ["HOME"] = before
    env = {"HOME": str(folder), "RAY_AUTH_MODE": UNSET, **METRICS_EVERY_SECOND}
    with ray_head(folder, env=env) as it:
        yield it, folder


QUICK = {  # the head gives a killed node up after 3 s, not after 14; a node that is slow may take 10 s to answer
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(scope="package")
def head_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head without CPUs."""
    with cluster(tmp_path_factory.mktemp("cluster"), **QUICK) as it:
        yield it


@pytest.fixture
def nodes(head_of_nodes: Nodes, nothing_left: None) -> Iterator[Nodes]:
    """The head, to which a test adds nodes. They are killed at its end, before its leftovers are counted."""
    yield head_of_nodes
    head_of_nodes.kill_added()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note on the item whether its test passed."""
    outcome = yield
    if call.when == "call":
        item.stash[PASSED] = outcome.get_result().passed  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that measure a fault."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "fault" in getattr(item, "fixturenames", ()):
            item.add_marker("fault")


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """Measures the fault of a test, and writes its line if the test passed."""
    it = Fault()
    yield it
    if request.node.stash.get(PASSED, False):
        it.write()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if a process that the test started, or shared memory, still exists 1 s after the test."""
    before, shared = ray_processes(), shared_memory()
    yield
    deadline = time.monotonic() + 1.0
    while (left := ray_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind:\n{commands_of(left)}"
    while (names := shared_memory() - shared) and time.monotonic() < deadline:  # another test may be making them
        time.sleep(0.05)
    assert not names


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set HOME to a temporary folder: a local Ray writes an auth token there."""
    before = os.environ["HOME"]
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    end_descendants(5.0)
    os.environ["HOME"] = before


@contextmanager
def address_file(address: str) -> Iterator[None]:
    """Write this address to the file in which `ray start --head` leaves its own; restore the file at the end."""
    before = ADDRESS_FILE.read_text() if ADDRESS_FILE.exists() else None
    ADDRESS_FILE.parent.mkdir(parents=True, exist_ok=True)
    ADDRESS_FILE.write_text(address)
    try:
        yield
    finally:
        if before is None:
            ADDRESS_FILE.unlink(missing_ok=True)
        else:
            ADDRESS_FILE.write_text(before)


@pytest.fixture
def stale_address_file() -> Iterator[None]:
    """The address file of a head that has ended, as a killed `ray start --head` leaves it."""
    with address_file(f"127.0.0.1:{free_port()}"):
        yield


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])
