"""Workload train in a gang: after a lost rank all ranks go on from the last checkpoint, and the report says where."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.gang.conftest import Head, Start

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.thorough, pytest.mark.timeout(420)]
KEYS = ("steps.count=400", "train.checkpoint_every=20", "train.oracle=5", "shape.tokens=64")


def test_a_rank_killed_in_training_costs_the_steps_since_the_last_checkpoint(
    start: Start, head: Head, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    sets = [word for key in (*KEYS, f"train.folder={folder}") for word in ("--set", key)]
    run = start("train", "--address", head.address, *sets)
    deadline = time.monotonic() + 150
    while not any(folder.glob("case-0/*/complete")):
        assert time.monotonic() < deadline, run.stderr()
        time.sleep(0.02)
    os.kill(run.pids()[1], signal.SIGKILL)
    assert run.process.wait(200) == 0, run.stderr()
    (line,) = [json.loads(text) for text in (run.out / "results.jsonl").read_text().splitlines()]
    began, went_on = line["starts"]
    assert (line["generation"], began) == (1, 0) and went_on >= 20 and went_on % 20 == 0
    assert line["verified"] is True and line["losses"][-1][0] == 400
    assert line["losses"][-1][1] < 0.7 * line["losses"][0][1]
    assert "went on" in (run.out / "report.html").read_text()
    assert not folder.exists()
