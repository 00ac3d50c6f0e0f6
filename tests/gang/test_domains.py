"""Ranks in several domains by `raymoe run`: each on a machine of its own, on a Ray node, or pretended on one node.

Two machines are pretended by namespaces. Where these are not permitted, two Ray nodes of this machine take their place.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command, Head, Start
from tests.gang.namespaces import (
    Machines,
    environment,
    needs_namespaces,
    needs_slow_links,
    permitted,
    ray_machines,
    run_on,
    two_machines,
)
from tests.gang.nodes import Nodes

pytestmark = pytest.mark.usefixtures("nothing_left")

LOST_S = 5 + 20  # wait_timeout_s, probes of the node, and the end of the ranks
ROUTINGS = {"routing.kind": ["uniform", "zipf", "hot"]}


def stands_in(test: Callable[..., None]) -> Callable[..., None]:
    """Leave a test to `make soak` where the tests of two machines can run."""
    return pytest.mark.soak(test) if permitted() else test


def four_ranks(folder: Path, **changes: object) -> str:
    """A job whose four ranks take a CPU each, with ragged tokens and masked ids."""
    keys: dict[str, object] = {
        "world__ranks": 4,
        "world__cpus": 1,
        "world__wait_timeout_s": 5,
        "shape__experts": 12,
        "routing": {"ragged": True, "masked": 0.1},
    }
    return configs.write(folder, **(keys | changes))


def results(run: Command) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]


def ranks_of(run: Command) -> list[tuple[int, str]]:
    """Return the domain and the node of each rank of the last generation."""
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    return [(rank["domain"], rank["node"]) for rank in ranks]


def ranks_by_machine(run: Command) -> list[int]:
    """Return the number of each rank's machine: ranks 0 and 1 are on one, 2 and 3 on the other."""
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    numbers = [int(rank["address"].rpartition(".")[2]) for rank in ranks]
    assert numbers in ([1, 1, 2, 2], [2, 2, 1, 1])
    return numbers


def last_generation(run: Command) -> dict[str, object]:
    return json.loads((run.out / "summary.json").read_text())["generations"][-1]


def expect_lost(run: Command) -> None:
    """Expect that the run ends soon, because the second machine is gone, and names its node."""
    began = time.monotonic()
    node = ranks_of(run)[ranks_by_machine(run).index(2)][1]
    assert run.end(60) == 4, run.stderr()
    assert time.monotonic() - began < LOST_S
    assert re.search(rf"with node {node[:12]} \(10\.78\.0\.2\), whose raylet is gone", run.last_line()), run.last_line()
    assert last_generation(run)["cause"] == "NodeLost"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ray_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


@pytest.mark.thorough
@needs_namespaces
def test_every_routing_is_right_on_two_machines_and_a_killed_rank_costs_a_generation(
    machines: Machines, tmp_path: Path
) -> None:
    with run_on(machines[0], four_ranks(tmp_path, matrix=ROUTINGS), tmp_path) as run:
        pids = run.pids()
        run.wait_for("case 1/3 .*: done")
        machines[ranks_by_machine(run)[3] - 1].signal(pids[3], "KILL")
        run.wait_for(rf"^generation 0: rank 3 \(pid {pids[3]}\) died .*; starting the gang again$", seconds=20)
        assert run.end(150) == 0, run.stderr()
        lines = results(run)
    assert len(lines) == 3 * 3 and {line["generation"] for line in lines} == {0, 1}
    assert all(line["verified"] is True and line["domains"] == 2 for line in lines)
    assert {line["op"]: line["bytes_net"] for line in lines} == {"dispatch": 17568, "combine": 18592, "exchange": 36160}


@pytest.mark.thorough
@needs_namespaces
def test_a_rank_that_stops_on_the_other_machine_is_named(machines: Machines, tmp_path: Path) -> None:
    with run_on(machines[0], four_ranks(tmp_path, steps__count=configs.LONG), tmp_path) as run:
        pids = run.pids()
        run.wait_for("case 1/1 default: step")
        machines[ranks_by_machine(run)[3] - 1].signal(pids[3], "STOP")
        began = time.monotonic()
        assert run.end(40) == 5, run.stderr()
    assert time.monotonic() - began < 5 + 15  # wait_timeout_s, and the end of the ranks
    assert last_generation(run) == last_generation(run) | {"cause": "PeerTimeout", "culprit": 3}
    assert "the culprit is rank 3" in run.last_line()


@pytest.mark.thorough
@needs_namespaces
def test_a_machine_that_is_lost_is_named(machines: Machines, tmp_path: Path) -> None:
    """The second machine is gone after this test."""
    config = four_ranks(tmp_path, steps__count=configs.LONG, world__restarts=0)
    with run_on(machines[0], config, tmp_path) as run:
        run.pids()
        run.wait_for("case 1/1 default: step")
        machines[1].end()
        expect_lost(run)


@pytest.mark.thorough
@needs_namespaces
def test_a_machine_that_is_cut_off_is_named(tmp_path: Path) -> None:
    config = four_ranks(tmp_path, steps__count=configs.LONG, world__restarts=0)
    with ray_machines(tmp_path) as machines, run_on(machines[0], config, tmp_path) as run:
        run.pids()
        run.wait_for("case 1/1 default: step")
        machines[1].run("ip", "link", "set", "link0", "down")
        expect_lost(run)


