"""The exchange between domains of GPU ranks, on CPU ranks: Gloo replaces NCCL, and the emulator replaces the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from raymoe.errors import DataRefused, PeerTimeout
from raymoe.exchange.backend import Ids, Tokens
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.nccl.nccl_backends import NcclAllgather
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.traffic import bytes_between_domains
from tests.gpu import exchange_ranks as on_rank
from tests.gpu import mixed_ranks
from tests.unit.exchange.exchange_cases import (
    ROUTINGS,
    Case,
    apply_experts,
    batches,
    expert_major,
    open_exchange,
    result_of,
)
from tests.unit.exchange.exchange_judge import advice, judge, judge_combine, judge_dispatch
from tests.unit.exchange.nccl.gloo_rounds import TensorRail, on_tensors
from tests.unit.memory.test_world_of import error_of, groups
from tests.unit.moe.gradient_cases import judge_gradients, judge_refused_gradients, refuse_gradients, run_gradients
from tests.unit.workload.test_layer_workload import layer_job
from tests.unit.workload.test_workload import run_cases as run_job

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture

SPEC = ExchangeSpec(tokens=5, hidden=16, experts=8, topk=3, alignment=4)
BACKEND = "tensor allgather"
"""The backend between domains of GPU ranks, around that of GPU ranks inside."""


def opened(world: World, spec: ExchangeSpec) -> Exchange:
    return open_exchange(world, Case(world.size, spec, BACKEND, ("uniform",)))


def run_cases(_rank: int, cases: list[Case], domain: int) -> Any:
    with World.of(domain=domain, timeout_s=30) as world:
        return on_rank.run_cases(world, cases)


SPECS = [
    SPEC,
    ExchangeSpec(4, 8, experts=4, topk=4, dtype="float32", layout="rank", padding="zero", alignment=3),
    ExchangeSpec(4, 24, experts=4, topk=2, dtype="float16", alignment=1, wire={"combine": "float32"}),
    ExchangeSpec(4, 16, experts=8, topk=2, layout="rank", alignment=1, wire={"combine": "float16"}),
    ExchangeSpec(3, 8, experts=8, topk=2, alignment=16, padding="zero"),
]
FLAGS = [(True, False, True, False, True), (True, True, False, True, False), (False, True, True, False, True)]
THREE = ExchangeSpec(4, 8, experts=6, topk=2, alignment=2)


@pytest.mark.parametrize(("ranks", "domain", "specs"), [(4, 2, SPECS), (2, 1, SPECS[:3]), (3, 1, [THREE])])
def test_every_routing_matches_plan_and_oracle(
    groups: Groups, ranks: int, domain: int, specs: list[ExchangeSpec]
) -> None:
    cases = [
        Case(ranks, spec, BACKEND, ROUTINGS, 3 + number, *FLAGS[number % len(FLAGS)])
        for number, spec in enumerate(specs)
    ]
    results = groups(ranks, run_cases, cases, domain)
    for number, case in enumerate(cases):
        judge(case, [theirs[number] for theirs in results])


def run_padded(_rank: int, case: Case) -> Any:
    """Run steps with `num_tokens` on the device; after it are NaN and ids that no code may read."""
    with World.of(domain=2, timeout_s=30) as world, open_exchange(world, case) as exchange:
        results = []
        for step in range(len(case.routing)):
            batch = on_rank.padded(batches(case, step)[world.rank], case.spec.tokens)
            count = torch.tensor([batch.num_tokens], dtype=torch.int32)
            got = exchange.dispatch(batch.x, batch.ids, batch.weights, count)
            rows = expert_major(got)
            results.append(result_of(got, rows, exchange.combine(apply_experts(exchange, got, rows), got)))
        return results


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_tokens_after_the_count_are_not_sent(groups: Groups, layout: str) -> None:
    case = Case(4, replace(SPEC, layout=layout), BACKEND, ROUTINGS, seed=4, prefix=True)
    results = groups(4, run_padded, case)
    for step in range(len(case.routing)):
        sent = [on_rank.padded(batch, SPEC.tokens) for batch in batches(case, step)]
        for rank in range(4):
            judge_dispatch(case, sent, rank, results[rank][step])
            judge_combine(case, sent[rank], results[rank][step].y)


def repeat_and_reorder(_rank: int, case: Case) -> Any:
    with World.of(domain=2, timeout_s=30) as world:
        return on_rank.repeat_a_step(world, case), on_rank.combine_in_another_order(world, case)


def test_results_repeat_and_several_dispatches_may_be_outstanding(groups: Groups) -> None:
    case = Case(4, SPEC, BACKEND, ("uniform", "masked", "repeated"), seed=11)
    for rank, (same, ys) in enumerate(groups(4, repeat_and_reorder, case)):
        assert same == [True] * 3
        for step, y in enumerate(ys):
            judge_combine(case, batches(case, step)[rank], y)


def refuse(rank: int, fault: tuple[str, int]) -> Any:
    """Give rank 2 of four bad data in two of five steps, or all ranks too many rows for rank 3."""
    kind, value = fault
    capacity = {"rows": 12, "rows and gaps": 18}.get(kind, "worst")
    alignment = 5 if kind == "rows and gaps" else 1
    spec = ExchangeSpec(4, 8, experts=8, topk=1, dtype="float32", alignment=alignment, capacity=capacity)
    with World.of(domain=2, timeout_s=30) as world, opened(world, spec) as exchange:
        reports = []
        for bad in (False, True, False, True, False):
            ids = torch.arange(4)[:, None] + 2
            if bad and kind.startswith("rows"):
                ids[:] = value
            elif bad and rank == 2:
                ids[1] = value
            x, y, said = torch.ones(4, 8), torch.zeros(4, 8), ""
            got = exchange.dispatch(x, ids, torch.ones(4, 1))
            exchange.combine(got.x, got, out=y)
            try:
                exchange.check()
            except DataRefused as error:
                said = str(error)
            reports.append((y.numpy(), said))
        return reports


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (("id", 8), "rank 2 asked for expert 8 for its token 1; ids are -1 to 7"),
        (("id", -2), "rank 2 asked for expert -2 for its token 1; ids are -1 to 7"),
        (("id", 2**40), f"rank 2 asked for expert {2**40} for its token 1; ids are -1 to 7"),
        (("rows and gaps", 7), "20 rows, gaps included, came to rank 3; its capacity is 18: " + advice(20)),
        (("rows", 7), "16 rows, gaps included, came to rank 3; its capacity is 12: " + advice(16)),
    ],
)
def test_refused_data_raises_on_all_ranks_of_all_domains_and_the_next_step_works(
    groups: Groups, fault: tuple[str, int], says: str
) -> None:
    for first, second, third, fourth, fifth in groups(4, refuse, fault):
        for y, said in (second, fourth):
            assert said == says
            assert np.isnan(y).all()
        for y, said in (first, third, fifth):
            assert said == ""
            assert (y == 1).all()


def count_too_many(rank: int, count: int) -> Any:
    """Let the exchange of rank 1 send `count` of its three tokens. On GPUs nothing checks that before."""
    spec = ExchangeSpec(4, 8, experts=8, topk=2, dtype="float32", alignment=4)
    with World.of(domain=2, timeout_s=30) as world, opened(world, spec) as exchange:
        reports = []
        for num_tokens in (2, count if rank == 1 else 2, 2):
            x, ids = torch.ones(3, 8), torch.arange(6).reshape(3, 2)
            tokens = Tokens(x, ids, torch.full((3, 2), 0.5), torch.tensor([num_tokens], dtype=torch.int32))
            got, y = exchange._backend.dispatch(tokens, exchange._own[0]), torch.zeros(3, 8)
            exchange._backend.combine(exchange._own[0], got, True, y)
            reports.append((error_of(exchange.check)[1] if y.isnan().any() else "", y.numpy()))
        return reports


@pytest.mark.parametrize("count", [4, -1, 2**31 - 1])
def test_a_number_of_tokens_out_of_range_is_refused_by_all(groups: Groups, count: int) -> None:
    for first, second, third in groups(4, count_too_many, count):
        assert second[0] == f"num_tokens is {count} on rank 1; x has 3 rows, so 0 to 3 can be sent"
        assert np.isnan(second[1]).all()
        for said, y in (first, third):
            assert said == ""
            assert y[:, 0].tolist() == [1, 1, 0]


def combine_differently(rank: int, kind: str, different: list[int]) -> Any:
    """Let some ranks combine another dispatch, or without weights; then combine the second one on all."""
    case = Case(4, ExchangeSpec(4, 8, experts=8, topk=2, depth=2), BACKEND, ("uniform", "masked"), seed=4)
    with World.of(domain=2, timeout_s=30) as world, opened(world, case.spec) as exchange:
        gots, rows = [], []
        for step in range(2):
            batch = batches(case, step)[rank]
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights))
            rows.append(apply_experts(exchange, gots[-1], gots[-1].x))
        there = rank in different
        which = 1 if kind == "dispatch" and there else 0
        y = exchange.combine(rows[which], gots[which], weighted=not (kind == "weighted" and there))
        said = error_of(exchange.check)
        good = exchange.combine(rows[1], gots[1])
        exchange.check()
        first = exchange.combine(rows[0], gots[0])
        exchange.check()
        return said, bool(y.isnan().all()), [sums.float().numpy() for sums in (first, good)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("different", [[3], [2, 3], [1], [1, 3]])
@pytest.mark.parametrize("kind", ["dispatch", "weighted"])
def test_combines_that_differ_between_ranks_or_domains_are_refused_by_all(
    groups: Groups, kind: str, different: list[int]
) -> None:
    case = Case(4, ExchangeSpec(4, 8, experts=8, topk=2, depth=2), BACKEND, ("uniform", "masked"), seed=4)
    first = different[0]
    says = f"rank 0 combines its dispatch 1 and rank {first} its dispatch 2; all ranks combine the same dispatch"
    if kind == "weighted":
        says = (
            f"rank 0 combines dispatch 1 with weighted=True and rank {first} with weighted=False; all ranks give the "
            "same weighted"
        )
    for rank, (said, nan, ys) in enumerate(groups(4, combine_differently, kind, different)):
        assert said == ("DataRefused", says)
        assert nan
        for step, y in enumerate(ys):
            judge_combine(case, batches(case, step)[rank], y)


def ask_for_halves(_rank: int) -> Any:
    with World.of(domain=1, timeout_s=30) as world, opened(world, SPEC) as exchange:
        assert not exchange.capturable  # Gloo
        batch = batches(Case(2, SPEC, BACKEND, ("uniform",)), 0)[world.rank]
        return error_of(lambda: exchange.dispatch_send(batch.x, batch.ids, batch.weights))


def test_halves_are_refused(groups: Groups) -> None:
    for kind, says in groups(2, ask_for_halves):
        assert kind == "ConfigError"
        assert "between 2 domains operations are not split" in says


GRADIENTS = [
    (4, 2, ExchangeSpec(5, 16, experts=8, topk=3, dtype="float32", alignment=3, padding="zero"), ROUTINGS),
    (4, 2, ExchangeSpec(4, 16, experts=8, topk=2, dtype="float32", alignment=1, layout="rank"), ROUTINGS),
    (3, 1, ExchangeSpec(4, 8, experts=6, topk=2, dtype="float32", alignment=4, layout="rank"), ROUTINGS),
    (2, 1, ExchangeSpec(5, 16, experts=4, topk=4, dtype="float32", alignment=1, depth=0), ROUTINGS),
    (2, 1, ExchangeSpec(5, 16, experts=4, topk=2, alignment=2, capacity=24), ("uniform", "masked")),
]


def differentiate(_rank: int, case: Case, domain: int, keeps_places: bool = True) -> Any:
    """Run forward and backward; also count the dispatches inside: those that route, to known places, and again."""
    with ExitStack() as patches:
        world = patches.enter_context(World.of(domain=domain, timeout_s=30))
        patches.enter_context(mock.patch.object(NcclAllgather, "keeps_places", keeps_places))
        counted = [
            patches.enter_context(
                mock.patch.object(NcclAllgather, name, autospec=True, side_effect=getattr(NcclAllgather, name))
            )
            for name in ("dispatch", "dispatch_known", "dispatch_again")
        ]
        return run_gradients(world, case), tuple(calls.call_count for calls in counted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("number", range(len(GRADIENTS)))
def test_gradients_equal_autograd_in_float64(groups: Groups, number: int, weighted: bool) -> None:
    ranks, domain, spec, routing = GRADIENTS[number]
    case = Case(ranks, spec, BACKEND, routing, seed=5 + number, weighted=weighted, prefix=weighted)
    results = groups(ranks, differentiate, case, domain)
    judge_gradients(case, [gradients for gradients, _ in results], bound=2e-6 if spec.dtype == "float32" else 2e-2)
    assert {counts for _, counts in results} == {(len(routing), len(routing), 0)}


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_the_backward_of_combine_dispatches_again_where_no_places_are_kept(groups: Groups, layout: str) -> None:
    spec = replace(SPEC, dtype="float32", layout=layout, depth=0)
    case = Case(4, spec, BACKEND, ("uniform", "repeated"), seed=6, prefix=True)
    results = groups(4, differentiate, case, 2, False)
    judge_gradients(case, [gradients for gradients, _ in results], bound=2e-6)
    assert {counts for _, counts in results} == {(2, 0, 2)}


def lose_weights(_rank: int, case: Case) -> Any:
    """Drop the gradients of weights whose experts another domain holds."""
    real = TensorRail.swap_all

    def swap_all(
        self: TensorRail, op: str, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        wait = real(self, op, received, sent)
        if received[-1].dtype == torch.float32:  # after the statuses
            received[-1][1 - self._me] = 0
        return wait

    with World.of(domain=2, timeout_s=30) as world, mock.patch.object(TensorRail, "swap_all", swap_all):
        return run_gradients(world, case)


def test_a_dropped_gradient_of_a_weight_of_another_domain_is_found(groups: Groups) -> None:
    case = Case(4, replace(SPEC, dtype="float32"), BACKEND, ("uniform",), seed=3)
    with pytest.raises(AssertionError, match="weights of rank"):
        judge_gradients(case, groups(4, lose_weights, case), bound=1e-2)


def restore(rank: int, case: Case) -> Any:
    """Make two dispatches again from their metadata, and combine them in the other order."""
    with World.of(domain=2, timeout_s=30) as world, opened(world, case.spec) as exchange:
        saved, results = [], {}
        for step in range(2):
            batch = batches(case, step)[rank]
            got = exchange.dispatch(batch.x, batch.ids, batch.weights)
            metadata = exchange.pack(got)
            assert metadata.dtype == torch.int32 and metadata.shape == (exchange.numbers[3],)
            rows = apply_experts(exchange, got, expert_major(got)).nan_to_num(nan=0.0)
            saved.append((metadata, rows, got.weights.clone(), batch, got.expert_offsets.tolist()))
            got.expert_offsets.zero_()  # metadata share no memory with the result
            got.expert_counts.zero_()
            got.weights.zero_()
        for step in (1, 0):
            metadata, rows, weights, batch, offsets = saved[step]
            again = exchange.unpack(metadata, rows, weights, Ids(batch.ids))
            assert again.expert_offsets.tolist() == offsets
            assert again.expert_counts.sum() <= offsets[-1]
            y, entries = exchange.combine_gradients(rows, weights, again)
            results[step] = y, entries
        exchange.check()
        return results


@pytest.mark.one_in(2)
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_dispatch_made_again_from_its_metadata_is_the_same(groups: Groups, layout: str, alignment: int) -> None:
    spec = ExchangeSpec(4, 16, experts=8, topk=2, dtype="float32", layout=layout, alignment=alignment, depth=2)
    case = Case(4, spec, BACKEND, ("uniform", "masked"), seed=4, weighted=False)
    for rank, result in enumerate(groups(4, restore, case)):
        for step in range(2):
            batch = batches(case, step)[rank]
            y, entries = result[step]
            judge_combine(case, batch, y.numpy())
            assert torch.equal(entries, torch.where(batch.ids >= 0, batch.weights, 0.0))


def refuse_in_domains(_rank: int, alignment: int) -> Any:
    spec = ExchangeSpec(4, 8, experts=8, topk=2, dtype="float32", alignment=alignment)
    with World.of(domain=2, timeout_s=30) as world:
        return refuse_gradients(world, Case(4, spec, BACKEND, ()))


@pytest.mark.parametrize("alignment", [1, 4])
def test_refused_gradients_are_nan_on_all_ranks_and_the_next_step_works(groups: Groups, alignment: int) -> None:
    for report in groups(4, refuse_in_domains, alignment):
        judge_refused_gradients(report, "rank 3 asked for expert 8 for its token 1; ids are -1 to 7")


def differ_between_domains(rank: int) -> Any:
    """Combine the gradients of the second dispatch in domain 1, and of the first one in domain 0."""
    case = Case(4, replace(SPEC, depth=2), BACKEND, ("uniform", "masked"), seed=4, ragged=False)
    with World.of(domain=2, timeout_s=30) as world, opened(world, case.spec) as exchange:
        gots = [
            exchange.dispatch(batch.x, batch.ids, batch.weights) for batch in (batches(case, n)[rank] for n in (0, 1))
        ]
        got = gots[rank // 2]
        y, entries = exchange.combine_gradients(got.x, got.weights, got)
        said = error_of(exchange.check)
        _, again = exchange.combine_gradients(gots[1].x, gots[1].weights, gots[1])
        exchange.check()
        return said, y, entries, again


def test_gradients_of_dispatches_that_differ_between_domains_are_refused(groups: Groups) -> None:
    case = Case(4, SPEC, BACKEND, ("uniform", "masked"), seed=4, ragged=False)
    says = "rank 0 combines its dispatch 1 and rank 2 its dispatch 2; all ranks combine the same dispatch"
    for rank, (said, y, entries, again) in enumerate(groups(4, differ_between_domains)):
        assert said == ("DataRefused", says)
        assert y.isnan().all() and entries.isnan().all()
        batch = batches(case, 1)[rank]
        assert torch.equal(again, torch.where(batch.ids >= 0, batch.weights, 0.0))


def run_layer(_rank: int, job: dict[str, Any]) -> Any:
    with World.of(domain=2, timeout_s=30) as world, mock.patch("raymoe.exchange.exchange.make_backend", on_tensors):
        return run_job(world, job)[0]


def test_a_layer_between_domains_is_verified_forward_and_backward(groups: Groups) -> None:
    job = layer_job(4, "sigmoid", shared=16, backward=True)
    job["exchange"] = {"backend": "allgather"}
    lines = groups(4, run_layer, job)[0]
    assert {line["backend"] for line in lines} == {"allgather"}
    assert all(line["verified"] and line["domains"] == 2 for line in lines)
    assert {"dispatch_backward", "combine_backward"} <= {line["op"] for line in lines}


def counted_bytes(_rank: int, spec: ExchangeSpec) -> Any:
    """Return the bytes that this rank's rail sends in a dispatch and in a combine."""
    sent: list[int] = []
    with World.of(domain=2, timeout_s=30) as world, opened(world, spec) as exchange:
        rail = world.shared(TensorRail)
        gather, swap_all, others = rail.gather, rail.swap_all, world.domains - 1

        def counting_gather(op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
            sent.append(own.nbytes * others)
            return gather(op, out, own)

        def counting_swap(
            op: str, received: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]
        ) -> Callable[[], None]:
            sent.extend(block.nbytes // world.domains * others for block in blocks)
            return swap_all(op, received, blocks)

        rail.gather, rail.swap_all = counting_gather, counting_swap  # type: ignore[method-assign]
        ids = torch.arange(3 * spec.topk).reshape(3, spec.topk) % spec.experts
        got = exchange.dispatch(torch.ones(3, spec.hidden, dtype=torch.bfloat16), ids, torch.ones(3, spec.topk))
        dispatched = sum(sent)
        exchange.combine(torch.zeros(spec.rows(world.size), spec.hidden, dtype=torch.bfloat16), got)
        return dispatched, sum(sent) - dispatched


@pytest.mark.parametrize("wire", [None, {"combine": "float32"}])
def test_the_bytes_between_domains_are_those_that_rails_send(groups: Groups, wire: dict[str, str] | None) -> None:
    spec = replace(SPEC, wire=wire)
    dispatch, combine = (sum(counts) for counts in zip(*groups(4, counted_bytes, spec), strict=True))
    counted = bytes_between_domains(spec, ranks=4, domains=2, device="cuda")
    assert counted == {"dispatch": dispatch, "combine": combine, "exchange": dispatch + combine}


# Ranks that do not run the same


def mixed(_rank: int, case: Case, kind: str) -> Any:
    with World.of(domain=2, timeout_s=30) as world:
        return mixed_ranks.mixed_combines(world, case, kind)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dispatch", "rank 0 combines its dispatch 1 and rank 3 its dispatch 2"),
        ("weighted", "rank 0 combines dispatch 1 with weighted=True and rank 3 with weighted=False"),
        ("site", "rank 0 combines rows of call site 5 and rank 3 rows of call site 7"),
    ],
)
def test_all_ranks_report_combines_that_differ(groups: Groups, kind: str, said: str) -> None:
    case = Case(4, SPEC, BACKEND, ("uniform", "masked"), seed=4)
    for rank, report in enumerate(groups(4, mixed, case, kind)):
        assert report["told"].startswith(said)
        assert report["nan"]
        judge_combine(case, batches(case, 1)[rank], report["y"])


