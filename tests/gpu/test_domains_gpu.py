"""Test rails and exchanges between domains of GPU ranks. Domains are pretended: all ranks are on one machine.

Two domains have one rank each, or two. Ranks share a GPU where there are too few. NCCL goes by sockets between domains,
so no test is about speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.exchange.domains.chunks import SMS_BESIDE  # noqa: E402
from raymoe.exchange.spec import FP8, ExchangeSpec  # noqa: E402
from tests.gang import configs  # noqa: E402
from tests.gang.conftest import Start  # noqa: E402
from tests.gang.nodes import cluster  # noqa: E402
from tests.gpu import domain_ranks, mixed_ranks  # noqa: E402
from tests.gpu import exchange_ranks as on_rank  # noqa: E402
from tests.gpu.exchange_ranks import KINDS  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks, RankGone  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402
from tests.gpu.test_layer_gpu import run_captured, run_layer  # noqa: E402
from tests.unit.exchange.exchange_cases import CHUNKED, ENGINE, MANY, ROUTINGS, Case, batches  # noqa: E402
from tests.unit.exchange.exchange_judge import (  # noqa: E402
    judge,
    judge_combine,
    judge_dispatch,
    judge_needed,
    judge_quantised,
)
from tests.unit.moe.gradient_cases import (  # noqa: E402
    judge_gradients,
    judge_refused_gradients,
    refuse_gradients,
    run_gradients,
)

HOPPER = torch.cuda.get_device_capability() >= FUSED_CAPABILITY if GPUS else False
pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300)]

WITH_KERNELS = ("fused", MANY, CHUNKED, "staged", ENGINE)
BACKENDS = (*WITH_KERNELS, "allgather")


def inside(*names: str) -> pytest.MarkDecorator:
    """Give the test these backends inside domains."""
    return pytest.mark.parametrize("backend", names, indirect=True)


TIMEOUT_S = 10.0
MOST_S = 2.5 * TIMEOUT_S  # until every rank has raised: a wait of kernels, its margin, and slow turns on a shared GPU


class Domains:
    """Ranks of two domains, each in a process of its own. NCCL reads its host id once in a process."""

    def __init__(self, size: int) -> None:
        self.size, self.ranks = size, 2 * size
        self._started = GpuRanks(self.ranks)

    def run(self, *given: object, **options: object) -> list:
        return self._started.run(self.ranks, *given, domain_size=self.size, **options)  # type: ignore[arg-type]

    def outcomes(self, *given: object, **options: object) -> list:
        return self._started.outcomes(self.ranks, *given, domain_size=self.size, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        self._started.__exit__()


@pytest.fixture(scope="module", params=[1, 2], ids=["2x1", "2x2"])
def domains(request: pytest.FixtureRequest) -> Iterator[Domains]:
    started = Domains(request.param)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of one GPU take turns, and the first of them compile every kernel."""
    monkeypatch.setattr("tests.gpu.ranks.DEADLINE_S", 150.0)


@pytest.fixture
def backend(request: pytest.FixtureRequest, domains: Domains) -> str:
    name: str = request.param
    if name == "allgather" and domains.size > 1 and domains.ranks > GPUS:
        pytest.skip(f"allgather uses NCCL inside a domain, which needs a GPU for each rank: {GPUS} here")
    if name in WITH_KERNELS and not HOPPER:
        pytest.skip(f"{name} needs compute capability {FUSED_CAPABILITY}: {torch.cuda.get_device_name()} is older")
    return name


def spec_for(domains: Domains, **changes: object) -> ExchangeSpec:
    return replace(ExchangeSpec(tokens=9, hidden=64, experts=2 * domains.ranks, topk=2, alignment=8), **changes)


