"""A run from the command line to the run directory, on a local Ray and on a cluster."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import yaml

from raymoe.report.results import KEYS
from tests.gang import configs
from tests.gang.conftest import Head, Start

pytestmark = pytest.mark.usefixtures("nothing_left")


def read(directory: Path) -> tuple[list[dict[str, object]], dict[str, object]]:
    lines = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    return lines, json.loads((directory / "summary.json").read_text())


def test_quickstart_with_two_ranks_leaves_what_the_contract_says(start: Start) -> None:
    run = start("quickstart", "--set", "world.ranks=2", "--set", "steps.count=4")
    assert run.end() == 0, run.said()
    lines, summary = read(run.out)
    assert {"step"} <= {line["op"] for line in lines}
    assert all(tuple(line) == KEYS and line["verified"] is True and line["ranks"] == 2 for line in lines)
    assert summary["status"] == "done" and summary["exit_code"] == 0
    assert len(summary["generations"]) == 1 and summary["generations"][0]["ready_s"] > 0
    environment = json.loads((run.out / "environment.json").read_text())
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert yaml.safe_load((run.out / "config.yaml").read_text())["world"]["ranks"] == 2


def test_two_runs_at_once_on_one_machine_and_a_stale_address_file(
    start: Start, tmp_path: Path, stale_address_file: None
) -> None:
    config = configs.write(tmp_path, world__ranks=2)
    runs = [start(config), start(config)]
    for run in runs:
        assert run.end() == 0, run.said()
        assert len(read(run.out)[0]) > 0
    late = start(config, "--address", "auto")
    assert late.end(15) == 3
    assert "nothing answers there" in late.last_line() and "ray start --head" in late.last_line()


def test_every_case_of_a_matrix_on_a_cluster_in_file_order(start: Start, head: Head, tmp_path: Path) -> None:
    config = configs.write(tmp_path, matrix={"exchange.backend": ["host", "collective"], "shape.tokens": [4, 8]})
    run = start(config, "--address", head.address)
    assert run.end() == 0, run.said()
    lines, summary = read(run.out)
    names = list(dict.fromkeys(line["case"] for line in lines))
    assert names == [f"backend={b},tokens={t}" for b in ("host", "collective") for t in (4, 8)]
    assert summary["cases"] == dict.fromkeys(names, "done")


def test_a_run_that_was_stopped_goes_on_where_it_was(start: Start, head: Head, tmp_path: Path) -> None:
    config = configs.write(tmp_path, world__ranks=2, matrix={"steps.count": [3, configs.LONG]})
    run = start(config, "--address", head.address)
    run.wait_for(r"case 1/2 count=3: done")
    run.signal(signal.SIGTERM)
    assert run.end(10) == 143
    lines, summary = read(run.out)
    assert {line["case"] for line in lines} == {"count=3"} and summary["status"] == "stopped"

    again = start("--resume", str(run.out), "--address", head.address)
    again.pids()
    again.wait_for(r"case 2/2 count=1000000: step")
    again.signal(signal.SIGINT)
    assert again.end(10) == 130
    assert read(run.out)[0] == lines, "the finished case was kept, not run again"


def test_what_no_node_can_hold_fails_at_once_and_says_what_there_is(start: Start, head: Head, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, world__cpus=64), "--address", head.address)
    assert run.end(20) == 3
    assert "3 ranks with 64 CPU each" in run.last_line() and "8 CPU" in run.last_line()


def test_a_full_cluster_is_waited_for_as_long_as_the_job_says(start: Start, head: Head, tmp_path: Path) -> None:
    holder = start(
        configs.write(tmp_path, "holder", world__cpus=2.5, steps__count=configs.LONG), "--address", head.address
    )
    holder.pids()
    run = start(configs.write(tmp_path, world__cpus=1, world__placement_timeout_s=1), "--address", head.address)
    assert run.end() == 3
    assert "no room for it within 1 s" in run.last_line() and "0.5 of 8 CPU" in run.last_line()
    waits = start(configs.write(tmp_path, "waits", world__cpus=1), "--address", head.address)
    waits.wait_for("placing ranks")
    holder.signal(signal.SIGTERM)
    assert holder.end(10) == 143
    assert waits.end() == 0, waits.said()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "not an address", "ray://127.0.0.1:10001"])
def test_a_cluster_that_is_not_there(start: Start, tmp_path: Path, address: str) -> None:
    run = start(configs.write(tmp_path), "--address", address)
    assert run.end(15) == 3
    assert address in run.last_line()


def test_a_port_that_answers_but_is_no_cluster_is_given_up(start: Start, tmp_path: Path, silent_port: int) -> None:
    first = "from raymoe.gang import cluster; cluster.CONNECT_S = 4.0"
    run = start(configs.write(tmp_path), "--address", f"127.0.0.1:{silent_port}", first=first)
    assert run.end(15) == 3
    assert f"127.0.0.1:{silent_port}, and was not let in within 4 s" in run.last_line()


def test_a_heap_larger_than_memory_is_refused_before_ray_starts(start: Start, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, shape__tokens=4_000_000, shape__hidden=16384))
    assert run.end(10) == 3
    assert "GiB" in run.last_line() and "local Ray" not in run.said()


def test_a_heap_larger_than_memory_on_a_cluster_is_refused_by_its_node(
    start: Start, head: Head, tmp_path: Path
) -> None:
    run = start(configs.write(tmp_path, shape__tokens=4_000_000, shape__hidden=16384), "--address", head.address)
    assert run.end(30) == 3, run.said()
    assert "GiB" in run.last_line()


def test_more_ranks_than_the_machine_has_room_for(start: Start, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, world__cpus=64))
    assert run.end(40) == 3
    assert "3 ranks with 64 CPU each" in run.last_line()


def test_a_directory_that_cannot_be_written(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = start(configs.write(tmp_path), out=tmp_path / "file" / "below")
    assert run.end(10) == 8
    assert str(tmp_path / "file" / "below") in run.last_line()


def test_data_that_is_refused_is_exit_7(start: Start, head: Head, tmp_path: Path) -> None:
    run = start(
        configs.write(tmp_path, exchange__capacity=40, routing={"kind": "hot", "share": 1.0}), "--address", head.address
    )
    assert run.end() == 7, run.said()
    assert "capacity" in run.last_line()
