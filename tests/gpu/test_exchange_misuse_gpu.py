"""Test misuse of exchanges between GPU ranks, which errors explain, and objects that are dropped without close()."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.peer.fused import FUSED  # noqa: E402
from raymoe.exchange.peer.fused_ll import FEW_TOKENS  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from tests.gpu import misuse_ranks as on_rank  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.exchange.exchange_cases import Case  # noqa: E402
from tests.unit.exchange.exchange_judge import judge  # noqa: E402

pytestmark = NEEDS_GPU

RANKS = 2
SPEC = ExchangeSpec(tokens=16, hidden=256, experts=4, topk=2)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    if torch.cuda.get_device_capability() < FUSED_CAPABILITY:
        pytest.skip(f"needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    with GpuRanks(RANKS) as started:
        yield started


def test_rows_travel_in_lines_only_over_nvlink(ranks: GpuRanks) -> None:
    """H200 machines have NVLink between every two GPUs; ranks that share a GPU need none."""
    case = Case(RANKS, SPEC, "fused", ("uniform", "masked", "one", "none"), seed=5)
    answers = ranks.run(RANKS, on_rank.ll_with_and_without_nvlink, case)
    assert {without_nvlink for _, _, without_nvlink, _ in answers} == {FUSED.name}
    assert len({(lines, backend) for lines, backend, _, _ in answers}) == 1
    lines, backend, _, _ = answers[0]
    assert backend == (FEW_TOKENS.name if lines else FUSED.name)
    assert lines or "H200" not in torch.cuda.get_device_name()
    judge(case, [results for _, _, _, results in answers])


@pytest.mark.parametrize("backend", ["fused", "staged", "allgather", "collective"])
def test_mistakes_are_refused_and_the_exchange_still_works(ranks: GpuRanks, backend: str) -> None:
    if backend in ("allgather", "collective") and GPUS < RANKS:
        pytest.skip(f"{backend} uses NCCL, which needs a GPU for each rank: {GPUS} here")
    for rank, messages in enumerate(ranks.run(RANKS, on_rank.misuse_errors, SPEC, backend)):
        for mistake, expected in {
            "at once": f"dispatch on rank {rank} while a call",
            "taken": "rows are in the exchange's own memory, which a later dispatch has overwritten",
            "negative": "x is a negative view",
            "weights": "topk_weights is a negative view",
            "vmap": "dispatch inside torch.vmap",
            "closed": f"dispatch on rank {rank}: its world is closed",
        }.items():
            assert messages[mistake].startswith(expected), (mistake, messages[mistake])


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_dropped_exchanges_and_workspaces_free_their_memory(ranks: GpuRanks, backend: str) -> None:
    large = replace(SPEC, tokens=4096, hidden=4096)
    for free, messages in ranks.run(RANKS, on_rank.drop_without_close, large, backend):
        before, made, after_drop, after = free
        assert made < before - 200  # MiB: each has slots for 2 ranks, twice, 32 MiB each
        assert after_drop <= made + 16  # nothing is freed while a capture might be running
        assert after >= before - 16
        assert len(messages) == 2
        assert all("was dropped without close()" in text for text in messages)


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_an_exchange_may_be_dropped_during_a_capture(ranks: GpuRanks, backend: str) -> None:
    assert ranks.run(RANKS, on_rank.dropped_during_a_capture, SPEC, backend) == [True] * RANKS
