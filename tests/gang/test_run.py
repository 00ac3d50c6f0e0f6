"""A run from the command line to the run directory, on a local Ray and on a cluster."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raymoe.report.directory import RAY_JOB
from raymoe.report.results import KEYS
from tests.gang import configs
from tests.gang.conftest import CALM, Command, Head, Start
from tests.gang.fault_lines import Fault
from tests.short_folder import short_base

pytestmark = pytest.mark.usefixtures("nothing_left")


def read(directory: Path) -> tuple[list[dict[str, object]], dict[str, object]]:
    lines = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    return lines, json.loads((directory / "summary.json").read_text())


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's directories. Its path is short enough for their sockets."""
    with tempfile.TemporaryDirectory(prefix="rm-", dir=short_base(11)) as folder:
        yield Path(folder)


def test_quickstart_with_two_ranks_writes_a_complete_run_directory(
    start: Start, ray_folder: Path, tmp_path: Path
) -> None:
    """A new user's first run also shows where the time of a layer goes, and no bandwidth of a whole layer."""
    env = {"RAY_TMPDIR": str(ray_folder)}
    run = start("quickstart", "--set", "world.ranks=2", "--set", "steps.count=4", env=env)
    run.pids()
    assert list(ray_folder.glob("raymoe-*/ray/session_*/logs")), "Ray's session is below RAY_TMPDIR"
    assert run.end() == 0, run.stderr()
    assert list(ray_folder.iterdir()) == [], "nothing of it is left"
    lines, summary = read(run.out)
    assert [line["op"] for line in lines] == ["step", "norm", "router", "dispatch", "experts", "combine", "sum"]
    assert [line["op"] for line in lines if line["gbps_wire"] and line["gbps_link"]] == ["dispatch", "combine"]
    assert all(tuple(line) == KEYS and line["verified"] is True and line["ranks"] == 2 for line in lines)
    assert summary["status"] == "done" and summary["exit_code"] == 0
    assert len(summary["generations"]) == 1 and summary["generations"][0]["ready_s"] > 0
    environment = json.loads((run.out / "environment.json").read_text())
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert yaml.safe_load((run.out / "config.yaml").read_text())["world"]["ranks"] == 2
    page = (run.out / "report.html").read_text()
    table = (tmp_path / "stdout0").read_text()
    assert re.search(r"a step of 512 tokens a rank takes .* tokens/s: experts [0-9]+%", table), table
    assert "Where the time of a layer goes" in page and "<span>rank 1</span>" in page
    assert "✓ Done" in page and f"<dd>{environment['host']}</dd>" in page


