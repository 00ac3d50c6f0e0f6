"""Domains in network namespaces of their own: a rank reaches another domain only over a link between the two."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from raymoe.exchange.spec import ExchangeSpec
from tests.python_path import REPOSITORY
from tests.unit.exchange.exchange_cases import ROUTINGS, Case, batches, run_case
from tests.unit.exchange.exchange_judge import judge_combine

CASE = Case(4, ExchangeSpec(tokens=7, hidden=16, experts=12, topk=3), "auto", ROUTINGS, seed=3)


def main(rank: int, store: str) -> None:
    """Run one rank and judge its results; print the address at which it listens."""
    import torch.distributed as dist

    from raymoe.memory.world import SpanningWorld, World

    patience = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=patience)
    with World.of(domain=2, timeout_s=20) as world:
        assert isinstance(world, SpanningWorld)
        print(world.address)
        results = run_case(world, CASE)
    dist.destroy_process_group()
    for step, result in enumerate(results):
        judge_combine(CASE, batches(CASE, step)[rank], result.y)


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture
def namespaces() -> Iterator[list[int]]:
    """Return processes in two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a pair of `veth` devices."""
    with ExitStack() as cleanup:
        holders = []
        for _ in range(2):
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 100"], stdout=subprocess.PIPE, text=True
            )
            cleanup.callback(holder.wait)
            cleanup.callback(holder.kill)
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":  # unshare has failed
                pytest.skip("network namespaces are not permitted here")
            holders.append(holder.pid)
        near, far = f"rm{holders[0]}", f"rm{holders[1]}"
        try:
            command("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a veth pair cannot be made here: {error}")
        for number, (pid, device) in enumerate(zip(holders, (near, far), strict=True), start=1):
            inside = ("nsenter", "--net", "--target", str(pid), "ip")
            command("ip", "link", "set", device, "netns", str(pid), "name", "link0")
            command(*inside, "address", "add", f"10.77.0.{number}/24", "dev", "link0")
            command(*inside, "link", "set", "link0", "up")
            command(*inside, "link", "set", "lo", "up")
        yield holders


@pytest.mark.thorough
def test_two_domains_exchange_over_a_network(
    namespaces: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "link0")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    program = f"import sys; from {main.__module__} import main; main(int(sys.argv[1]), sys.argv[2])"
    with ExitStack() as cleanup:
        ranks = []
        for rank in range(4):
            output = cleanup.enter_context(tempfile.TemporaryFile("w+"))
            inside = ["nsenter", "--net", "--target", str(namespaces[rank // 2])]
            command = [*inside, sys.executable, "-c", program, str(rank), str(tmp_path / "store")]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            ranks.append((process, output))
        for rank, (process, output) in enumerate(ranks):
            status = process.wait(60)
            output.seek(0)
            printed = output.read()
            assert status == 0, printed
            assert f"10.77.0.{rank // 2 + 1}\n" in printed
