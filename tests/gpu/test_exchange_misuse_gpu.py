"""Misuse of exchanges between GPU ranks, told by a sentence, and what is dropped without being closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from tests.gpu import misuse_ranks as on_rank  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.exchange_cases import Case  # noqa: E402
from tests.unit.exchange_judge import judge  # noqa: E402

pytestmark = NEEDS_GPU

RANKS = 2
SPEC = ExchangeSpec(tokens=16, hidden=256, experts=4, topk=2)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    if torch.cuda.get_device_capability() < FUSED_CAPABILITY:
        pytest.skip(f"needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    with GpuRanks(RANKS) as started:
        yield started


def test_rows_travel_in_lines_over_nvlink_alone(ranks: GpuRanks) -> None:
    """GPUs of this project's machines have NVLink between every two; ranks that share one need none."""
    case = Case(RANKS, SPEC, "fused", ("uniform", "masked", "one", "none"), seed=5)
    answers = ranks.run(RANKS, on_rank.ll_with_and_without_nvlink, case)
    assert {there for _, _, there, _ in answers} == {"FusedBackend"}
    assert len({(lines, here) for lines, here, _, _ in answers}) == 1
    lines, here, _, _ = answers[0]
    assert here == ("FusedLlBackend" if lines else "FusedBackend")
    assert lines or "H200" not in torch.cuda.get_device_name()
    judge(case, [results for _, _, _, results in answers])


@pytest.mark.parametrize("backend", ["fused", "staged", "allgather", "collective"])
def test_mistakes_are_told_and_the_exchange_works_on(ranks: GpuRanks, backend: str) -> None:
    if backend in ("allgather", "collective") and GPUS < RANKS:
        pytest.skip(f"{backend} is NCCL's, which wants a GPU for each rank: {GPUS} here")
    for rank, told in enumerate(ranks.run(RANKS, on_rank.misused, SPEC, backend)):
        for what, says in {
            "at once": f"dispatch on rank {rank} while a call",
            "taken": "rows are in the exchange's own memory, which a later dispatch has overwritten",
            "negative": "x is a negative view",
            "weights": "topk_weights is a negative view",
            "vmap": "dispatch inside torch.vmap",
            "closed": f"dispatch on rank {rank}: its world is closed",
        }.items():
            assert told[what].startswith(says), (what, told[what])


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_dropped_exchanges_and_workspaces_give_their_memory_back(ranks: GpuRanks, backend: str) -> None:
    large = replace(SPEC, tokens=4096, hidden=4096)
    for free, told in ranks.run(RANKS, on_rank.dropped, large, backend):
        before, made, left, after = free
        assert made < before - 200  # MiB: each has slots for 2 ranks, twice, 32 MiB each
        assert left <= made + 16  # nothing is freed where a capture might be going on
        assert after >= before - 16
        assert len(told) == 2
        assert all("was dropped without close()" in text for text in told)


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_an_exchange_may_be_dropped_during_a_capture(ranks: GpuRanks, backend: str) -> None:
    assert ranks.run(RANKS, on_rank.dropped_during_a_capture, SPEC, backend) == [True] * RANKS
