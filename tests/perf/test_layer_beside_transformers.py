"""A layer beside the same block of transformers with its own expert parallelism, on two GPUs, or on the only one.

With one GPU the world has one rank: no row crosses a link, and all other work of a layer is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.distributed.expert_parallel")

from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.perf.transformers_block import Sizes, measure  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]
SIZE = min(GPUS, 2)
EXPERTS = 128
"""Experts of a rank: those of DeepSeek-V3 on two ranks."""
BOUND = 2**-6
"""Of bfloat16: both round rows, sums and weights at other places."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(SIZE) as started:
        yield started


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens", [128, 4096])
def test_a_layer_takes_less_time_than_the_block(ranks: GpuRanks, tmp_path: Path, tokens: int) -> None:
    found = ranks.run(SIZE, measure, str(tmp_path / "store"), Sizes(tokens, experts=EXPERTS * SIZE), 20)[0]
    print(json.dumps({"ranks": SIZE, "tokens": tokens} | found))
    assert found["error"] < BOUND
    assert found["layer"] < found["block"]
    assert found["layer"] - found["layer_products"] <= 0.5 * (found["block"] - found["block_products"])
