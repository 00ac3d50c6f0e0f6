"""The programs in examples/ run on CPU ranks, each started by the command in its first lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gang.conftest import REPO, Head
from tests.python_path import python_path

DEADLINE_S = 400
"""For one program. With an empty cache of torch, the compiled one takes 45 s alone, and 150 s beside eight others."""
AT_ONCE = 3
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


@dataclass(frozen=True)
class Example:
    """How a program is started, the pattern and number of its result lines, whether it needs Ray and runs on GPUs."""

    start: str
    says: str
    lines: int = 2
    on_ray: bool = False
    on_gpus: bool = True


STEPS = r"rank [01] on {device}: 5 steps by \w+, verified"
EXAMPLES = {
    "ray_actors.py": Example("python examples/ray_actors.py", STEPS, on_ray=True),
    "torchrun.py": Example("torchrun --nproc-per-node 2 examples/torchrun.py", STEPS),
    "transformers_moe.py": Example(
        "torchrun --nproc-per-node 2 examples/transformers_moe.py",
        r"rank [01] on {device}: [12] x 8 tokens by raymoe, as the unsharded model; gradients too",
        on_gpus=False,
    ),
    "ray_train.py": Example("python examples/ray_train.py", STEPS, on_ray=True),
    "rollout_and_train.py": Example(
        "python examples/rollout_and_train.py",
        r"2 engines, 2 trainers on {device}: 122880 logits with the same bits, reward 0\.\d\d to [01]\.\d\d",
        lines=1,
        on_ray=True,
    ),
    "train.py": Example(
        "torchrun --nproc-per-node 2 examples/train.py",
        r"2 ranks on {device} by ddp: steps 0 to 30, loss 5\.\d+ to [23]\.\d+, the unsharded run's to \de[-+]\d+",
        lines=1,
    ),
}


def run(example: Example, folder: Path, **variables: str) -> str:
    """Run the program, with its storage and cache in `folder`; return its output."""
    program, *arguments = [str(folder / "run") if word == "run" else word for word in example.start.split()]
    start = TORCHRUN if program == "torchrun" else ()
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results(example: Example, printed: str, device: str) -> list[str]:
    """Return the ranks' result lines, sorted, without Ray's output."""
    return sorted(re.findall(f"^{example.says.format(device=device)}$", printed, re.MULTILINE))


FP8 = "transformers_moe.py --fp8"
PROGRAMS = EXAMPLES | {
    FP8: Example(
        "torchrun --nproc-per-node 2 examples/transformers_moe.py --fp8",
        r"rank [01] on {device}: [12] x 8 tokens with 8-bit experts, logits \d+\.\d% from the \w+ model's",
    ),
    "transformers_moe.py in Ray Train": Example(
        "python -m tests.gang.transformers_in_ray_train", "2 workers: as the unsharded model", lines=1, on_ray=True
    ),
    "train.py, a rank killed": Example(
        "torchrun --nproc-per-node 2 --max-restarts 1 examples/train.py --parallel fsdp --folder run --kill-at 15",
        r"2 ranks on {device} by fsdp: steps 10 to 30, loss 5\.\d+ to [23]\.\d+, the unsharded run's to \de[-+]\d+",
        lines=1,
    ),
    "train.py, a worker of Ray Train killed": Example(
        "python examples/train.py --ray --folder run --kill-at 15",
        r"2 ranks on {device} by ddp: steps 10 to 30, loss 5\.\d+ to [23]\.\d+, the unsharded run's to \de[-+]\d+",
        lines=1,
        on_ray=True,
    ),
    "train.py, compiled": Example(
        "torchrun --nproc-per-node 2 examples/train.py --parallel fsdp --compile --steps 3",
        r"2 ranks on {device} by fsdp: steps 0 to 3, loss 5\.\d+ to 5\.\d+, the unsharded run's to \de[-+]\d+",
        lines=1,
    ),
}
"""The examples, some of them with other arguments, and the model of one as Ray Train runs it."""
ELSEWHERE = {"channel.py"}
"""tests/unit/docs/test_channel_example.py runs it."""


def test_every_example_program_has_a_test() -> None:
    assert {path.name for path in (REPO / "examples").glob("*.py")} == ELSEWHERE | set(EXAMPLES)
    for name, example in EXAMPLES.items():
        assert f"\n    {example.start}\n" in (REPO / "examples" / name).read_text(), "its first lines lack the command"


@pytest.fixture(scope="module")
def outputs(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """The output of each program. Some run at the same time, because each waits for the start of its processes."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {}
        for name, example in PROGRAMS.items():
            variables = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
            if example.on_ray:
                variables |= {"RAY_ADDRESS": head.address}
            started[name] = pool.submit(run, example, tmp_path_factory.mktemp("example"), **variables)
        yield started


@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs_on_cpu_ranks(name: str, outputs: dict[str, Future[str]]) -> None:
    lines = results(PROGRAMS[name], outputs[name].result(), "cpu")
    assert len(lines) == PROGRAMS[name].lines
    assert len(set(lines)) == len(lines)