def test_a_rail_gathers_and_swaps_eagerly_and_in_replays(domains: Domains) -> None:
    size, answers = domains.size, domains.run(domain_ranks.use_rail)
    for rank, found in enumerate(answers):
        rail = [rank % size, rank % size + size]
        for value, (gathered, received) in zip((1, 2, 3, 4), found["results"], strict=True):
            assert gathered == [each for peer in rail for each in (value, peer, -peer)]
            assert received == [each for peer in rail for each in (peer, value * (rank // size))]
        assert found["capturable"]
        assert found["lagging"] in set(rail) - {rank}
    ids = [found["host id"] for found in answers]
    assert all(ids) and len({*ids[:size]} & {*ids[size:]}) == 0


def cases_for(domains: Domains, backend: str) -> list[Case]:
    """Return a case for each layout, with and without gaps, and for each dtype."""
    specs = [
        spec_for(domains),
        spec_for(domains, layout="rank", padding="zero", alignment=16),
        spec_for(domains, tokens=33, hidden=104, topk=4, alignment=1, dtype="float16"),
        spec_for(domains, tokens=17, experts=5 * domains.ranks, topk=3, alignment=1, layout="rank"),
        spec_for(domains, dtype="float32", padding="zero", alignment=4, wire={"combine": "bfloat16"}),
        spec_for(domains, wire={"combine": "float32"}, hidden=24),
        spec_for(domains, tokens=1, hidden=2880, topk=1, alignment=1, capacity=2 * domains.ranks),
    ]
    flags = [(True, False, True, False, True), (True, True, False, True, False), (False, True, True, False, True)]
    return [
        Case(domains.ranks, spec, backend, ROUTINGS, 3 + number, *flags[number % len(flags)])
        for number, spec in enumerate(specs)
    ]


def judge_all(cases: list[Case], answers: list) -> None:
    for index, case in enumerate(cases):
        try:
            judge(case, [answer[index] for answer in answers])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@inside(*BACKENDS)
def test_every_routing_matches_plan_and_oracle(domains: Domains, backend: str) -> None:
    cases = cases_for(domains, backend)
    judge_all(cases, domains.run(on_rank.run_cases, cases))


@inside("fused", CHUNKED, "staged", "allgather")
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_replays_and_eager_steps_mix_in_any_order(domains: Domains, backend: str, layout: str) -> None:
    spec = spec_for(domains, tokens=19, hidden=104, topk=3, alignment=16, padding="zero", layout=layout)
    kinds = [*KINDS, "whole", "parts", "whole"]
    routing = tuple(ROUTINGS[step % len(ROUTINGS)] for step in range(len(kinds)))
    case = Case(domains.ranks, spec, backend, routing, seed=domains.ranks, prefix=True)
    answers = domains.run(on_rank.replay, case, kinds, 0.2)
    for step, kind in enumerate(kinds):
        sent = batches(case, step)
        if kind != "eager":
            tokens = on_rank.smaller(spec) if kind == "smaller" else spec.tokens
            sent = [on_rank.padded(on_rank.cut(batch, tokens), tokens) for batch in sent]
        for rank in range(domains.ranks):
            judge_dispatch(case, sent, rank, answers[rank][step])
            judge_combine(case, sent[rank], answers[rank][step].y)


@inside("fused", CHUNKED)
def test_results_repeat_and_several_dispatches_may_be_outstanding(domains: Domains, backend: str) -> None:
    case = Case(domains.ranks, spec_for(domains), backend, ("uniform", "masked", "repeated"), seed=11)
    assert domains.run(on_rank.repeat_a_step, case) == [[True] * 3] * domains.ranks
    for rank, ys in enumerate(domains.run(on_rank.combine_in_another_order, case)):
        for step in range(3):
            judge_combine(case, batches(case, step)[rank], ys[step])


FAULTS = [("id", 2**40), ("tokens", 10), ("tokens", -1), ("capacity", 0)]


@inside("fused", CHUNKED, "allgather")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1]}")
def test_all_ranks_of_all_domains_refuse_bad_data_and_the_next_step_works(
    domains: Domains, backend: str, fault: tuple[str, int]
) -> None:
    last, spec = domains.ranks - 1, spec_for(domains)
    says = {
        "id": f"rank {last} asked for expert {2**40} for its token 2; ids are -1 to {spec.experts - 1}",
        "tokens": f"num_tokens is {fault[1]} on rank {last}; x has 9 rows",
        "capacity": f"rows, gaps included, came to rank {last}; its capacity is",
    }[fault[0]]
    if fault[0] == "capacity":
        spec = replace(spec, alignment=1, capacity=domains.ranks * spec.tokens * spec.topk - 2)
    middle = "one" if fault[0] == "capacity" else "uniform"
    case = Case(domains.ranks, spec, backend, ("masked", middle, "none"), seed=8, ragged=False)
    told = set()
    for rank, (found, after) in enumerate(domains.run(on_rank.refuse_and_go_on, case, fault)):
        told.add(found["told"])
        assert says in found["told"]
        assert found["nan"], "y of a refused step must be NaN"
        assert found["outside"], "memory around the given memory was written"
        judge_combine(case, batches(case, 2)[rank], after.y)
    assert len(told) == 1


@inside("fused", CHUNKED, "staged")
def test_replays_of_bad_data_are_refused_and_good_ones_work(domains: Domains, backend: str) -> None:
    spec = spec_for(domains)
    case = Case(domains.ranks, spec, backend, ("uniform",) * 5, seed=6, ragged=False)
    for steps in domains.run(on_rank.refuse_in_replay, case):
        expected = f"rank 0 asked for expert {spec.experts} for its token 0; ids are -1 to {spec.experts - 1}"
        assert steps == [("", False, False), (expected, True, True)] * 2 + [("", False, False)]


@inside("fused", CHUNKED, "staged")
def test_replays_tell_the_rows_needed_where_they_fit_and_where_not(domains: Domains, backend: str) -> None:
    spec = spec_for(domains)
    spec = replace(spec, alignment=1, capacity=domains.ranks * spec.tokens * spec.topk - 2)
    case = Case(domains.ranks, spec, backend, ("uniform", "one", "none", "one", "masked"), seed=5, ragged=False)
    judge_needed(case, domains.run(on_rank.rows_needed, case, True))


@inside("fused", MANY, CHUNKED, "allgather")
@pytest.mark.parametrize("kind", ["dispatch", "weighted", "site"])
def test_combines_that_differ_between_ranks_are_refused(domains: Domains, backend: str, kind: str) -> None:
    case = Case(domains.ranks, spec_for(domains), backend, ("uniform", "masked"), seed=4)
    last = domains.ranks - 1
    expected = f"rank 0 combines its dispatch 1 and rank {last} its dispatch 2"
    if kind == "weighted":
        expected = f"rank 0 combines dispatch 1 with weighted=True and rank {last} with weighted=False"
    elif kind == "site":
        expected = f"rank 0 combines rows of call site 5 and rank {last} rows of call site 7"
    for rank, found in enumerate(domains.run(mixed_ranks.mixed_combines, case, kind)):
        assert found["told"].startswith(expected)
        assert found["nan"]
        judge_combine(case, batches(case, 1)[rank], found["y"])


@inside("fused", MANY, CHUNKED, "staged", "allgather")
@pytest.mark.parametrize("kind", ["order", "site"])
def test_backward_passes_that_differ_between_ranks_are_refused(domains: Domains, backend: str, kind: str) -> None:
    case = Case(domains.ranks, spec_for(domains), backend, ("uniform", "masked"), seed=4, ragged=False)
    for found in domains.run(mixed_ranks.mixed_backward, case, kind):
        assert len(found["told"]) == (2 if kind == "order" else 1)
        assert all(
            text.startswith("ranks of this world run the backward passes of different") for text in found["told"]
        )
        assert all(found["nan"])
        assert found["right"]


def test_rows_quantised_by_torch_are_those_of_the_kernels(domains: Domains) -> None:
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    assert domains.run(domain_ranks.quantise_both_ways) == [[True, True]] * domains.ranks


@inside("fused", MANY, CHUNKED, "staged")
@pytest.mark.parametrize(("layout", "output"), [("expert", "dequantised"), ("expert", "raw"), ("rank", "raw")])
def test_rows_cross_as_fp8(domains: Domains, backend: str, layout: str, output: str) -> None:
    for alignment in (1, 8):
        spec = spec_for(domains, hidden=272, wire=FP8, layout=layout, output=output, alignment=alignment)
        case = Case(domains.ranks, spec, backend, ("uniform", "masked", "one"), seed=alignment)
        answers = domains.run(on_rank.quantised_steps, case)
        for step in range(len(case.routing)):
            sent = [on_rank.with_zeros(batch) for batch in batches(case, step)]
            judge_quantised(case, sent, [answer[step] for answer in answers])


@inside("fused", MANY, CHUNKED, "staged")
def test_replays_of_rows_as_fp8_equal_eager_steps(domains: Domains, backend: str) -> None:
    spec = spec_for(domains, hidden=144, wire=FP8, padding="zero")
    case = Case(domains.ranks, spec, backend, ("uniform", "masked", "repeated"), seed=2, ragged=False)
    answers = domains.run(domain_ranks.replay_quantised, case)
    for step in range(len(case.routing)):
        judge_quantised(case, batches(case, step), [answer[step][1] for answer in answers])
        for answer in answers:
            replayed, eager = answer[step]
            assert (replayed.offsets, replayed.counts) == (eager.offsets, eager.counts)
            assert (replayed.x == eager.x).all() and (replayed.y == eager.y).all()


def gradient_spec(domains: Domains, **changes: object) -> ExchangeSpec:
    return spec_for(domains, tokens=19, topk=3, dtype="float32", padding="zero", **changes)


@inside(*BACKENDS)
@pytest.mark.parametrize(("layout", "alignment"), [("expert", 8), ("rank", 1)])
def test_gradients_equal_autograd_in_float64(domains: Domains, backend: str, layout: str, alignment: int) -> None:
    spec = gradient_spec(domains, layout=layout, alignment=alignment)
    for weighted in (True, False):
        case = Case(domains.ranks, spec, backend, ROUTINGS, seed=3, weighted=weighted, prefix=True)
        judge_gradients(case, domains.run(run_gradients, case), 2e-6)


@inside("fused", MANY, CHUNKED, "staged", "allgather")
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_captured_gradients_are_replayed_with_other_routing(domains: Domains, backend: str, layout: str) -> None:
    case = Case(domains.ranks, gradient_spec(domains, layout=layout), backend, ROUTINGS, seed=7, ragged=False)
    judge_gradients(case, domains.run(domain_ranks.replay_gradients, case), 2e-6)


@inside("fused", MANY, CHUNKED, "allgather")
def test_refused_gradients_are_nan_on_all_ranks_and_the_next_step_works(domains: Domains, backend: str) -> None:
    spec, last = gradient_spec(domains), domains.ranks - 1
    says = f"rank {last} asked for expert {spec.experts} for its token 1; ids are -1 to {spec.experts - 1}"
    for found in domains.run(refuse_gradients, Case(domains.ranks, spec, backend, ())):
        judge_refused_gradients(found, says)


def test_a_layer_equals_one_on_the_cpu_and_its_forward_pass_is_captured(domains: Domains) -> None:
    for errors in domains.run(run_layer):
        assert max(errors.values()) <= 5e-2, errors
    assert domains.run(run_captured) == [[True] * 3] * domains.ranks


@inside("fused", "staged", "allgather")
def test_workload_layer_is_captured_and_verified_with_its_backward_pass(domains: Domains, backend: str) -> None:
    given = {
        "name": "test",
        "workload": "layer",
        "world": {"ranks": domains.ranks, "domain": domains.size, "device": "cuda", "share_gpu": domains.ranks > GPUS},
        "shape": {"tokens": 300, "hidden": 512, "ffn": 256, "experts": 16, "topk": 4},
        "layer": {"shared": 256, "router": {"kind": "sigmoid", "groups": 4, "topk_groups": 2}, "backward": True},
        "exchange": {"backend": backend},
        "steps": {"warmup": 1, "count": 2},
    }
    lines = domains.run(run, given)[0]
    assert all(line["verified"] and line["graph"] and line["domains"] == 2 for line in lines)
    sent = {line["op"]: line["bytes_net"] for line in lines}
    assert sent["dispatch"] > 0 and sent["combine"] > 0 and sent["step"] is None and sent["experts"] is None
    assert {"dispatch_backward", "combine_backward"} <= sent.keys()


LOSSES = [("fused", False), ("fused", True), (CHUNKED, False), (CHUNKED, True)]


@pytest.mark.parametrize(
    ("backend", "replayed", "between_chunks"),
    [*((*loss, False) for loss in LOSSES), *((*loss, True) for loss in LOSSES[2:])],
    indirect=["backend"],
)
def test_a_killed_rank_is_named_in_time_and_the_next_world_works(
    domains: Domains, backend: str, replayed: bool, between_chunks: bool
) -> None:
    case = Case(domains.ranks, spec_for(domains), backend, ("uniform", "masked"), seed=5)
    lost = domains.size  # rank 0 of domain 1
    found = domains.outcomes(domain_ranks.lose_a_rank, case, lost, replayed, between_chunks, timeout_s=TIMEOUT_S)
    assert isinstance(found[lost], RankGone)
    left = {rank: each for rank, each in enumerate(found) if rank != lost}
    for rank, each in left.items():
        assert isinstance(each, tuple), each
        peer, waited, (kind, _), closed = each
        assert peer != rank
        assert waited < MOST_S and closed < TIMEOUT_S
        beside_it = rank % domains.size == 0 or rank // domains.size == 1  # on its rail or in its domain
        assert kind == "PeerTimeout" or (kind == "Aborted" and not beside_it)
    assert left[0][0] == lost, "its rail"
    if domains.size > 1:
        assert left[lost + 1][0] == lost, "its domain"
    judge_all([case], domains.run(on_rank.run_cases, [case]))


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize(
    "changes",
    [
        {"alignment": 1},
        {"alignment": 8, "padding": "zero"},
        {"layout": "rank", "alignment": 1},
        {"hidden": 272, "wire": FP8, "output": "raw", "padding": "zero"},
        {"hidden": 2880, "topk": 4, "alignment": 1},
    ],
    ids=["plain", "gaps", "rank", "fp8", "wide"],
)
def test_rows_in_chunks_are_those_of_rows_at_once(domains: Domains, tokens: int, changes: dict) -> None:
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    spec = spec_for(domains, tokens=tokens, **{"hidden": 512, **changes})
    routing = ("uniform", "masked", "repeated", "one", "none")
    case = Case(domains.ranks, spec, CHUNKED, routing, seed=tokens, ragged=False)
    for found in domains.run(domain_ranks.compare_chunks, case):
        assert found["chunks"] == (3 if tokens == 9 else 5)
        assert found["free"] >= SMS_BESIDE
        for step, same in enumerate(found["same"]):
            assert same == {"eager": [], "replayed": []}, f"step {step}"


def test_a_chunk_that_some_rank_delays_is_waited_for(domains: Domains) -> None:
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    case = Case(domains.ranks, spec_for(domains, tokens=300), CHUNKED, ("uniform", "masked") * 2, seed=3)
    answers = domains.run(domain_ranks.delay_chunks, case)
    for step in range(len(case.routing)):
        sent = batches(case, step)
        for rank in range(domains.ranks):
            judge_dispatch(case, sent, rank, answers[rank][step])
            judge_combine(case, sent[rank], answers[rank][step].y)


def test_a_dispatch_that_leaves_nccl_no_sms_waits_in_vain(domains: Domains) -> None:
    """So `sms_beside` is needed. The tokens are many, so that a block of the dispatch is on each SM."""
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    case = Case(domains.ranks, spec_for(domains, tokens=2048, hidden=1024), CHUNKED, ("uniform",), seed=8)
    for left, kind, says in domains.run(domain_ranks.leave_no_sms, case, timeout_s=4.0):
        assert left == 0
        assert kind == "PeerTimeout", says


def test_a_backward_pass_that_leaves_nccl_no_sms_waits_for_no_chunk(domains: Domains) -> None:
    """All-reduces of gradients hold SMs that the dispatch would leave to the rail."""
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    spec = spec_for(domains, tokens=2048, hidden=1024, padding="zero")
    case = Case(domains.ranks, spec, CHUNKED, ("uniform",), seed=8, ragged=False)
    for left, same in domains.run(domain_ranks.backward_without_sms, case, timeout_s=8.0):
        assert (left, same) == (0, [True] * 3)


def test_only_dispatches_of_forward_passes_run_beside_their_rows(domains: Domains) -> None:
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    case = Case(domains.ranks, spec_for(domains, tokens=300), CHUNKED, ("uniform",), seed=3)
    for beside in domains.run(domain_ranks.crossings_of_a_checkpointed_step, case):
        assert beside == [True, False, False], "forward, forward again for the backward pass, gradients of the combine"


@inside("fused", "allgather")
def test_a_graph_that_outlives_its_world_delays_the_end_of_the_world_little(domains: Domains, backend: str) -> None:
    case = Case(domains.ranks, spec_for(domains), backend, ("uniform",), seed=6)
    assert max(domains.run(domain_ranks.close_before_a_graph, case)) < TIMEOUT_S
    judge_all([case], domains.run(on_rank.run_cases, [case]))


def test_raymoe_run_pretends_domains_of_gpu_ranks(start: Start, nothing_left: None, tmp_path: Path) -> None:
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    given = {
        "world": {"ranks": 4, "domain": 2, "device": "cuda", "share_gpu": GPUS < 4, "restarts": 0},
        "shape": {"tokens": 160, "hidden": 256, "experts": 8, "topk": 2, "dtype": "bfloat16"},
        "exchange": {"backend": "fused", "net": {"chunk": 50}},
        "steps": {"warmup": 1, "count": 2, "graph": True},
        "routing": {"ragged": True, "masked": 0.1},
        "matrix": {"exchange.layout": ["expert", "rank"]},
    }
    run = start(configs.write(tmp_path, **given), env={"HOME": str(tmp_path)})
    assert run.end(200) == 0, run.stderr()
    lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 6
    for line in lines:
        assert (line["verified"], line["graph"], line["domains"], line["chunks"]) == (True, True, 2, 4)
        assert line["bytes_net"] == {"dispatch": 343040, "combine": 327808, "exchange": 670848}[line["op"]]
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    assert [rank["domain"] for rank in ranks] == [0, 0, 1, 1]


def test_raymoe_run_takes_two_ray_nodes_of_a_gpu_each(start: Start, nothing_left: None, tmp_path: Path) -> None:
    """With one GPU both nodes have it. A node has the CPUs of one rank, so `auto` makes a domain on each."""
    if not HOPPER:
        pytest.skip(f"fused needs compute capability {FUSED_CAPABILITY}")
    given = {
        "world": {"ranks": 2, "device": "cuda", "share_gpu": GPUS < 2, "cpus": 1, "restarts": 0},
        "shape": {"tokens": 160, "hidden": 256, "experts": 8, "topk": 2, "dtype": "bfloat16"},
        "exchange": {"backend": "fused"},
        "steps": {"warmup": 1, "count": 2, "graph": True},
        "routing": {"ragged": True, "masked": 0.1},
        "matrix": {"exchange.net.chunk": ["auto", 50]},
    }
    with cluster(tmp_path) as nodes:
        for node in range(2):
            nodes.add(cpus=1, num_gpus=1, env_vars={"CUDA_VISIBLE_DEVICES": str(node % GPUS)})
        options = ("--address", nodes.address)
        run = start(configs.write(tmp_path, **given), *options, env={"HOME": str(tmp_path)})
        assert run.end(200) == 0, run.stderr()
    assert "in 2 domains of 1 on a node each: no node can hold all of them" in run.stderr()
    lines = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 6
    assert {line["chunks"] for line in lines} == {1, 4}
    assert all(line["verified"] and line["graph"] and line["domains"] == 2 for line in lines)
    ranks = json.loads((run.out / "environment.json").read_text())["ranks"]
    assert [rank["domain"] for rank in ranks] == [0, 1]
    assert len({rank["node"] for rank in ranks}) == 2
