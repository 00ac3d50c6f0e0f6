"""Ranks in several domains by `raymoe run`: each on a Ray node of its own, or pretended on one node."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command, Head, Start
from tests.gang.nodes import Nodes

pytestmark = pytest.mark.usefixtures("nothing_left")

ROUTINGS = {"routing.kind": ["uniform", "zipf", "hot"]}


def four_ranks(folder: Path, **changes: object) -> str:
    """A job whose four ranks take a CPU each, with ragged tokens and masked ids."""
    asked: dict[str, object] = {
        "world__ranks": 4,
        "world__cpus": 1,
        "world__wait_timeout_s": 5,
        "shape__experts": 12,
        "routing": {"ragged": True, "masked": 0.1},
    }
    return configs.write(folder, **(asked | changes))


def results(run: Command) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]


def ranks_of(run: Command) -> list[tuple[int, str]]:
    """Return the domain and the node of each rank of the last generation."""
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    return [(rank["domain"], rank["node"]) for rank in ranks]


def test_domains_on_two_nodes_give_right_results_and_outlive_a_node(start: Start, nodes: Nodes, tmp_path: Path) -> None:
    """No node can hold four ranks, so `auto` makes two domains of two. The soak tests also kill and stop one rank."""
    added = {node.id: node for node in (nodes.add(cpus=2) for _ in range(3))}
    config = four_ranks(tmp_path, world__restarts=1, steps__count=60, matrix=ROUTINGS)
    run = start(config, "--address", nodes.address)
    run.pids()
    asked = "asked for 4 ranks with 1 CPU each in 2 domains of 2 on a node each: no node can hold all of them"
    assert asked in run.stderr()
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
    assert [each["cause"] for each in generations] == ["NodeLost", "done"]
    assert generations[0]["culprit"] in (2, 3)
    lines = results(run)
    assert len(lines) == 3 * 3 and {line["generation"] for line in lines} == {0, 1}
    assert all(line["verified"] is True and line["ranks"] == 4 and line["domains"] == 2 for line in lines)
    assert {line["op"]: line["bytes_net"] for line in lines} == {"dispatch": 17504, "combine": 18528, "exchange": 36032}


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
