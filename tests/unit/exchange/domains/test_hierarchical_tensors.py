"""The arithmetic between domains: it needs no host, stays on its device, and agrees with the contract's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from raymoe.cuda.params import Params
from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu, RailParts
from raymoe.exchange.spec import ExchangeSpec
from tests.unit.exchange import plan
from tests.unit.exchange.domains.domain_reference import ids_inside, of_experts

GPU = torch.device("meta")
"""Stands for a GPU: its tensors have no values. A read by the host raises, and so does a mix of devices."""


def test_the_device_without_values_finds_a_read_by_the_host_and_a_tensor_on_the_host() -> None:
    on_gpu = torch.zeros(3, device=GPU)
    with pytest.raises(RuntimeError, match="meta"):
        on_gpu.sum().item()
    with pytest.raises(RuntimeError, match="device"):
        on_gpu + torch.zeros(3)


class FakeInside:
    """An exchange inside a domain whose results have no values."""

    capturable, keeps_places, sms, metadata_words = True, True, 7, 5

    def __init__(self, spec: ExchangeSpec, ranks: int) -> None:
        self._spec, self._rows, self._experts = spec, spec.rows(ranks), spec.local_experts(ranks)

    def refusal_record(self) -> torch.Tensor:
        return torch.zeros(18, dtype=torch.int64, device=GPU)

    def backward_record(self) -> torch.Tensor:
        return self.refusal_record()

    def mark_passes(self, word: torch.Tensor) -> None:
        assert word.dtype == torch.int64 and word.device == GPU

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        assert tokens.x.shape == (self._spec.tokens, self._spec.hidden)
        assert tokens.topk_idx.is_contiguous() and tokens.topk_weights.is_contiguous()

        def made(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=GPU)

        x = torch.zeros(99, self._spec.hidden, dtype=tokens.x.dtype, device=GPU) if out is None else out
        index = made(self._rows, torch.int64) if out is None else None
        offsets, counts = made(self._experts + 1, torch.int32), made(self._experts, torch.int32)
        return Dispatched(x, made(self._rows, torch.float32), offsets, counts, index, len(tokens.x), None, self)

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        assert got._owner is self
        return torch.zeros(4, dtype=torch.int32, device=GPU)

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        assert weighted and got.tokens == len(out)
        assert rows.shape == (self._rows, self._spec.hidden) and out.is_contiguous()

    def pack(self, got: Dispatched) -> torch.Tensor:
        assert got._owner is self
        return torch.zeros(self.metadata_words, dtype=torch.int32, device=GPU)

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        assert metadata.shape == (self.metadata_words,) and ids.topk_idx.shape == (self._spec.tokens, self._spec.topk)
        offsets = torch.zeros(self._experts + 1, dtype=torch.int32, device=GPU)
        return Dispatched(rows, weights, offsets, offsets[1:], None, self._spec.tokens, None, self)

    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        self.combine(rows, got, True, out)
        assert weights.shape == (self._rows,)
        assert out_weights.shape == (self._spec.tokens, self._spec.topk) and out_weights.is_contiguous()

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        assert x.shape == (got.tokens, self._spec.hidden) and out.shape == (self._rows, self._spec.hidden)


class FakeRail:
    capturable = True

    def gather(self, op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        assert op and out.is_contiguous() and own.is_contiguous()
        assert out.numel() == 2 * own.numel()
        return lambda: None

    def swap_all(self, op: str, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Callable[[], None]:
        assert op and all(block.is_contiguous() for block in (*received, *sent))
        assert [block.shape for block in received] == [block.shape for block in sent]
        return lambda: None

    def settle(self, op: str) -> None:
        """Wait for nothing."""


class FakeLauncher:
    threads, sms = 256, 132

    def ordered(self, op: str) -> AbstractContextManager[int]:
        assert op
        return nullcontext(1)

    def resident(self, *_: object) -> int:
        return 9

    def ready(self, _source: object, _shape: object, params: Params, **memory: torch.Tensor) -> Callable[..., None]:
        assert all(name in params.offsets() and tensor.device == GPU for name, tensor in memory.items())

        def launch(stream: int, **changed: torch.Tensor | int | None) -> None:
            assert stream > 0
            assert all(name in params.offsets() for name in changed)
            assert all(tensor.device == GPU for tensor in changed.values() if isinstance(tensor, torch.Tensor))

        return launch


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wire", [None, {"combine": "float32"}, "float8_e4m3"])
@pytest.mark.parametrize(("layout", "alignment"), [("expert", 1), ("expert", 16), ("rank", 1), ("rank", 16)])
def test_the_host_reads_nothing_in_a_step(layout: str, alignment: int, wire: dict[str, str] | str | None) -> None:
    spec = ExchangeSpec(5, 8, experts=12, topk=2, layout=layout, alignment=alignment, padding="zero", wire=wire)
    if wire == "float8_e4m3" and layout == "rank":
        spec = replace(spec, output="raw")
    world: Any = SimpleNamespace(
        domains=2, size=4, rank=3, device=GPU, waiter=None, domain=SimpleNamespace(size=2, rank=1)
    )
    world.swap = lambda value, _: [value] * 4
    memory = mock.patch("raymoe.exchange.domains.hierarchical_gpu.CapturedMemory", lambda _: nullcontext)
    keep = mock.patch("raymoe.exchange.domains.hierarchical_gpu.named_by_world", lambda *_: nullcontext())
    with memory, keep:
        parts: Any = RailParts(FakeLauncher(), FakeRail(), FakeInside(spec.inside(2), 2))  # type: ignore[arg-type]
        backend = HierarchicalGpu(world, spec, parts)
        x, y = (torch.zeros(3, 8, dtype=torch.bfloat16, device=GPU) for _ in range(2))
        ids = torch.zeros(3, 2, dtype=torch.int32, device=GPU)
        weights, count = torch.zeros(3, 2, device=GPU), torch.ones(1, dtype=torch.int32, device=GPU)
        out = torch.zeros(spec.rows(4), 8, dtype=torch.bfloat16, device=GPU)
        got = backend.dispatch(Tokens(x, ids, weights, count), out if layout == "expert" else None)
        backend.combine(out, got, True, y)
        results = [got.x, got.weights, got.expert_offsets, got.expert_counts, got.index, y, got.rows_needed()]
        assert all(result is None or result.device == GPU for result in results)
        assert (len(got.weights), len(got.expert_counts), got.tokens) == (spec.rows(4), 3, 3)
        assert (got.index is None) == (layout == "expert")
        assert got.x is out or layout == "rank"
        if wire == "float8_e4m3":  # such rows have no gradients
            return
        metadata = backend.pack(got)
        assert metadata.shape == (backend.metadata_words,) and metadata.device == GPU
        again = backend.unpack(metadata, out, got.weights, Ids(ids))
        assert (len(again.expert_offsets), len(again.expert_counts), again.tokens) == (4, 3, 3)
        backend.combine_gradients(out, got.weights, again, y, weights)
        assert backend.keeps_places
        backend.dispatch_known(x, again, out)


def plan_inside(ids: list[torch.Tensor], shape: DomainShape, place: int, alignment: int) -> plan.Plan:
    """Return the plan of a rank in its domain's own exchange, whose entries name ranks and tokens of the world."""
    N, L, T = shape.domains, shape.per_domain, shape.tokens
    rails = [torch.stack([ids[domain * L + other] for domain in range(N)]) for other in range(L)]
    inside = [ids_inside(rail, shape) for rail in rails]
    inside_plan = plan.plan(inside, place, N * shape.local, alignment, group=N)
    entries: list[tuple[int, int, int] | None] = []
    for entry in inside_plan.entries:
        entries.append(None if entry is None else (entry[1] // T * L + entry[0], entry[1] % T, entry[2]))
    return plan.Plan(entries, inside_plan.counts, inside_plan.offsets)


@pytest.mark.parametrize("alignment", [1, 2, 5, 16])
@pytest.mark.parametrize(("domains", "per_domain"), [(2, 2), (3, 1), (2, 3)])
def test_rows_inside_are_at_the_places_of_the_contract(domains: int, per_domain: int, alignment: int) -> None:
    rng, ranks, tokens = np.random.default_rng(7), domains * per_domain, 6
    local = 3
    ids = [torch.from_numpy(rng.integers(-1, ranks * local, (tokens, 4))) for _ in range(ranks)]
    spec = ExchangeSpec(tokens, hidden=8, experts=ranks * local, topk=4, alignment=alignment)
    inside = spec.inside(domains)
    assert (inside.rows(per_domain), inside.groups(per_domain)) == (spec.rows(ranks), spec.groups(ranks))
    assert inside.alignment == spec.alignment
    for rank in range(ranks):
        domain, place = divmod(rank, per_domain)
        want = plan.plan(ids, rank, local, alignment)
        inside_plan = plan_inside(ids, DomainShape(domains, per_domain, domain, tokens, local), place, alignment)
        assert inside_plan.entries == want.entries
        offsets, counts = of_experts(torch.tensor(inside_plan.offsets), torch.tensor(inside_plan.counts), domains)
        assert (offsets.tolist(), counts.tolist()) == (want.offsets, want.counts)


def test_experts_of_a_rank_that_are_no_whole_groups_are_refused() -> None:
    spec = ExchangeSpec(tokens=4, hidden=8, experts=8, topk=2, expert_group=3)
    with pytest.raises(ConfigError, match="4 experts a rank in groups of 3; all groups are whole"):
        spec.check(ranks=2)
