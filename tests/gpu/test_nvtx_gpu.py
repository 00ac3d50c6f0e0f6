"""Every phase of a rank on a GPU is an NVTX range: a library that NVTX itself loads records them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.emulator.build import compiler
from tests.gang import configs
from tests.gang.conftest import Start
from tests.gpu.ranks import GPUS, NEEDS_GPU

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(300)]

SOURCE = Path(__file__).with_name("nvtx_recorder.c")
RUN_S = 200.0


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    command = compiler()
    if command is None:
        pytest.skip("needs a C compiler, for the library that records ranges; install gcc")
    library = tmp_path / "nvtx_recorder.so"
    flags = ["-x", "c", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([command, *flags, str(SOURCE)], check=True, timeout=60)
    return library


def ranges_of(record: str) -> Iterator[tuple[str, ...]]:
    """Give each range that a process began, with the ranges around it. All must have ended, in reverse order."""
    stack: list[str] = []
    for line in record.splitlines():
        what, _, name = line.partition(" ")
        if what == "push":
            stack.append(name)
            yield tuple(stack)
        else:
            stack.pop()
    assert not stack, f"these ranges never ended: {stack}"


def test_every_phase_of_a_rank_is_a_range(start: Start, recorder: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    config = configs.write(
        tmp_path,
        world={"ranks": 2, "device": "cuda", "share_gpu": GPUS < 2, "cpus": 0.5, "wait_timeout_s": 20},
        shape={"tokens": 64, "hidden": 512, "experts": 8, "topk": 2, "dtype": "bfloat16"},
        exchange={"backend": "fused"},
        steps={"warmup": 1, "count": 3, "graph": True},
    )
    injected = {"NVTX_INJECTION64_PATH": str(recorder), "NVTX_RECORDS": str(records)}
    run = start(config, env={"HOME": str(tmp_path), **injected})
    assert run.end(RUN_S) == 0, run.stderr()
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    for rank in ranks:
        found = list(ranges_of((records / str(rank["pid"])).read_text()))
        case, loop, step = "case default", "default: exchange by fused", "steps 0 to 0"
        assert {("wire",), (case,), (case, "capture"), (case, loop), (case, loop, step)} <= set(found)
        # The warm-up step is not verified. The first and the last timed step are.
        blocks = [each for each in found if len(each) == 3]
        phases = [each[3] for each in found if len(each) == 4]
        assert blocks[0] == (case, loop, step) and all(each[:2] == (case, loop) for each in blocks)
        timed, verified = ["dispatch", "combine", "exchange"], ["dispatch", "experts", "combine", "exchange", "verify"]
        assert phases == [*timed, *verified, *timed, *verified]