def times_over_a_shaped_link(
    folder: Path, repeats: int, topks: Sequence[int], rate: str
) -> dict[str, dict[str, float]]:
    """Run `flat_exchange` on two ranks of each of two machines, whose link carries `rate` each way."""
    with two_machines(folder) as machines, ExitStack() as cleanup:
        for machine in machines:
            limit = ["rate", rate, "burst", "64kb", "latency", "2000ms"]
            machine.run("tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limit)
        ranks = []
        for rank in range(4):
            arguments = [str(folder / "store"), str(rank), str(repeats), *map(str, topks)]
            words = machines[rank // 2].inside(sys.executable, "-m", "tests.gang.flat_exchange", *arguments)
            own = environment(folder) | {"GLOO_SOCKET_IFNAME": "link0"}
            output = cleanup.enter_context((folder / f"rank{rank}").open("w+"))
            ranks.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=own))
            cleanup.callback(ranks[-1].kill)
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=100) == 0, (folder / f"rank{rank}").read_text()
    times: dict[str, dict[str, float]] = json.loads((folder / "rank0").read_text().splitlines()[-1])
    return times


@pytest.mark.thorough
@needs_slow_links
def test_over_a_shaped_link_a_rail_is_faster_than_a_flat_all_to_all(tmp_path: Path) -> None:
    """A token of top-8 needs nearly both ranks of the other machine, and its row crosses the rail once.

    The link is so slow that its bytes, and not two busy cores, decide.
    """
    times = times_over_a_shaped_link(tmp_path, repeats=5, topks=(8,), rate="25mbit")
    assert times["8"]["rail"] < 0.8 * times["8"]["flat"], times


@pytest.mark.thorough
@stands_in
def test_domains_on_two_nodes_give_right_results_and_outlive_a_node(start: Start, nodes: Nodes, tmp_path: Path) -> None:
    """No node can hold four ranks, so `auto` makes two domains of two."""
    added = {node.id: node for node in (nodes.add(cpus=2) for _ in range(3))}
    config = four_ranks(tmp_path, world__restarts=1, steps__count=60, matrix=ROUTINGS)
    run = start(config, "--address", nodes.address)
    run.pids()
    request = "asked for 4 ranks with 1 CPU each in 2 domains of 2 on a node each: no node can hold all of them"
    assert request in run.stderr()
    first = ranks_of(run)
    assert [domain for domain, _ in first] == [0, 0, 1, 1]
    assert first[0] == first[1] and first[2] == first[3] and first[0][1] != first[2][1]
    lost = added[first[2][1]]
    run.wait_for("case 1/3 .*: done")
    lost.kill()
    line = run.wait_for("^generation 0: .*; starting the gang again$", seconds=30).group()
    named = rf"rank ([23]) .* with node {lost.id[:12]} \(.*\), whose raylet is gone, and so did rank ([23]);"
    assert re.search(named, line), line
    assert run.end(120) == 0, run.stderr()
    assert lost.id not in {node for _, node in ranks_of(run)}
    generations = json.loads((run.out / "summary.json").read_text())["generations"]
    assert [generation["cause"] for generation in generations] == ["NodeLost", "done"]
    assert generations[0]["culprit"] in (2, 3)
    lines = results(run)
    assert len(lines) == 3 * 3 and {line["generation"] for line in lines} == {0, 1}
    assert all(line["verified"] is True and line["ranks"] == 4 and line["domains"] == 2 for line in lines)
    assert {line["op"]: line["bytes_net"] for line in lines} == {"dispatch": 17568, "combine": 18592, "exchange": 36160}


@pytest.mark.thorough
def test_domains_that_no_nodes_can_hold_apart_are_pretended_on_one(start: Start, head: Head, tmp_path: Path) -> None:
    """They run a layer forward and backward."""
    backends = ["host", "collective", "allgather"]
    config = four_ranks(
        tmp_path,
        workload="layer",
        world__domain=2,
        world__device="cpu",
        shape__ffn=32,
        layer={"backward": True},
        matrix={"exchange.backend": backends},
    )
    run = start(config, "--address", head.address)
    assert run.end() == 0, run.stderr()
    assert "in 2 domains of 2 on one node: this cluster lacks 2 nodes that can hold 2 ranks each" in run.stderr()
    (node,) = {node for _, node in ranks_of(run)}
    assert ranks_of(run) == [(domain, node) for domain in (0, 0, 1, 1)]
    assert [(line["backend"], line["op"]) for line in results(run)] == [(name, "step") for name in backends]
    assert all(line["verified"] is True and line["domains"] == 2 for line in results(run))


@pytest.fixture
def rack(nodes: Nodes) -> Nodes:
    """Two nodes of one NVLink domain, each with a GPU. Ray believes both numbers."""
    for _ in range(2):
        nodes.add(cpus=2, num_gpus=1, labels={"ray.io/gpu-domain": "rack-1"})
    return nodes


IN_A_RACK = "; the nodes of NVLink domain 'rack-1' (label ray.io/gpu-domain) can hold them, but ranks on"


@pytest.mark.thorough
def test_ranks_that_only_an_nvlink_domain_of_several_nodes_can_hold_are_refused(
    start: Start, rack: Nodes, tmp_path: Path
) -> None:
    config = configs.write(tmp_path, workload="p2p", world__device="cuda")
    run = start(config, "--address", rack.address)
    assert run.end() == 3
    assert "no node of this cluster can hold" in run.last_line()
    assert IN_A_RACK in run.last_line()


@pytest.mark.thorough
def test_gpu_ranks_that_no_node_can_hold_form_a_domain_on_each_of_two(
    start: Start, rack: Nodes, tmp_path: Path
) -> None:
    """Without a GPU the ranks are placed, and then say what is missing."""
    config = configs.write(tmp_path, world__device="cuda", world__restarts=0, exchange__backend="auto")
    run = start(config, "--address", rack.address, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.end() != 0
    request = (
        "asked for 2 ranks with 0.5 CPU, 1 GPU each in 2 domains of 1 on a node each: no node can hold all of them"
    )
    assert request + IN_A_RACK in run.stderr()
