"""`examples/channel.py` between two CPU ranks, started as its first lines show."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.python_path import REPOSITORY, python_path

REPO = REPOSITORY


def verified_by_the_example(**variables: str) -> list[str]:
    """Run the example; return its verified lines for put and get, without bytes and steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "examples/channel.py"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": python_path(), "GLOO_SOCKET_IFNAME": "lo", **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.partition(":")[0] for line in done.stdout.splitlines() if line.endswith("verified")]


@pytest.mark.thorough
def test_the_channel_example_verifies_put_and_get() -> None:
    assert verified_by_the_example(CUDA_VISIBLE_DEVICES="") == ["put by host on cpu", "get by host on cpu"]
