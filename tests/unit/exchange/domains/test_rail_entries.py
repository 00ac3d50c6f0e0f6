"""The small kernels of a dispatch between domains, emulated, beside the same by torch operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.domains.domain_shape import BAD_COUNT, DomainShape
from raymoe.exchange.domains.rail_entries import RailEntries
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import Change
from tests.emulator.machine import EmulatorError
from tests.unit.exchange.domains.domain_reference import LOWEST_ID, ids_inside, of_experts, published_ids
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher

N, L, T, K, LOCAL = 3, 2, 7, 3, 4
SHAPES = [DomainShape(N, L, index, T, LOCAL, chunk) for index, chunk in ((0, 0), (1, 3), (2, 4))]
COUNTS = [None, 0, 4, 5, 6, -1, 2**31 - 1]


class GatheredRail:
    """A rail on which the blocks of the other domains have already come."""

    def gather(self, op: str, out: torch.Tensor, own: torch.Tensor) -> Any:  # noqa: ARG002
        assert own.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        return lambda: None


def entries_of(shape: DomainShape, *changes: Change) -> RailEntries:
    spec, rail = ExchangeSpec(T, 16, experts=shape.experts, topk=K, alignment=1), GatheredRail()
    return RailEntries(shape, spec, rail, EmulatedLauncher(changes=changes), torch.device("cpu"))  # type: ignore[arg-type]


def draw_ids(seed: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw ids of which some are out of range, or no expert at all."""
    generator, experts = torch.Generator().manual_seed(seed), N * L * LOCAL
    ids = torch.randint(-1, experts, (tokens, K), generator=generator)
    info = torch.iinfo(dtype)
    odd = torch.tensor([info.min, info.min + 1, -2, experts, info.max, -1, LOWEST_ID if info.bits == 64 else -7])
    where = torch.rand(tokens, K, generator=generator) < 0.3
    return torch.where(where, odd[torch.randint(len(odd), (tokens, K), generator=generator)], ids).to(dtype)


def check_dispatch(shape: DomainShape, count: int | None, dtype: torch.dtype, *changes: Change) -> None:
    """Raise if the ids and weights that leave, or those inside, differ from what torch operations make."""
    entries, x_rows, seed = entries_of(shape, *changes), 5, 3
    ids_of_domains = entries._published[:, : 2 * T * K].view(torch.int64).view(N, T, K)
    weights = entries._published[:, 2 * T * K : 3 * T * K].view(torch.float32).view(N, T, K)
    for domain in range(N):
        ids_of_domains[domain], weights[domain] = draw_ids(domain, T, torch.int64), torch.rand(T, K)
    ids, its_weights = draw_ids(seed, x_rows, dtype), torch.rand(x_rows, K)
    num_tokens = None if count is None else torch.tensor([count], dtype=torch.int32)
    want = ids_of_domains.clone()
    published_ids(ids, num_tokens, want[shape.index])
    for number in (1, 2):
        entries.cross("dispatch", 0, Tokens(ids, ids, its_weights, num_tokens), None)
        assert torch.equal(entries.ids, want)
        assert torch.equal(weights[shape.index, :x_rows], its_weights)
        arriving = entries.arriving(0)
        assert arriving.number.view(torch.int64).item() == number
        assert torch.equal(arriving.ids, ids_inside(want, shape))
        assert torch.equal(arriving.weights, shape.inside(weights))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"domain {shape.index}, chunks of {shape.chunk}")
def test_ids_and_weights_leave_and_enter_the_domain(shape: DomainShape, count: int | None, dtype: torch.dtype) -> None:
    check_dispatch(shape, count, dtype)


@pytest.mark.parametrize("shape", SHAPES[:1])
def test_offsets_and_counts_are_those_of_the_experts(shape: DomainShape) -> None:
    counts = torch.randint(0, 9, (LOCAL * N,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    for joined, want in zip(entries_of(shape).joined(0, offsets, counts), of_experts(offsets, counts, N), strict=True):
        assert torch.equal(joined, want)


INJECTED_BUGS = [
    Change("publish_tokens.cu", "low <= p.x_rows", "low <= p.tokens"),
    Change("publish_tokens.cu", "id < LOWEST_ID ? LOWEST_ID : id", "id"),
    Change("publish_tokens.cu", "!good && entry == 0", "!good && entry == 1"),
    Change("enter_domain.cu", "id < -1 || id >= p.experts ? id : -1", "-1"),
    Change("enter_domain.cu", "expert * p.domains + domain", "expert * p.domains"),
    Change("enter_domain.cu", "min(p.chunk, p.tokens - begin)", "p.chunk"),
]


@pytest.mark.parametrize("change", INJECTED_BUGS, ids=lambda change: change.old)
def test_an_injected_bug_is_found(change: Change) -> None:
    with pytest.raises((AssertionError, EmulatorError)):
        for shape in SHAPES:
            for count in COUNTS:
                check_dispatch(shape, count, torch.int64, change)


def test_a_bad_count_is_no_id() -> None:
    assert BAD_COUNT + (T << 32) + 2**32 - 1 < LOWEST_ID
