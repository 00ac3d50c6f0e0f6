"""Two pretended machines with a link: right results, and faults of ranks, link and machine, by `raymoe run`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command
from tests.gang.namespaces import Machine, environment, run_on, two_machines
from tests.gang.test_domains import ROUTINGS, four_ranks, ranks_of, results

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("nothing_left")]

Machines = tuple[Machine, Machine]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines of a Ray cluster with two CPUs each; the first has the head."""
    with two_machines(tmp_path) as (first, second):
        for machine in (first, second):
            machine.start_ray(first, cpus=2)
        yield first, second


def ranks_by_machine(run: Command) -> list[int]:
    """Return the number of each rank's machine: ranks 0 and 1 are on one, 2 and 3 on the other."""
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    numbers = [int(rank["address"].rpartition(".")[2]) for rank in ranks]
    assert numbers in ([1, 1, 2, 2], [2, 2, 1, 1])
    return numbers


def last_generation(run: Command) -> dict[str, object]:
    return json.loads((run.out / "summary.json").read_text())["generations"][-1]


def test_every_routing_is_right_and_a_killed_rank_costs_a_generation(machines: Machines, tmp_path: Path) -> None:
    config = four_ranks(tmp_path, matrix=ROUTINGS | {"exchange.backend": ["host", "collective"]})
    with run_on(machines[0], machines[0], config) as run:
        pids = run.pids()
        run.wait_for("case 1/12 .*: done")
        machines[ranks_by_machine(run)[3] - 1].signal(pids[3], "KILL")
        run.wait_for(rf"^generation 0: rank 3 \(pid {pids[3]}\) died .*; starting the gang again$", seconds=20)
        assert run.end(150) == 0, run.stderr()
        lines = results(run)
    assert len(lines) == 12 * 3 and {line["generation"] for line in lines} == {0, 1}
    assert all(line["verified"] is True and line["domains"] == 2 for line in lines)


def test_a_rank_that_stops_on_the_other_machine_is_named(machines: Machines, tmp_path: Path) -> None:
    with run_on(machines[0], machines[0], four_ranks(tmp_path, steps__count=configs.LONG)) as run:
        pids = run.pids()
        run.wait_for("case 1/1 default: step")
        machines[ranks_by_machine(run)[3] - 1].signal(pids[3], "STOP")
        began = time.monotonic()
        assert run.end(40) == 5, run.stderr()
    assert time.monotonic() - began < 5 + 15  # wait_timeout_s, and the end of the ranks
    assert last_generation(run) == last_generation(run) | {"cause": "PeerTimeout", "culprit": 3}
    assert "the culprit is rank 3" in run.last_line()


@pytest.mark.parametrize("fault", ["link down", "machine lost"])
def test_a_machine_that_is_cut_off_or_lost_is_named(machines: Machines, tmp_path: Path, fault: str) -> None:
    config = four_ranks(tmp_path, steps__count=configs.LONG, world__restarts=0)
    with run_on(machines[0], machines[0], config) as run:
        run.pids()
        run.wait_for("case 1/1 default: step")
        node = ranks_of(run)[ranks_by_machine(run).index(2)][1]
        if fault == "link down":
            machines[1].run("ip", "link", "set", "link0", "down")
        else:
            machines[1].end()
        began = time.monotonic()
        assert run.end(60) == 4, run.stderr()
    assert time.monotonic() - began < 5 + 20  # wait_timeout_s, probes of the node, and the end of the ranks
    assert re.search(rf"with node {node[:12]} \(10\.78\.0\.2\), whose raylet is gone", run.last_line()), run.last_line()
    assert last_generation(run)["cause"] == "NodeLost"


def test_over_a_shaped_link_a_rail_is_faster_than_a_flat_all_to_all(tmp_path: Path) -> None:
    """A token of top-4 needs 1.5 of the two ranks on the other machine, and its row crosses the rail once."""
    with two_machines(tmp_path) as machines, ExitStack() as cleanup:
        for machine in machines:
            limit = ["rate", "100mbit", "burst", "64kb", "latency", "2000ms"]
            machine.run("tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limit)
        ranks = []
        for rank in range(4):
            machine = machines[rank // 2]
            words = machine.inside(sys.executable, "-m", "tests.gang.flat_exchange", str(rank), str(tmp_path / "store"))
            own = environment(tmp_path) | {"GLOO_SOCKET_IFNAME": "link0"}
            output = cleanup.enter_context((tmp_path / f"rank{rank}").open("w+"))
            ranks.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=own))
            cleanup.callback(ranks[-1].kill)
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=100) == 0, (tmp_path / f"rank{rank}").read_text()
    times = json.loads((tmp_path / "rank0").read_text().splitlines()[-1])
    for topk in ("4", "8"):
        assert times[topk]["rail"] < times[topk]["flat"], times
