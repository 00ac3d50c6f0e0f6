"""A Ray cluster of several nodes on this machine, in a process of its own, whose nodes tests may kill.

In a process of its own, because Ray ends whichever process holds a client of a GCS that is gone.
`python -m tests.gang.nodes` starts a head without CPUs; each line of stdin adds a node, and the end of stdin ends all.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.gang.processes import end_session
from tests.python_path import python_path
from tests.short_folder import short_base

START_S = 90.0  # for a node, on two busy cores
STORE_BYTES = 80 * 2**20


def main() -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    _tell(cluster.head_node, cluster.address)
    for line in sys.stdin:
        _tell(cluster.add_node(object_store_memory=STORE_BYTES, **json.loads(line)), cluster.address)
    os._exit(0)  # its children end with it


def _tell(node: object, address: str) -> None:
    processes = {name: [info.process.pid for info in infos] for name, infos in node.all_processes.items()}  # type: ignore[attr-defined]
    print(json.dumps({"address": address, "id": node.node_id, "pids": processes}), file=sys.stdout, flush=True)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ClusterNode:
    """A node, its own processes by name, and its GCS address."""

    address: str
    id: str
    pids: dict[str, list[int]]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the raylet and everything that it started: ranks, idle workers, agents."""
        processes = [pid for raylet in self.pids["raylet"] for pid in (raylet, *_below(raylet))]
        for pid in processes:
            with suppress(ProcessLookupError):  # it has ended since it was listed
                os.kill(pid, number)


def _below(root: int) -> list[int]:
    try:
        tasks = [task / "children" for task in Path(f"/proc/{root}/task").iterdir()]
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid for child in children for pid in (child, *_below(child))]


class Nodes:
    """The cluster as a test sees it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._added: list[ClusterNode] = []
        self.head = self._read()
        self.address = self.head.address

    def add(self, cpus: int, **options: object) -> ClusterNode:
        """Add a node, and wait until the head knows it. `options` are those of `Cluster.add_node`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"num_cpus": cpus, **options}) + "\n")
        self._process.stdin.flush()
        self._added.append(self._read())
        return self._added[-1]

    def kill_added(self) -> None:
        """Kill the nodes that `add` has added and that still run, so that no later run is placed on them."""
        while self._added:
            self._added.pop().kill()

    def _read(self) -> ClusterNode:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)  # it holds one line at most
        line = self._process.stdout.readline() if ready else ""
        assert line, f"no node:\n{self._log.read_text()}"
        return ClusterNode(**json.loads(line))


@contextmanager
def cluster(tmp: Path, **environment: str) -> Iterator[Nodes]:
    """Start a head without CPUs. `environment` holds settings of Ray for all nodes."""
    folder, log = Path(tempfile.mkdtemp(prefix="raymoe-", dir=short_base(24))), tmp / "cluster.log"
    variables = {**os.environ, "PYTHONPATH": python_path(), "RAY_TMPDIR": str(folder), "HOME": str(tmp)} | environment
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gang.nodes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
            start_new_session=True,
        )
    try:
        yield Nodes(process, log)
    finally:
        process.kill()
        process.communicate(timeout=10)
        end_session(process.pid)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
