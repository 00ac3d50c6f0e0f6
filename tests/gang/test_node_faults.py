"""Lose a whole node: the run names it, goes on where another node can hold its ranks, and says so where none can."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import CALM, Start
from tests.gang.fault_lines import Fault
from tests.gang.nodes import Nodes

pytestmark = pytest.mark.usefixtures("nothing_left")


def two_ranks(folder: Path, **changes: object) -> str:
    return configs.write(folder, world__ranks=2, world__cpus=1, **changes)


def generations_of(directory: Path) -> list[dict[str, object]]:
    return json.loads((directory / "summary.json").read_text())["generations"]


def nodes_of(directory: Path) -> set[str]:
    """Return the ids of the nodes that hold the ranks."""
    return {rank["node"] for rank in json.loads((directory / "environment.json").read_text())["ranks"]}


@pytest.mark.thorough
def test_a_node_that_is_killed_is_named_and_ends_the_run(
    start: Start, nodes: Nodes, tmp_path: Path, fault: Fault
) -> None:
    node = nodes.add(cpus=2)
    config = two_ranks(tmp_path, world__restarts=0, steps__count=configs.LONG)
    run = start(config, "--address", nodes.address, first=CALM)
    run.wait_for(r"case 1/1 default: step")
    fault.strike("node-killed", run)
    node.kill()
    assert fault.ended(30) == 4, run.stderr()
    assert fault.line is not None and fault.line["seconds"] < 10 and fault.line["processes_left"] == 0
    assert f"with node {node.id[:12]} (" in run.last_line() and "whose raylet is gone" in run.last_line()
    assert [(generation["cause"], generation["culprit"] in (0, 1)) for generation in generations_of(run.out)] == [
        ("NodeLost", True)
    ]


@pytest.mark.thorough
def test_ranks_go_on_on_another_node(start: Start, nodes: Nodes, tmp_path: Path, fault: Fault) -> None:
    added = [nodes.add(cpus=2), nodes.add(cpus=2)]
    config = two_ranks(tmp_path, matrix={"steps.count": [5, 1000]}, world__placement_timeout_s=60)
    run = start(config, "--address", nodes.address)
    run.wait_for(r"case 1/2 count=5: done")
    [node] = nodes_of(run.out)
    first, second = sorted(added, key=lambda candidate: candidate.id != node)
    fault.strike("node-killed-other", run)
    first.kill()
    fault.noticed("whose raylet is gone; .*; starting the gang again", seconds=30)
    fault.recovered(90)
    assert fault.ended(90) == 0, run.stderr()
    lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    assert {(line["case"], line["generation"]) for line in lines} == {("count=5", 0), ("count=1000", 1)}
    assert [generation["cause"] for generation in generations_of(run.out)] == ["NodeLost", "done"]
    assert nodes_of(run.out) == {second.id}


@pytest.mark.thorough
def test_a_raylet_that_is_killed_takes_its_node_along_and_no_other_can_hold_the_ranks(
    start: Start, nodes: Nodes, tmp_path: Path, fault: Fault
) -> None:
    node = nodes.add(cpus=2)
    run = start(two_ranks(tmp_path, steps__count=configs.LONG), "--address", nodes.address, first=CALM)
    run.pids()
    fault.strike("node-raylet-killed", run)
    os.kill(node.pids["raylet"][0], signal.SIGKILL)
    assert fault.ended(60) == 4, run.stderr()
    assert fault.line is not None and fault.line["seconds"] < 30
    assert f"with node {node.id[:12]} (" in run.last_line()
    assert "no other node can hold the ranks" in run.last_line()
    assert fault.line["processes_left"] == 0, "ranks end with their raylet"
