"""Check the speed that the README promises of the host exchange, by ratios in a run. A loaded machine can fail this."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.perf


@pytest.mark.timeout(300)
def test_host_is_faster_than_collective(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raymoe", "run", "host_exchange", "--quiet", "--out", str(tmp_path / "run")]
    assert subprocess.run(command, timeout=200, check=False).returncode == 0
    text = (tmp_path / "run" / "results.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    us = {(line["backend"], line["op"]): line["us_p50"] for line in lines}
    assert us["collective", "exchange"] >= 1.5 * us["host", "exchange"], us
    assert us["collective", "dispatch"] >= 2.0 * us["host", "dispatch"], us
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["generations"][0]["ready_s"] < 15
