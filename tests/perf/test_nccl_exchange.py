"""Compare the backends over NCCL with bare NCCL calls on the same bytes, in a run of bench_nccl on two GPUs.

A dispatch may take 1.5 times as long as its NCCL call, plus the time that memory takes to copy the rows that it gives;
so may a combine. `collective` is eager, and its host waits once: 60 us more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.ranks import GPUS

pytestmark = [
    pytest.mark.perf,
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each of two ranks; {GPUS} here"),
]

TOKENS = 4096
HOST_US = 60.0
CALLS = {
    ("allgather", "dispatch"): ("all_gather", 0.0),
    ("allgather", "combine"): ("all_to_all_sums", 0.0),
    ("collective", "dispatch"): ("all_to_all", HOST_US),
    ("collective", "combine"): ("all_to_all", HOST_US),
}
"""By backend and operation: the call that moves the same bytes, and microseconds that the host may add."""


def limits_us(us: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the most microseconds that each operation may take, by the times of the bare calls in the same run.

    >>> us = {("nccl_bare", "all_gather"): 200.0, ("nccl_bare", "copy_rows"): 230.0}
    >>> us |= {("nccl_bare", "all_to_all_sums"): 180.0, ("nccl_bare", "all_to_all"): 160.0}
    >>> list(limits_us(us).values())
    [530.0, 500.0, 530.0, 530.0]
    """
    copy = us["nccl_bare", "copy_rows"]
    return {key: 1.5 * us["nccl_bare", call] + copy + host for key, (call, host) in CALLS.items()}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the result lines of one run, so that all are of one machine in one state."""
    folder = tmp_path_factory.mktemp("bench_nccl") / "run"
    settings = ["world.ranks=2", f"matrix.shape.tokens=[{TOKENS}]"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "raymoe", "run", "bench_nccl", "--quiet", "--out", str(folder), *options]
    assert subprocess.run(command, timeout=500, check=False).returncode == 0
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_backends_add_little_to_bare_nccl_calls(lines: list[dict[str, Any]], l2: str) -> None:
    us = {(line["backend"], line["op"]): line["us_p50"] for line in lines if line["l2"] == l2}
    assert {key: us[key] for key, limit in limits_us(us).items() if us[key] > limit} == {}, us
