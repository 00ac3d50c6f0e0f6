"""Measure how long an eager call keeps its thread, in a run of bench_eager on two GPUs, or on the only one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.ranks import GPUS, NEEDS_GPU

pytestmark = [*NEEDS_GPU, pytest.mark.perf]

TOKENS, MAX_CALL_US, MAX_PAIR_US = 128, 30.0, 60.0


@pytest.mark.timeout(300)
def test_an_eager_call_of_few_tokens_takes_little_host_time(tmp_path: Path) -> None:
    ranks = min(GPUS, 2)
    settings = [f"world.ranks={ranks}", f"matrix.shape.tokens=[{TOKENS}]", "matrix.exchange.backend=[fused]"]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "raymoe", "run", "bench_eager", "--quiet", "--out", str(tmp_path / "run"), *sets]
    assert subprocess.run(command, timeout=250, check=False).returncode == 0
    text = (tmp_path / "run" / "results.jsonl").read_text()
    lines = {line["op"]: line for line in map(json.loads, text.splitlines()) if line["l2"] == "warm"}
    host_us = {op: line["host_us_p50"] for op, line in lines.items()}
    assert host_us["dispatch"] <= MAX_CALL_US and host_us["combine"] <= MAX_CALL_US, host_us
    assert lines["exchange"]["us_p50"] <= MAX_PAIR_US, lines["exchange"]
