"""Test limits of exchanges between GPU ranks.

Eight ranks on one GPU, heaps above 4 GiB, all limits of a spec at once, numbers that are hard to quantise, and ranks
that call different operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from tests.gpu import exchange_ranks as on_rank  # noqa: E402
from tests.gpu import limit_ranks  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.exchange.exchange_cases import ENGINE, MANY, Case, batches  # noqa: E402
from tests.unit.exchange.exchange_judge import judge, judge_combine, judge_odd_blocks, judge_quantised  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY,
        reason=f"needs a GPU of compute capability {FUSED_CAPABILITY}",
    ),
]

EIGHT, RANKS = 8, 3
BACKENDS = ("fused", MANY, "staged", ENGINE)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(RANKS) as started:
        yield started


def test_eight_ranks_share_one_gpu() -> None:
    """The ranks take turns by time slices, so a step takes long: two steps for each backend."""
    spec = ExchangeSpec(tokens=5, hidden=64, experts=2 * EIGHT, topk=3, alignment=4)
    cases = [Case(EIGHT, spec, name, ("uniform", "masked"), seed=8) for name in ("fused", MANY, "staged")]
    with mock.patch("tests.gpu.ranks.GPUS", 1), GpuRanks(EIGHT) as started:
        answers = started.run(EIGHT, limit_ranks.steps_of, cases, timeout_s=60.0)
    for index, case in enumerate(cases):
        judge(case, [answer[index] for answer in answers])


@pytest.mark.parametrize("backend", ["fused", "staged"])
def test_rows_in_a_heap_above_4_gib_are_right(ranks: GpuRanks, backend: str) -> None:
    spec = ExchangeSpec(tokens=36_000, hidden=16384, experts=2, topk=1, alignment=1, capacity=64)
    for result in ranks.run(2, limit_ranks.far_rows, Case(2, spec, backend, ("uniform",)), 3):
        assert result["bytes"] > 2 * 2**32  # 4 GiB for the rows of each direction
        assert result["alike"] == [True] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_limits_of_a_spec_work_at_once(ranks: GpuRanks, backend: str) -> None:
    spec = ExchangeSpec(tokens=5, hidden=16384, experts=1024, topk=16, alignment=1)
    case = Case(2, spec, backend, ("uniform", "skewed"), seed=4)
    judge(case, ranks.run(2, on_rank.run_case, case))


@pytest.mark.parametrize("output", ["raw", "dequantised"])
@pytest.mark.parametrize("backend", ["fused", MANY])
def test_all_limits_of_a_spec_work_as_fp8(ranks: GpuRanks, backend: str, output: str) -> None:
    fp8 = {"wire": "float8_e4m3", "output": output}
    spec = ExchangeSpec(tokens=5, hidden=16384, experts=1024, topk=16, alignment=1, **fp8)
    case = Case(2, spec, backend, ("uniform",), seed=4)
    answers = ranks.run(2, on_rank.quantised_steps, case)
    judge_quantised(case, [on_rank.with_zeros(batch) for batch in batches(case, 0)], [each[0] for each in answers])


@pytest.mark.parametrize("output", ["raw", "dequantised"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", ["fused", MANY, "staged"])
def test_an_element_that_is_hard_to_scale_changes_no_other(
    ranks: GpuRanks, backend: str, dtype: str, output: str
) -> None:
    fp8 = {"wire": "float8_e4m3", "output": output, "dtype": dtype}
    spec = ExchangeSpec(tokens=1, hidden=33 * 128, experts=2, topk=2, alignment=1, **fp8)
    for x, scales in ranks.run(2, limit_ranks.odd_rows, Case(2, spec, backend, ("uniform",))):
        for source in range(2):
            sent = limit_ranks.odd_blocks(getattr(torch, dtype)).view(1, -1)
            judge_odd_blocks(sent, x[source : source + 1], None if scales is None else scales[source : source + 1])


SMALL = ExchangeSpec(tokens=9, hidden=64, experts=2 * RANKS, topk=2, alignment=8)
DIFFERENT = {
    "dispatch": "rank 0 combines its dispatch 2 and rank 2 its dispatch 1; all ranks combine the same dispatch",
    "weighted": "rank 0 combines dispatch 2 with weighted=True and rank 2 with weighted=False; all ranks give the same",
}


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_refuse_combines_that_differ(ranks: GpuRanks, backend: str, difference: str) -> None:
    case = Case(RANKS, SMALL, backend, ("uniform",) * 3, seed=8)
    for rank, (result, after) in enumerate(ranks.run(RANKS, limit_ranks.combine_differently, case, difference)):
        assert result["told"].startswith(DIFFERENT[difference])
        assert result["nan"]
        judge_combine(case, batches(case, 2)[rank], after.y)


@pytest.mark.parametrize("backend", ["fused", MANY])
def test_replayed_combines_of_different_dispatches_are_refused(ranks: GpuRanks, backend: str) -> None:
    case = Case(RANKS, SMALL, backend, ("uniform", "skewed", "masked"), seed=3)
    expected = "rank 0 combines its dispatch 4 and rank 2 its dispatch 3; all ranks combine the same dispatch"
    assert ranks.run(RANKS, limit_ranks.replay_differently, case) == [["", expected, ""]] * RANKS


@pytest.mark.parametrize("silent", [0, 2])
@pytest.mark.parametrize("backend", ["fused", MANY])
def test_a_rank_that_sends_no_sums_is_named_by_all_others(ranks: GpuRanks, backend: str, silent: int) -> None:
    spec = ExchangeSpec(tokens=9, hidden=64, experts=RANKS, topk=RANKS)  # every token goes to every rank
    case = Case(RANKS, spec, backend, ("uniform",) * 2, ragged=False)
    ranks.run(RANKS, on_rank.run_cases, [case])  # loads kernels: only waits follow
    result = ranks.run(RANKS, limit_ranks.sums_left_out, case, silent, timeout_s=4.0)
    assert result == [None if rank == silent else (rank, silent, "combine", 2) for rank in range(RANKS)]