def mixed_backward(_rank: int, case: Case, kind: str) -> Any:
    with World.of(domain=2, timeout_s=30) as world:
        return mixed_ranks.mixed_backward(world, case, kind)


@pytest.mark.parametrize("kind", ["order", "site"])
def test_all_ranks_report_backward_passes_that_differ(groups: Groups, kind: str) -> None:
    """The last rank differs from its rail, and from its domain. One rank shares neither with it."""
    case = Case(4, SPEC, BACKEND, ("uniform", "masked"), seed=4)
    for report in groups(4, mixed_backward, case, kind):
        assert len(report["told"]) == (2 if kind == "order" else 1)
        assert all(
            text.startswith("ranks of this world run the backward passes of different") for text in report["told"]
        )
        assert all(report["nan"])
        assert report["right"]


# A wait that runs out


@pytest.mark.parametrize(
    ("peer", "seen", "named"),
    [(3, 6, 3), (3, 7, 4), (0, 0, 4)],
    ids=["the peer of the rail is late", "a rank of the domain is late", "rank 0 answers no question"],
)
def test_the_rank_that_others_wait_for_is_named(peer: int, seen: int, named: int) -> None:
    """Rank 5 has rank 3 on its rail, and rank 4 in its domain."""

    def settle(op: str) -> None:
        raise PeerTimeout(op, 7, peer, 7, seen, 10.0, 5)

    def check_waits() -> None:
        raise PeerTimeout("dispatch", 7, 4, 7, 6, 10.0, 5)

    backend: Any = HierarchicalGpu.__new__(HierarchicalGpu)
    backend._shape = DomainShape(domains=3, per_domain=2, index=2, tokens=8, local=2)
    backend._world, backend._named_by_world = SimpleNamespace(rank=5), nullcontext
    backend._rail, backend._inside = SimpleNamespace(settle=settle), SimpleNamespace(check_waits=check_waits)
    with pytest.raises(PeerTimeout) as caught:
        backend._settle("check")
    assert caught.value.peer == named