@pytest.mark.thorough
def test_a_directory_has_letters_that_the_locale_lacks(start: Start, head: Head, tmp_path: Path) -> None:
    """Ray sends the command line of a driver as UTF-8, and Python reads such letters as bytes that are none."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    config = configs.write(tmp_path, world__ranks=1)
    run = start(config, "--address", head.address, out=tmp_path / "käse", env=ascii_only)
    assert run.end() == 0, run.stderr()
    assert read(run.out)[1]["status"] == "done" and r"results go to" in run.stderr() and r"\udcc3\udca4" in run.stderr()


@pytest.mark.thorough
def test_only_address_auto_fails_on_a_stale_address_file(
    start: Start, tmp_path: Path, stale_address_file: None
) -> None:
    config = configs.write(tmp_path, world__ranks=1)
    runs = [start(config), start(config)]
    for run in runs:
        assert run.end() == 0, run.stderr()
        assert len(read(run.out)[0]) > 0
    late = start(config, "--address", "auto")
    assert late.end(15) == 3
    assert "nothing answers there" in late.last_line() and "ray start --head" in late.last_line()


def test_a_cluster_runs_every_case_of_a_matrix_in_file_order(start: Start, head: Head, tmp_path: Path) -> None:
    config = configs.write(tmp_path, matrix={"exchange.backend": ["host", "collective"], "shape.tokens": [4, 8]})
    run = start(config, "--address", head.address)
    assert run.end() == 0, run.stderr()
    lines, summary = read(run.out)
    names = list(dict.fromkeys(line["case"] for line in lines))
    assert names == [f"backend={b},tokens={t}" for b in ("host", "collective") for t in (4, 8)]
    assert summary["cases"] == dict.fromkeys(names, "done")


def test_resume_keeps_the_finished_cases_of_a_stopped_run(start: Start, head: Head, tmp_path: Path) -> None:
    config = configs.write(tmp_path, world__ranks=1, matrix={"steps.count": [3, configs.LONG]})
    run = start(config, "--address", head.address)
    run.wait_for(r"case 1/2 count=3: done")
    run.signal(signal.SIGTERM)
    assert run.end(10) == 143
    lines, summary = read(run.out)
    lines = [line for line in lines if not line["stopped"]]
    assert {line["case"] for line in lines} == {"count=3"} and summary["status"] == "stopped"

    again = start("--resume", str(run.out), "--address", head.address)
    again.pids(1)
    again.wait_for(r"case 2/2 count=1000000: step")
    again.signal(signal.SIGINT)
    assert again.end(10) == 130
    after, summary = read(run.out)
    assert after[: len(lines)] == lines, "the finished case was not kept as it was"
    stopped = after[len(lines) :]
    assert {(line["case"], line["stopped"]) for line in stopped} == {(f"count={configs.LONG}", True)}, again.stderr()
    assert all(line["samples"] > 0 and line["generation"] == 1 for line in stopped)
    assert [(one["number"], one["began"]) for one in summary["generations"]] == [(0, "start"), (1, "resume")]
    assert "generation 1: 1 ranks ready" in again.stderr()


@pytest.mark.thorough
def test_a_ray_job_that_is_started_again_continues_in_its_out(start: Start, head: Head, tmp_path: Path) -> None:
    """As KubeRay does with a RayJob that failed: the same command again, as the entrypoint of a new job."""
    config = configs.write(tmp_path, world__ranks=1, matrix={"steps.count": [3, configs.LONG]})
    out = tmp_path / "results"

    def attempt(number: int) -> Command:
        metadata = {"job_submission_id": f"try-{number}", "raymoe_version": "0.0.9"}
        env = {RAY_JOB: json.dumps({"runtime_env": {}, "metadata": metadata})}
        return start(config, "--address", head.address, env=env, out=out)

    first = attempt(1)
    first.wait_for("^submitted by raymoe 0.0.9, run by raymoe ")
    first.wait_for(r"case 1/2 count=3: done")
    first.signal(signal.SIGTERM)
    assert first.end(10) == 143
    lines = [line for line in read(out)[0] if not line["stopped"]]

    second = attempt(2)
    second.wait_for(rf"^continues the unfinished run in {out}; 1 case done before$")
    second.pids(1)
    second.wait_for(r"case 2/2 count=1000000: step")
    second.signal(signal.SIGTERM)
    assert second.end(10) == 143
    assert read(out)[0][: len(lines)] == lines and {line["run"] for line in lines} == {"try-1"}
    assert json.loads((out / "environment.json").read_text())["ray_job"] == "try-2"


@pytest.mark.thorough
def test_ranks_too_large_for_every_node_are_refused_with_the_cpus_found(
    start: Start, head: Head, tmp_path: Path
) -> None:
    config = configs.write(tmp_path, world__cpus=64)
    run, local = start(config, "--address", head.address), start(config)
    assert run.end(20) == 3
    assert "2 ranks with 64 CPU each" in run.last_line() and "8 CPU" in run.last_line()
    assert local.end(40) == 3
    assert "2 ranks with 64 CPU each on one node, which no node of this cluster" in local.last_line()


def test_gpu_ranks_in_a_cluster_without_gpus_are_refused_with_what_to_do(
    start: Start, head: Head, tmp_path: Path
) -> None:
    run = start(configs.write(tmp_path, workload="p2p", world__device="cuda"), "--address", head.address)
    assert run.end(20) == 3
    said = "0 of 0 GPU); this cluster has no GPU: use one that has, or a job with world.device: cpu, such as quickstart"
    assert run.last_line().endswith(said)


@pytest.mark.thorough
def test_a_run_waits_placement_timeout_s_for_a_full_cluster(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    held = configs.write(tmp_path, "holder", world__cpus=3.75, steps__count=configs.LONG)
    holder = start(held, "--address", head.address, first=CALM)
    holder.pids()
    run = start(configs.write(tmp_path, world__cpus=1, world__placement_timeout_s=1), "--address", head.address)
    fault.strike("no-room", run)
    patient = configs.write(tmp_path, "waits", world__cpus=1, world__placement_timeout_s=80)
    waits = start(patient, "--address", head.address)
    assert fault.ended(90) == 3
    assert "no room for it within 1 s" in run.last_line() and "0.5 of 8 CPU" in run.last_line()
    waiting = "asked for 2 ranks with 1 CPU each on one node, waiting for room; free: 0.5 of 8 CPU on "
    line = waits.wait_for(f"^{waiting}.*$").group()
    assert re.search(r"; held: 7.5 CPU by raymoe/holder-\S+$", line), line
    holder.signal(signal.SIGTERM)
    assert holder.end(10) == 143
    assert waits.end() == 0, waits.stderr()


def test_an_unreachable_cluster_address_is_named_and_exits_3(start: Start, tmp_path: Path) -> None:
    config, addresses = configs.write(tmp_path), ["127.0.0.1:1", "not an address", "ray://127.0.0.1:10001"]
    for run, address in [(start(config, "--address", address), address) for address in addresses]:
        assert run.end(15) == 3
        assert address in run.last_line()


@pytest.mark.thorough
def test_a_port_that_is_no_cluster_is_given_up_after_a_timeout(start: Start, tmp_path: Path, silent_port: int) -> None:
    first = "from raymoe.gang import cluster; cluster.CONNECT_S = 4.0"
    run = start(configs.write(tmp_path), "--address", f"127.0.0.1:{silent_port}", first=first)
    assert run.end(30) == 3  # where there is a token, another 5 s pass until the port counts as silent
    assert f"127.0.0.1:{silent_port}, and ray.init did not connect within 4 s" in run.last_line()


def test_a_heap_larger_than_memory_is_refused_before_ray_starts(start: Start, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, shape__tokens=4_000_000, shape__hidden=16384))
    assert run.end(10) == 3
    assert "GiB" in run.last_line() and "local Ray" not in run.stderr()


@pytest.mark.thorough
def test_a_heap_larger_than_memory_on_a_cluster_is_refused_by_its_node(
    start: Start, head: Head, tmp_path: Path
) -> None:
    run = start(configs.write(tmp_path, shape__tokens=4_000_000, shape__hidden=16384), "--address", head.address)
    assert run.end(30) == 3, run.stderr()
    assert "GiB" in run.last_line()


def test_a_run_directory_that_cannot_be_written_exits_8(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = start(configs.write(tmp_path), out=tmp_path / "file" / "below")
    assert run.end(10) == 8
    assert str(tmp_path / "file" / "below") in run.last_line()


def test_refused_data_exits_7(start: Start, head: Head, tmp_path: Path, fault: Fault) -> None:
    config = configs.write(tmp_path, world__ranks=2, exchange__capacity=40, routing={"kind": "hot", "share": 1.0})
    run = start(config, "--address", head.address)
    run.pids()
    fault.strike("data-refused", run)
    assert fault.ended(30) == 7, run.stderr()
    assert "capacity" in run.last_line()
