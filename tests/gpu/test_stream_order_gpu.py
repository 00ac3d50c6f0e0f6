"""Test exchanges on several streams: ordered, or refused with a sentence; side by side if they fit on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from tests.gpu import stream_ranks as on_rank  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.exchange.exchange_cases import ENGINE, MANY, Case, batches  # noqa: E402
from tests.unit.exchange.exchange_judge import judge, judge_combine, judge_dispatch  # noqa: E402

pytestmark = NEEDS_GPU

RANKS = max(1, min(2, GPUS))
SPEC = ExchangeSpec(tokens=33, hidden=256, experts=4 * RANKS, topk=2)
ROUTING = ("uniform", "masked", "one", "uniform")


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    if torch.cuda.get_device_capability() < FUSED_CAPABILITY:
        pytest.skip(f"needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    with GpuRanks(2) as started:
        yield started


@pytest.fixture(params=["fused", MANY, "staged", ENGINE])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(RANKS, SPEC, request.param, ROUTING, seed=3)


def test_a_second_stream_is_ordered_after_the_last_operation(ranks: GpuRanks, case: Case) -> None:
    judge(case, ranks.run(RANKS, on_rank.alternating, case))


@pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each rank; {GPUS} here")
@pytest.mark.parametrize("backend", ["collective", "allgather"])
def test_nccl_backends_on_a_second_stream_are_ordered_too(ranks: GpuRanks, backend: str) -> None:
    case = Case(RANKS, SPEC, backend, ROUTING, seed=3)
    judge(case, ranks.run(RANKS, on_rank.alternating, case))


def test_memory_is_kept_for_a_second_stream(ranks: GpuRanks, case: Case) -> None:
    answers = ranks.run(RANKS, on_rank.free_on_another_stream, case)
    for rank, ys in enumerate(answers):
        for y in ys:
            judge_combine(case, batches(case, 0)[rank], y)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_metadata_is_kept_for_the_stream_of_a_differentiable_combine(ranks: GpuRanks, case: Case, grad: bool) -> None:
    for same in ranks.run(RANKS, on_rank.drop_between_two_streams, case, grad):
        assert same == [True] * 3


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("backend", ["collective", "allgather"])
def test_metadata_of_nccl_backends_is_kept_for_a_differentiable_combine(
    ranks: GpuRanks, backend: str, grad: bool
) -> None:
    case = Case(RANKS, SPEC, backend, ROUTING, seed=3)
    for same in ranks.run(RANKS, on_rank.drop_between_two_streams, case, grad):
        assert same == [True] * 3


def test_two_exchanges_of_one_workspace_on_two_streams_are_ordered(ranks: GpuRanks) -> None:
    case = Case(RANKS, SPEC, "fused", ROUTING, seed=4)
    judge(case, ranks.run(RANKS, on_rank.one_workspace, case))


def test_a_capture_works_after_a_warm_up_on_another_stream(ranks: GpuRanks, case: Case) -> None:
    answers = ranks.run(RANKS, on_rank.capture_after_warm_up, case)
    for found in range(2):
        for rank in range(RANKS):
            judge_dispatch(case, batches(case, 0), rank, answers[rank][found])
            judge_combine(case, batches(case, 0)[rank], answers[rank][found].y)


def test_two_streams_of_one_capture_are_ordered(ranks: GpuRanks, case: Case) -> None:
    answers = ranks.run(RANKS, on_rank.capture_on_two_streams, case)
    for rank in range(RANKS):
        judge_dispatch(case, batches(case, 0), rank, answers[rank][0])
        judge_combine(case, batches(case, 0)[rank], answers[rank][0].y)


def test_a_capture_beside_an_eager_operation_is_refused(ranks: GpuRanks, case: Case) -> None:
    (message,) = ranks.run(1, on_rank.capture_while_busy, replace(case, ranks=1))
    assert "dispatch is captured while an operation on the same workspace may still run on another stream" in message


def test_exchanges_that_do_not_fit_together_are_refused(ranks: GpuRanks) -> None:
    spec = replace(SPEC, tokens=4096, hidden=1024)
    ((message, sms),) = ranks.run(1, on_rank.use_all_sms_twice, Case(1, spec, MANY, ("uniform",), ragged=False))
    assert f"takes {sms} SMs while an exchange on another stream may hold {sms} of the {sms}" in message
    assert f"make both with sms={sms // 2}" in message


@pytest.mark.parametrize("tokens", [33, 4096])
def test_exchanges_that_fit_run_side_by_side_in_both_orders(ranks: GpuRanks, tokens: int) -> None:
    spec = replace(SPEC, tokens=tokens, experts=8)
    case = Case(2, spec, "fused", ("uniform", "masked"), seed=6, ragged=False)
    answers = ranks.run(2, on_rank.side_by_side, case, 4 if GPUS < 2 else 8)
    for index, (first, second) in enumerate(zip(*answers, strict=True)):
        for exchange in range(2):
            sent = batches(case, index % 2)
            for rank, found in enumerate((first, second)):
                judge_combine(case, sent[rank], found[exchange].y)


def test_an_exchange_must_fit_the_sms_of_its_green_context(ranks: GpuRanks) -> None:
    case = Case(1, replace(SPEC, tokens=4096), MANY, ("uniform", "masked"), ragged=False)
    ((message, results),) = ranks.run(1, on_rank.in_a_green_context, case)
    judge(case, [results])
    assert "its stream has 16 (a green context): make the exchange with sms=16" in message
