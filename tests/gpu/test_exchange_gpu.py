"""Test exchanges between GPU ranks. Moved rows of every backend must equal the plan; sums must agree with the oracle.

There are as many ranks as GPUs, at most four; a single GPU has two or three ranks. Ranks that share a GPU take turns by
time slices, about 5 ms a wait. So cases are small, and many go through one world.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import ConfigError  # noqa: E402
from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.spec import ExchangeSpec  # noqa: E402
from tests.gpu import exchange_ranks as on_rank  # noqa: E402
from tests.gpu import mixed_ranks  # noqa: E402
from tests.gpu.exchange_ranks import KINDS  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks, RankGone  # noqa: E402
from tests.unit.exchange.exchange_cases import ENGINE, MANY, ROUTINGS, Case, batches  # noqa: E402
from tests.unit.exchange.exchange_judge import (  # noqa: E402
    judge,
    judge_combine,
    judge_dispatch,
    judge_needed,
    judge_quantised,
)

pytestmark = NEEDS_GPU

WITH_WORKSPACE = ("fused", MANY, "staged", ENGINE)
QUANTISING = ("fused", MANY, "staged")
CAPTURABLE = (*WITH_WORKSPACE, "allgather")
BACKENDS = (*CAPTURABLE, "collective")
RANKS = max(2, min(4, GPUS))
SIZES = sorted({1, 2, 3 if GPUS < 2 else RANKS})
ELEMENTS = 150_000  # about the most elements of received rows that a rank sends to the judge in a step
TIMEOUT_S = 5.0
THREE_ROUNDINGS = (1 + 2**-8) ** 3 - 1
"""The error of three roundings to bfloat16 on the way home: of the expert's row, of a rank's sum, and of y."""

SMALL = ExchangeSpec(tokens=9, hidden=64, experts=2 * RANKS, topk=2, alignment=8)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    with GpuRanks(max(SIZES)) as started:
        yield started


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in ("allgather", "collective") and GPUS < 2:
        pytest.skip(f"{name} uses NCCL, which needs a GPU for each rank: {GPUS} here")
    if name in WITH_WORKSPACE and torch.cuda.get_device_capability() < FUSED_CAPABILITY:
        pytest.skip(f"{name} needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    return name


def capturable(backend: str) -> str:
    if backend not in CAPTURABLE:
        pytest.skip(f"{backend} waits for the host and cannot be captured; another test checks the refusal")
    return backend


def fits(size: int) -> int:
    """Return the ranks of a world for backends that need a GPU for each."""
    return min(size, GPUS)


def edges(backend: str, size: int) -> list[Case]:
    """Return one case for each limit of the contract."""
    routing = ("uniform", "repeated", "one", "none")
    specs = [
        ExchangeSpec(tokens=1, hidden=16384, experts=size, topk=1, dtype="float32"),
        ExchangeSpec(tokens=3, hidden=16384, experts=2 * size, topk=2),
        ExchangeSpec(tokens=33, hidden=8, experts=3 * size, topk=3, dtype="float16"),  # one piece of 16 bytes
        ExchangeSpec(tokens=33, hidden=4, experts=size, topk=1, dtype="float32"),
        ExchangeSpec(tokens=40, hidden=8 * 13, experts=5 * size, topk=5),  # an odd number of pieces
        ExchangeSpec(tokens=17, hidden=2880, experts=7 * size, topk=4),
        ExchangeSpec(tokens=21, hidden=64, experts=17 * size, topk=16, alignment=1),
        ExchangeSpec(tokens=21, hidden=64, experts=1020 // size * size, topk=8, alignment=1),
        ExchangeSpec(tokens=40, hidden=32, experts=3 * size, topk=2, alignment=128, padding="zero"),
        ExchangeSpec(tokens=40, hidden=32, experts=3 * size, topk=2, alignment=128, padding="zero", layout="rank"),
        ExchangeSpec(tokens=40, hidden=48, experts=3 * size, topk=2, layout="rank", dtype="float16"),
        ExchangeSpec(tokens=33, hidden=1500, experts=3 * size, topk=3, dtype="float32", wire={"combine": "bfloat16"}),
        ExchangeSpec(tokens=17, hidden=2880, experts=3 * size, topk=3, wire={"combine": "float32"}),
        ExchangeSpec(tokens=32, hidden=64, experts=4 * size, topk=2, alignment=16, capacity=size * 32 * 2 + 4 * 15),
        ExchangeSpec(tokens=700, hidden=16, experts=4 * size, topk=2),
    ]
    cases = [Case(size, spec, backend, routing, seed) for seed, spec in enumerate(specs)]
    cases[-2] = replace(cases[-2], routing=("uniform", "masked"), wide_topk_idx=False, prefix=True)
    return [*cases, *(replace(case, exact=True) for case in (cases[6], cases[9], cases[-1]))]


FEW_SMS = (2, 8, 24, 48)
"""Limits of SMs whose launches differ: by the roles of their blocks, and by how a combine takes rows."""


def on_few_sms(backend: str, size: int, sms: int) -> list[Case]:
    """Return cases of few tokens, and of so many that each warp has several rows."""
    specs = [
        ExchangeSpec(tokens=tokens, hidden=1024, experts=8 * size, topk=4, layout=layout, padding="zero")
        for tokens in (20, 200)
        for layout in ("expert", "rank")
    ]
    return [Case(size, spec, backend, ("uniform", "skewed"), seed, sms=sms) for seed, spec in enumerate(specs)]


def drawn(backend: str, size: int, seed: int, count: int) -> list[Case]:
    """Draw cases of all kinds, always the same for a seed."""
    rng, cases = np.random.default_rng((seed, size)), []
    while len(cases) < count:
        experts = size * int(rng.integers(1, 10))
        spec = ExchangeSpec(
            tokens=int(rng.integers(1, 70)),
            hidden=8 * int(rng.choice([1, 2, 3, 7, 8, 15, 25, 32, 125, 128, 360, 512])),
            experts=experts,
            topk=int(rng.integers(1, min(16, experts) + 1)),
            dtype=str(rng.choice(["bfloat16", "float16", "float32"])),
            layout=str(rng.choice(["expert", "rank"], p=[0.7, 0.3])),
            padding=str(rng.choice(["any", "zero"])),
            alignment=int(rng.choice([1, 3, 16, 128])),
        )
        if spec.tokens * spec.topk * spec.hidden < ELEMENTS:
            routing = tuple(str(kind) for kind in rng.choice(ROUTINGS, 4))
            flags = [bool(flag) for flag in rng.integers(0, 2, 6)]
            cases.append(Case(size, spec, backend, routing, int(rng.integers(2**16)), *flags))
    return cases


def judge_all(ranks: GpuRanks, cases: list[Case]) -> None:
    size = cases[0].ranks
    answers = ranks.run(size, on_rank.run_cases, cases)
    for index, case in enumerate(cases):
        try:
            judge(case, [answer[index] for answer in answers])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("size", SIZES)
def test_cases_at_the_limits_of_the_contract_are_right(ranks: GpuRanks, backend: str, size: int) -> None:
    judge_all(ranks, edges(backend, size))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_drawn_cases_are_right(ranks: GpuRanks, backend: str, size: int, seed: int) -> None:
    judge_all(ranks, drawn(backend, size, seed, count=10))


@pytest.mark.parametrize("sms", FEW_SMS)
def test_cases_on_few_sms_are_right(ranks: GpuRanks, backend: str, sms: int) -> None:
    if backend not in WITH_WORKSPACE:
        pytest.skip(f"{backend} has no limit of SMs")
    judge_all(ranks, on_few_sms(backend, RANKS, sms))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_larger_case_is_right(ranks: GpuRanks, backend: str, dtype: str) -> None:
    spec = ExchangeSpec(tokens=512, hidden=1024, experts=8 * RANKS, topk=4, dtype=dtype)
    judge_all(ranks, [Case(RANKS, spec, backend, ("skewed", "masked"), seed=5)])


QUANTISED = [
    # The first three have few tokens, whose rows travel in lines; the others go through slots. Rows of 200 and 264 end
    # in a block that is not full.
    ExchangeSpec(tokens=64, hidden=128, experts=3 * RANKS, topk=2, wire="float8_e4m3"),
    ExchangeSpec(tokens=40, hidden=200, experts=3 * RANKS, topk=2, wire="float8_e4m3"),
    ExchangeSpec(tokens=3, hidden=16384, experts=3 * RANKS, topk=2, wire="float8_e4m3"),
    ExchangeSpec(tokens=200, hidden=264, experts=3 * RANKS, topk=2, wire="float8_e4m3", dtype="float16"),
    ExchangeSpec(tokens=150, hidden=1024, experts=3 * RANKS, topk=1, wire="float8_e4m3"),
    ExchangeSpec(tokens=64, hidden=128, experts=3 * RANKS, topk=2, wire="float8_e4m3", output="raw"),
    ExchangeSpec(tokens=3, hidden=16384, experts=3 * RANKS, topk=2, wire="float8_e4m3", output="raw"),
    ExchangeSpec(tokens=200, hidden=272, experts=3 * RANKS, topk=2, wire="float8_e4m3", output="raw"),
    ExchangeSpec(tokens=60, hidden=272, experts=3 * RANKS, topk=2, wire="float8_e4m3", output="raw", layout="rank"),
]


@pytest.mark.parametrize(
    "spec", QUANTISED, ids=lambda spec: f"{spec.output}-{spec.layout}-{spec.tokens}x{spec.hidden}-{spec.dtype}"
)
def test_rows_cross_as_fp8(ranks: GpuRanks, backend: str, spec: ExchangeSpec) -> None:
    if backend not in QUANTISING:
        pytest.skip(f"{backend} sends rows in their own dtype; choice.why_not says so")
    judge_fp8(ranks, Case(RANKS, spec, backend, ("uniform", "masked", "one"), seed=spec.hidden))


@pytest.mark.parametrize("sms", FEW_SMS)
def test_rows_cross_as_fp8_on_few_sms(ranks: GpuRanks, sms: int) -> None:
    for spec in QUANTISED[:4]:
        judge_fp8(ranks, Case(RANKS, spec, "fused", ("uniform", "masked"), seed=spec.hidden, sms=sms))


def judge_fp8(ranks: GpuRanks, case: Case) -> None:
    answers = ranks.run(RANKS, on_rank.quantised_steps, case)
    for step in range(len(case.routing)):
        judge_quantised(case, [on_rank.with_zeros(batch) for batch in batches(case, step)], [a[step] for a in answers])


def test_raw_rows_of_an_odd_width_are_refused(ranks: GpuRanks, backend: str) -> None:
    if backend not in QUANTISING:
        pytest.skip(f"{backend} sends rows in their own dtype; choice.why_not says so")
    spec = replace(QUANTISED[1], output="raw")
    for error in ranks.run(RANKS, on_rank.error_of_spec, Case(RANKS, spec, backend, ("uniform",))):
        assert error == "output raw with hidden 200; rows of fp8 need a multiple of 16 elements"


def kinds_of(seed: int, steps: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [*KINDS, *(str(kind) for kind in rng.choice(KINDS, steps - len(KINDS)))]


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", SIZES)
def test_replays_and_eager_steps_mix_in_any_order(ranks: GpuRanks, backend: str, size: int, layout: str) -> None:
    spec = ExchangeSpec(tokens=19, hidden=104, experts=3 * size, topk=3, alignment=16, padding="zero", layout=layout)
    kinds = kinds_of(seed=size, steps=24)
    routing = tuple(ROUTINGS[step % len(ROUTINGS)] for step in range(len(kinds)))
    case = Case(size, spec, capturable(backend), routing, seed=size, prefix=True)
    answers = ranks.run(size, on_rank.replay, case, kinds, 0.3)
    for step, kind in enumerate(kinds):
        sent = batches(case, step)
        if kind != "eager":
            tokens = on_rank.smaller(spec) if kind == "smaller" else spec.tokens
            sent = [on_rank.padded(on_rank.cut(batch, tokens), tokens) for batch in sent]
        for rank in range(size):
            judge_dispatch(case, sent, rank, answers[rank][step])
            judge_combine(case, sent[rank], answers[rank][step].y)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_operations_run_in_halves(ranks: GpuRanks, backend: str, captured: bool) -> None:
    if backend not in WITH_WORKSPACE:
        pytest.skip(f"{backend} has no operation in halves")
    case = Case(RANKS, SMALL, backend, ("uniform", "none", "one", "masked"), seed=12, prefix=True)
    answers = ranks.run(RANKS, on_rank.in_halves, case, captured)
    for step in range(len(case.routing)):
        sent = [on_rank.padded(batch, SMALL.tokens) for batch in batches(case, step)]
        for rank in range(RANKS):
            judge_dispatch(case, sent, rank, answers[rank][step])
            judge_combine(case, sent[rank], answers[rank][step].y)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_no_launch_takes_more_sms_than_asked_for(ranks: GpuRanks, backend: str, tokens: int) -> None:
    if backend not in WITH_WORKSPACE:
        pytest.skip(f"{backend} launches NCCL's kernels and torch's")
    case = Case(RANKS, replace(SMALL, tokens=tokens), backend, ("none",), ragged=False)
    requested = [4, 16, "auto"]
    for found in ranks.run(RANKS, on_rank.sms_of_launches, case, requested):
        for want, (occupied, available) in zip(requested, found, strict=True):
            assert occupied is not None
            assert 1 <= occupied <= (available if want == "auto" else want)


def test_many_replays_with_late_ranks_are_right(ranks: GpuRanks, backend: str) -> None:
    steps = 100 if GPUS < 2 else 1000
    for worst, step in ranks.run(RANKS, on_rank.soak, soak_case(capturable(backend)), steps):
        assert worst <= THREE_ROUNDINGS, f"step {step}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_replays_with_late_ranks(ranks: GpuRanks, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.ranks.DEADLINE_S", 1700.0)
    for worst, step in ranks.run(RANKS, on_rank.soak, soak_case(capturable(backend)), 10_000):
        assert worst <= THREE_ROUNDINGS, f"step {step}"


def soak_case(backend: str) -> Case:
    spec = ExchangeSpec(tokens=64, hidden=256, experts=6 * RANKS, topk=4)
    return Case(RANKS, spec, backend, ROUTINGS * 3, seed=9, prefix=True)


def test_results_repeat_bit_for_bit(ranks: GpuRanks, backend: str) -> None:
    spec = ExchangeSpec(tokens=48, hidden=256, experts=4 * RANKS, topk=4, alignment=1)
    case = Case(RANKS, spec, backend, ("repeated", "skewed"), seed=3)
    assert ranks.run(RANKS, on_rank.repeat_a_step, case) == [[True] * 3] * RANKS


def test_several_dispatches_may_be_outstanding(ranks: GpuRanks, backend: str) -> None:
    case = Case(RANKS, SMALL, backend, ("uniform", "masked", "repeated"), seed=11)
    ys = ranks.run(RANKS, on_rank.combine_in_another_order, case)
    for rank in range(RANKS):
        for step in range(3):
            judge_combine(case, batches(case, step)[rank], ys[rank][step])


LAYERS = [
    SMALL,
    ExchangeSpec(tokens=5, hidden=512, experts=RANKS, topk=1, dtype="float32"),
    ExchangeSpec(tokens=30, hidden=24, experts=3 * RANKS, topk=3, dtype="float16", layout="rank"),
    ExchangeSpec(tokens=2, hidden=8, experts=2 * RANKS, topk=2),
]
ENGINE_LAYERS = [
    SMALL,
    replace(SMALL, hidden=32, experts=RANKS, topk=1, dtype="float32"),
    replace(SMALL, experts=3 * RANKS, topk=3, dtype="float16", layout="rank"),
]
"""Rows of one size: the copy engine needs them for exchanges that share a workspace."""


@pytest.mark.parametrize("shared", [True, False], ids=["one workspace", "two streams"])
def test_exchanges_run_side_by_side(ranks: GpuRanks, backend: str, shared: bool) -> None:
    if backend not in WITH_WORKSPACE:
        pytest.skip(f"{backend} has no workspace; NCCL's order of operations is one for all streams")
    specs = ENGINE_LAYERS if backend == ENGINE else LAYERS
    specs = specs if shared else specs[:2]
    cases = [Case(RANKS, spec, backend, ("uniform", "one", "masked"), seed) for seed, spec in enumerate(specs)]
    answers = ranks.run(RANKS, on_rank.side_by_side, cases, shared)
    for index, case in enumerate(cases):
        judge(case, [answer[index] for answer in answers])


def test_backends_take_turns_on_one_workspace(ranks: GpuRanks) -> None:
    if torch.cuda.get_device_capability() < FUSED_CAPABILITY:
        pytest.skip(f"needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    kinds = zip(LAYERS, ("staged", "fused", ENGINE, "fused"), strict=True)
    cases = [
        Case(RANKS, spec, kind, ("uniform", "one", "masked", "repeated"), seed)
        for seed, (spec, kind) in enumerate(kinds)
    ]
    answers = ranks.run(RANKS, on_rank.side_by_side, cases, True)
    for index, case in enumerate(cases):
        judge(case, [answer[index] for answer in answers])


def test_an_exchange_over_a_group_is_bound_to_the_group(ranks: GpuRanks, backend: str) -> None:
    groups = [[1, 0]] if RANKS < 4 else [[2, 0], [1, 3]]
    case = Case(2, replace(SMALL, experts=6), backend, ("uniform", "one", "masked"), seed=2)
    answers = ranks.run(RANKS if RANKS in (2, 4) else 2, on_rank.within_groups, groups, case)
    for group in groups:
        assert [answers[rank][0] for rank in group] == [0, 1]
        judge(case, [answers[rank][1] for rank in group])


FAULTS = [
    (("id", SMALL.experts), f"rank {RANKS - 1} asked for expert {SMALL.experts} for its token 2; ids are -1 to"),
    (("id", -2), f"rank {RANKS - 1} asked for expert -2 for its token 2"),
    (("id", 2**40), f"rank {RANKS - 1} asked for expert {2**40} for its token 2"),
    (("tokens", 10), f"num_tokens is 10 on rank {RANKS - 1}; x has 9 rows"),
    (("tokens", -1), f"num_tokens is -1 on rank {RANKS - 1}"),
    (("capacity", 0), f"rows, gaps included, came to rank {RANKS - 1}; its capacity is"),
]
"""Data of one rank that must be refused, and the error that all ranks raise."""


@pytest.mark.parametrize(
    ("fault", "says"), FAULTS, ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else ""
)
def test_all_ranks_refuse_bad_data_and_the_next_step_works(
    ranks: GpuRanks, backend: str, fault: tuple[str, int], says: str
) -> None:
    spec = replace(SMALL, capacity=RANKS * SMALL.tokens * SMALL.topk - 2) if fault[0] == "capacity" else SMALL
    middle = "one" if fault[0] == "capacity" else "uniform"
    case = Case(RANKS, spec, backend, ("masked", middle, "none"), seed=8, ragged=False)
    error_texts = []
    for rank, (found, after) in enumerate(ranks.run(RANKS, on_rank.refuse_and_go_on, case, fault)):
        error_texts.append(found["told"])
        assert says in found["told"]
        assert found["nan"], "y of a refused step must be NaN"
        assert found["outside"], "memory around the given memory was written"
        assert fault[0] != "capacity" or rank != RANKS - 1 or not any(found["counts"])
        judge_combine(case, batches(case, 2)[rank], after.y)
    assert len(set(error_texts)) == 1


@pytest.mark.parametrize("kind", ["dispatch", "weighted", "site", "gradients"])
def test_combines_that_differ_between_ranks_are_refused(ranks: GpuRanks, backend: str, kind: str) -> None:
    case = Case(RANKS, SMALL, backend, ("uniform", "masked"), seed=4)
    last = RANKS - 1
    expected = f"rank 0 combines its dispatch 1 and rank {last} its dispatch 2"
    if kind == "site":
        expected = f"rank 0 combines rows of call site 5 and rank {last} rows of call site 7"
    elif kind == "gradients":
        expected = f"rank 0 combines dispatch 1 with weighted=True and rank {last} with gradients"
    elif kind == "weighted":
        expected = f"rank 0 combines dispatch 1 with weighted=True and rank {last} with weighted=False"
    for rank, found in enumerate(ranks.run(RANKS, mixed_ranks.mixed_combines, case, kind)):
        assert found["told"].startswith(expected)
        assert found["nan"]
        judge_combine(case, batches(case, 1)[rank], found["y"])


@pytest.mark.parametrize("kind", ["order", "site"])
def test_backward_passes_that_differ_between_ranks_are_refused(ranks: GpuRanks, backend: str, kind: str) -> None:
    case, last = Case(RANKS, SMALL, backend, ("uniform", "masked"), seed=4, ragged=False), RANKS - 1
    expected = [f"rank 0 runs the backward pass of call site 1 and rank {last} of call site 7"]
    if kind == "order":
        expected = [
            f"rank 0 runs the backward pass of its dispatch {first} and rank {last} of its dispatch {3 - first}"
            for first in (1, 2)
        ]
    for found in ranks.run(RANKS, mixed_ranks.mixed_backward, case, kind):
        rule = "; all ranks run backward passes in one order"
        assert found["told"] == [text + rule for text in expected]
        assert all(found["nan"])
        assert found["right"]


def test_a_backward_pass_of_some_ranks_is_refused_by_all_at_once(ranks: GpuRanks, backend: str) -> None:
    case, last = Case(RANKS, SMALL, backend, ("uniform", "masked"), seed=4, ragged=False), RANKS - 1
    said = f"rank 0 runs the backward pass of its dispatch 1 and rank {last} no backward pass; all ranks run the same"
    for rank, found in enumerate(ranks.run(RANKS, mixed_ranks.left_out_backward, case)):
        assert found["told"][0] == "" if rank == last else found["told"][0].startswith(said)
        assert found["told"][1].startswith(f"rank 0 combines its dispatch 1 and rank {last} its dispatch 2; all ranks")
        assert all(found["nan"])
        judge_combine(case, batches(case, 1)[rank], found["y"])


def test_garbage_of_a_closed_exchange_may_be_freed_inside_a_capture(ranks: GpuRanks, backend: str) -> None:
    case = Case(RANKS, SMALL, capturable(backend), ("uniform", "masked", "one"), seed=3, prefix=True)
    answers = ranks.run(RANKS, on_rank.collect_garbage_inside_captures, case)
    for step in range(len(case.routing)):
        sent = [on_rank.padded(batch, SMALL.tokens) for batch in batches(case, step)]
        for rank in range(RANKS):
            judge_dispatch(case, sent, rank, answers[rank][step])
            judge_combine(case, sent[rank], answers[rank][step].y)


def test_replays_of_bad_data_are_refused_and_good_ones_work(ranks: GpuRanks, backend: str) -> None:
    case = Case(RANKS, SMALL, capturable(backend), ("uniform",) * 5, seed=6, ragged=False)
    for steps in ranks.run(RANKS, on_rank.refuse_in_replay, case):
        expected = f"rank 0 asked for expert {SMALL.experts} for its token 0; ids are -1 to {SMALL.experts - 1}"
        assert steps == [("", False, False), (expected, True, True)] * 2 + [("", False, False)]


@pytest.mark.parametrize("layout", ["expert", "rank", "token"])
def test_replays_tell_the_rows_needed_where_they_fit_and_where_not(ranks: GpuRanks, backend: str, layout: str) -> None:
    """Backend `collective` runs the same steps eagerly."""
    capacity = RANKS * SMALL.tokens * (1 if layout == "token" else SMALL.topk) - 1
    routings = ("uniform", "one", "skewed", "none", "one", "masked")
    spec = replace(SMALL, layout=layout, capacity=capacity)
    case = Case(RANKS, spec, backend, routings, seed=5, ragged=False, weighted=layout != "token")
    judge_needed(case, ranks.run(RANKS, on_rank.rows_needed, case, backend in CAPTURABLE))


def test_misuse_is_refused_before_anything_is_sent(ranks: GpuRanks, backend: str) -> None:
    case = Case(RANKS, SMALL, backend, ("uniform",), seed=4, ragged=False)
    no_capture = "dispatch by collective cannot be captured"
    expected = [
        "x is on cpu; this world's ranks are on cuda:0",
        "x begins 2 bytes after a multiple of 16",
        "num_tokens is on cpu",
        "num_tokens is 10; x has 9 rows",
        "num_tokens is 1 inside a capture" if backend in CAPTURABLE else no_capture,
        "x has shape [9, 8]; [any, 64] is needed" if backend in CAPTURABLE else no_capture,
        "an exchange cannot be made inside a capture",
        "check waits for the device",
    ]
    for errors in ranks.run(RANKS, on_rank.misuse_errors, case):
        assert len(errors) == len(expected)
        for sentence, fragment in zip(errors, expected, strict=True):
            assert fragment in sentence


@pytest.mark.skipif(GPUS != 1, reason="needs ranks that share the only GPU")
@pytest.mark.parametrize("name", ["collective", "allgather"])
def test_nccl_backends_refuse_shared_gpus(ranks: GpuRanks, name: str) -> None:
    case = Case(2, SMALL, name, ("uniform",))
    for outcome in ranks.outcomes(2, on_rank.run_cases, [case]):
        assert isinstance(outcome, ConfigError)
        assert "ranks 0 and 1 share GPU" in str(outcome)
        assert "take fused or staged" in str(outcome)


@pytest.mark.parametrize("how", ["killed", "stopped", "late"])
def test_a_peer_that_does_not_come_is_named(
    ranks: GpuRanks, backend: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(RANKS, SMALL, backend, ("uniform",) * 2)
    ranks.run(RANKS, on_rank.run_cases, [case])  # starts processes and loads kernels: only waits follow
    monkeypatch.setattr("tests.gpu.ranks.DEADLINE_S", TIMEOUT_S + 15)  # a stopped process never answers
    outcomes = ranks.outcomes(RANKS, on_rank.lose_rank_1, case, how, timeout_s=TIMEOUT_S)
    assert isinstance(outcomes[1], RankGone) == (how != "late"), outcomes
    for rank, found in enumerate(outcomes):
        if rank != 1:
            assert isinstance(found, dict), found
            assert (found["peer"], found["rank"]) == (1, rank)
            assert found["waited"] < TIMEOUT_S + 3
            assert found["again"] < 0.5, "after a failure, calls fail at once"


def test_abort_ends_a_wait_within_a_second(ranks: GpuRanks, backend: str) -> None:
    elapsed, *_ = ranks.outcomes(2, on_rank.abort_a_wait, Case(2, SMALL, backend, ("uniform",) * 2))
    assert isinstance(elapsed, float), elapsed
    assert 0 <= elapsed < 1
