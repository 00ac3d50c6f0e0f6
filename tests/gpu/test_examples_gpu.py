"""Run the programs in examples/ on two GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.gang.test_examples import DEADLINE_S, EXAMPLES, FP8, PROGRAMS, results, run
from tests.gpu.ranks import GPUS, NEEDS_GPU
from tests.short_folder import short_base

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < 2, reason=f"with fewer than two GPUs they run on CPU ranks: {GPUS} here"),
    pytest.mark.timeout(DEADLINE_S + 30),
]


@pytest.mark.parametrize("name", [*(name for name, example in EXAMPLES.items() if example.on_gpus), FP8])
def test_each_example_runs_on_two_gpus(name: str) -> None:
    if name == "ray_train.py" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("needs ray[train], and pyarrow is missing: pip install '.[examples]'")
    if name == FP8:
        pytest.importorskip("transformers.distributed.expert_parallel")
    example = PROGRAMS[name]
    with TemporaryDirectory(
        prefix="raymoe", dir=short_base(24)
    ) as folder:  # a short path, because Ray makes sockets below it
        printed = run(example, Path(folder), RAY_ADDRESS="local", HOME=folder)
    assert len(set(results(example, printed, "cuda(?::[01])?"))) == example.lines, printed
