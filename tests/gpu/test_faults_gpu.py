"""A rank is killed or stopped while GPUs replay captured graphs: it is named, and the memory of the GPUs comes back.

`make faults-gpu` writes what these tests measure into faults.md. Two ranks share a GPU where there is one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gang import configs  # noqa: E402
from tests.gang.conftest import Command, Start  # noqa: E402
from tests.gang.fault_lines import GONE_S, Fault  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.fault, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(300)]

SHARED = GPUS < 2
WAIT_S = 10
START_S = 120.0  # until the first step: Ray starts, ranks load torch, kernels are compiled
# At least ten seconds of steps: the first progress line comes 5 s after the case before. Ranks that share a GPU take
# turns of milliseconds.
STEPS = 400 if SHARED else 8000
CONTEXT_MIB = 100  # at least, of the contexts of both ranks
SLACK_MIB = 64


def write(folder: Path, **changes: object) -> str:
    """Write a job of two GPU ranks that replay the captured exchange."""
    given = {
        "world": {"ranks": 2, "device": "cuda", "share_gpu": SHARED, "restarts": 0, "wait_timeout_s": WAIT_S},
        "shape": {"tokens": 1024, "hidden": 2048, "experts": 8, "topk": 2, "dtype": "bfloat16"},
        "exchange": {"backend": "fused"},
        "steps": {"warmup": 1, "count": configs.LONG, "graph": True},
    }
    return configs.write(folder, **given | changes)


def used_mib() -> int:
    """Return the memory in use on all GPUs, by any process."""
    free_and_total = [torch.cuda.mem_get_info(gpu) for gpu in range(GPUS)]
    return sum(total - free for free, total in free_and_total) // 2**20


@pytest.fixture
def before() -> int:
    """The memory in use before the run. The first look makes this process's own contexts."""
    used_mib()
    return used_mib()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of all runs here. The first one leaves its compiled kernels there."""
    return tmp_path_factory.mktemp("home")


def start_steps(start: Start, home: Path, config: str, case: str) -> Command:
    """Start a run with a Ray of its own; return when ranks replay steps of that case."""
    run = start(config, env={"HOME": str(home)})
    run.wait_for(rf"^case {case}: .*step", START_S)
    return run


def check_memory(fault: Fault, before: int) -> None:
    """Wait until the GPUs hold no more memory than before the run, and add the rest to the fault's line."""
    assert fault.line is not None
    deadline = time.monotonic() + GONE_S
    while (left := used_mib() - before) > SLACK_MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    names = Counter(torch.cuda.get_device_name(gpu) for gpu in range(1 if SHARED else 2))
    fault.line["gpus"] = ", ".join(f"{count} × {name}" for name, count in names.items())
    fault.line["gpu_mib_left"] = max(0, left)
    print(json.dumps(fault.line, ensure_ascii=False))
    assert left <= SLACK_MIB
    assert (fault.line["processes_left"], fault.line["shared_memory_left"]) == (0, 0)


@dataclass(frozen=True)
class Loss:
    """How a rank is lost, and how the run must end: exit code, seconds at most, a part of the last line."""

    name: str
    signal: signal.Signals
    exit_code: int
    most_s: float
    message: str


LOSSES = [
    Loss("gpu-rank-killed", signal.SIGKILL, 4, 10.0, r"^rank 1 \(pid {pid}\) died in `run`: it printed no cause"),
    Loss("gpu-rank-stopped", signal.SIGSTOP, 5, WAIT_S + 10.0, r"\brank 1\b"),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_lost_rank_is_named_and_gives_its_gpu_back(
    start: Start, home: Path, tmp_path: Path, before: int, fault: Fault, loss: Loss
) -> None:
    run = start_steps(start, home, write(tmp_path), "1/1 default")
    assert used_mib() >= before + CONTEXT_MIB, "the ranks are on these GPUs"
    victim = run.pids()[1]
    fault.strike(loss.name, run)
    os.kill(victim, loss.signal)
    assert fault.ended(60) == loss.exit_code, run.stderr()
    check_memory(fault, before)
    assert re.search(loss.message.format(pid=victim), run.last_line()), run.last_line()
    assert fault.line is not None and float(str(fault.line["seconds"])) < loss.most_s
    (generation,) = json.loads((run.out / "summary.json").read_text())["generations"]
    assert generation["culprit"] == 1


def gpus_of(run: Command, generation: int) -> list[str]:
    facts = json.loads((run.out / "environment.json").read_text())
    assert facts["generation"] == generation
    return [rank["gpu"] for rank in facts["ranks"]]


def test_the_next_generation_runs_on_the_same_gpus(
    start: Start, home: Path, tmp_path: Path, before: int, fault: Fault
) -> None:
    config = write(tmp_path, world__restarts=1, matrix={"steps.count": [5, STEPS]})
    run = start_steps(start, home, config, f"2/2 count={STEPS}")
    gpus = gpus_of(run, 0)
    assert len(gpus) == 2 and len(set(gpus)) == (1 if SHARED else 2)
    victim = run.pids()[1]
    fault.strike("gpu-rank-killed-restart", run)
    os.kill(victim, signal.SIGKILL)
    fault.noticed("rank 1 .* died .*; starting the gang again", seconds=10)
    fault.recovered(START_S)
    assert fault.ended(200) == 0, run.stderr()
    check_memory(fault, before)
    assert gpus_of(run, 1) == gpus
    lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    assert {(line["case"], line["generation"]) for line in lines} == {("count=5", 0), (f"count={STEPS}", 1)}
    assert all(line["graph"] and line["verified"] for line in lines)
