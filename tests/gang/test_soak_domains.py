"""Two pretended machines with a link: more backends, a slow link and more times than `make test` tries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang.namespaces import Machines, needs_namespaces, needs_slow_links, ray_machines, run_on
from tests.gang.test_domains import (
    ROUTINGS,
    four_ranks,
    results,
    times_over_a_shaped_link,
)

pytestmark = [pytest.mark.soak, needs_namespaces, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ray_machines(tmp_path) as both:
        yield both


def test_every_routing_is_right_by_every_backend(machines: Machines, tmp_path: Path) -> None:
    config = four_ranks(tmp_path, matrix=ROUTINGS | {"exchange.backend": ["host", "collective", "allgather"]})
    with run_on(machines[0], config, tmp_path) as run:
        assert run.end(200) == 0, run.stderr()
        lines = results(run)
    assert len(lines) == 9 * 3
    assert all(line["verified"] is True and line["domains"] == 2 for line in lines)


@needs_slow_links
def test_a_slow_link_ends_no_run(machines: Machines, tmp_path: Path) -> None:
    """A step takes longer than many slices of a wait, and so do the questions of the driver."""
    with run_on(machines[0], four_ranks(tmp_path, steps__count=20), tmp_path) as run:
        run.pids()
        for machine in machines:
            limit = ["rate", "256kbit", "burst", "8kb", "latency", "5000ms"]
            machine.run("tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limit)
        assert run.end(150) == 0, run.stderr()
        (step,) = (line for line in results(run) if line["op"] == "exchange")
    assert step["verified"] is True and step["us_p50"] > 200e3  # type: ignore[operator]


@needs_slow_links
def test_by_top_k_over_a_shaped_link_a_rail_overtakes_a_flat_all_to_all(tmp_path: Path) -> None:
    times = times_over_a_shaped_link(tmp_path, repeats=15, topks=(1, 2, 4, 8), rate="100mbit")
    print(json.dumps(times))  # for benchmarks/rail_shaped_cpu.txt
    assert times["8"]["rail"] < times["8"]["flat"], times
