"""The kernels that write weights into rows of bytes and read them equal torch's operations bit by bit (emulated)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.device.kernels import Shape
from raymoe.device.weight_bytes import (
    NO_OFFSET,
    GatherWeightsParams,
    SpreadWeightsParams,
    gather_source,
    row_threads,
    spread_source,
)
from raymoe.exchange.spec import DTYPES
from raymoe.exchange.weight_bytes import BYTES
from raymoe.memory.layout import round_up
from tests.emulator.build import Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.emulated_launcher import EmulatedLauncher

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")
NOWHERE = 0xFFFFFFFF
UNWRITTEN = 77.0


# The same by torch's operations.


def k_of_row(places: torch.Tensor, counts: torch.Tensor | None, capacity: int) -> torch.Tensor:
    """Return the k of the entry in each row; -1 where there is none. `places` is [R, T, K]."""
    ranks, tokens, topk = places.shape
    there = torch.arange(tokens) < (torch.full((ranks, 1), tokens) if counts is None else counts[:, None])
    place = torch.where(there[..., None], places, NOWHERE).clamp(max=capacity)
    k = torch.arange(topk).expand(places.shape)
    return torch.full((capacity + 1,), -1).scatter_(0, place.flatten(), k.flatten())[:capacity]


def spread_bytes(numbers: torch.Tensor, k_of_row: torch.Tensor, topk: int, like: torch.Tensor) -> torch.Tensor:
    """Return rows with the form of `like`, where row i holds `numbers[i]` in the columns of its entry's k.

    >>> rows = spread_bytes(torch.tensor([1.5, -2.0]), torch.tensor([1, 0]), 2, torch.empty(2, 8))
    >>> rows[0].int().tolist(), rows[1].int().tolist()
    ([0, 0, 0, 0, 0, 0, 192, 63], [0, 0, 0, 192, 0, 0, 0, 0])
    """
    each = numbers.view(torch.uint8).view(-1, 1, BYTES)
    of_row = k_of_row[:, None] == torch.arange(topk)
    rows = torch.zeros_like(like)
    rows[:, : topk * BYTES] = (each * of_row[..., None]).flatten(1).to(like.dtype)
    return rows


def gather_bytes(rows: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the float32 numbers that rows hold, [T', K]. A row of NaN gives NaN.

    >>> gather_bytes(torch.tensor([[0, 0, 0, 192, 0, 0, 192, 63]], dtype=torch.bfloat16), 2).tolist()
    [[-2.0, 1.5]]
    """
    columns = rows[:, : topk * BYTES]
    found = columns.nan_to_num(nan=0.0).to(torch.uint8).contiguous().view(torch.float32)
    return torch.where(columns.isnan()[:, :1], torch.nan, found)


# Cases.


@dataclass(frozen=True)
class Case:
    """A dispatch as one rank knows it. `wide`: places are the low halves of u64, and each source has its tokens."""

    counts: tuple[int, ...]
    tokens: int = 6
    topk: int = 3
    dtype: str = "bfloat16"
    wide: bool = True
    hidden: int | None = None
    """Elements of a row; None: as many as the bytes need."""
    seed: int = 1

    @property
    def width(self) -> int:
        return round_up(self.topk * BYTES, 8) if self.hidden is None else self.hidden

    @property
    def like(self) -> torch.Tensor:
        return torch.full((self.capacity, self.width), UNWRITTEN, dtype=getattr(torch, self.dtype))

    @property
    def capacity(self) -> int:
        """More rows than entries, so that there are gaps."""
        return len(self.counts) * self.tokens * self.topk + 5

    def places(self) -> torch.Tensor:
        """Draw the place of each entry, [R, T, K]; a third of them is nowhere. Behind a source's tokens it is any."""
        source, shape = torch.Generator().manual_seed(self.seed), (len(self.counts), self.tokens, self.topk)
        drawn = torch.randperm(self.capacity, generator=source)[: self.capacity - 5].view(shape)
        nowhere = torch.tensor([NOWHERE, self.capacity])[torch.randint(2, shape, generator=source)]
        places = torch.where(torch.rand(shape, generator=source) < 0.3, nowhere, drawn)
        for rank, count in enumerate(self.counts):
            places[rank, count:] = torch.randint(2 * self.capacity, places[rank, count:].shape, generator=source)
            if not self.wide:
                places[rank, count:] = NOWHERE  # what the kernels around NCCL store there
        return places

    def numbers(self, *shape: int) -> torch.Tensor:
        """Draw floats of any bits but NaN, which torch may change."""
        bits = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(self.seed + 1))
        return bits.int().view(torch.float32).nan_to_num(nan=-0.0)


def check_spread(case: Case, *changes: Change) -> None:
    """Raise if a row of an entry differs from what torch writes, or a row of a gap is written."""
    launcher, places, ranks = EmulatedLauncher(seed=case.seed, changes=changes), case.places(), len(case.counts)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    words = places if case.wide else places.to(torch.int32)  # of u64 the high half is a weight
    if case.wide:
        words = words | torch.randint(2**31, places.shape) << 32
    kept = torch.cat((torch.full((8,), 0xEE, dtype=torch.uint8), words.flatten().view(torch.uint8)))
    behind = len(kept)
    kept = torch.cat((kept, counts.view(torch.uint8)))
    rows, numbers = case.like, case.numbers(case.capacity)
    row_bytes = rows[0].nbytes
    params = SpreadWeightsParams(
        places=8,
        tokens=behind if case.wide else NO_OFFSET,
        place_stride=8 if case.wide else 4,
        slot_tokens=case.tokens,
        topk=case.topk,
        entries=ranks * case.tokens * case.topk,
        capacity=case.capacity,
        row_bytes=row_bytes,
        row_threads=row_threads(row_bytes),
    )
    shape = Shape(min(3, params.blocks(launcher.threads)), launcher.threads)
    launcher.ready(spread_source(case.dtype), shape, params)(0, kept=kept, weights=numbers, rows=rows)
    k = k_of_row(places, counts if case.wide else None, case.capacity)
    want = torch.where((k >= 0)[:, None], spread_bytes(numbers, k, case.topk, rows), UNWRITTEN)
    assert torch.equal(rows, want)


def check_gather(case: Case, *changes: Change) -> None:
    """Raise if the numbers of rows differ from those that torch reads."""
    launcher, tokens = EmulatedLauncher(seed=case.seed, changes=changes), case.counts[0]
    numbers = case.numbers(tokens, case.topk)
    rows = torch.zeros(tokens, case.width, dtype=getattr(torch, case.dtype))
    rows[:, : case.topk * BYTES] = numbers.view(torch.uint8).view(tokens, case.topk * BYTES).to(rows.dtype)
    rows[1::3] = torch.nan
    found = torch.full((tokens, case.topk), UNWRITTEN)
    params = GatherWeightsParams(tokens=case.tokens, topk=case.topk, row_bytes=case.width * rows.element_size())
    shape = Shape(min(2, params.blocks(launcher.threads)), launcher.threads)
    launcher.ready(gather_source(case.dtype), shape, params)(0, rows=rows, weights=found, tokens=tokens)
    want = gather_bytes(rows, case.topk)
    assert torch.equal(found.view(torch.int32), want.view(torch.int32))
    assert torch.equal(found[::3].view(torch.int32), numbers[::3].view(torch.int32))


CASES = [
    *(Case((6, 4), dtype=dtype, wide=wide) for dtype in DTYPES for wide in (True, False)),
    *(Case((5, 0, 6), topk=topk, dtype=dtype) for topk in (1, 16) for dtype in DTYPES),
    *(Case((3,), topk=40, tokens=9, dtype=dtype) for dtype in DTYPES),
    Case((0, 0)),
    Case((20, 3), tokens=20, topk=16),
    Case((2, 6, 0, 5, 1, 6, 6, 3), tokens=7, topk=8),
    *(Case((6, 5), dtype=dtype, hidden=hidden) for dtype in DTYPES for hidden in (72, 1032)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_that_torch_writes(case: Case) -> None:
    check_spread(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_that_torch_reads(case: Case) -> None:
    check_gather(case)


@settings(max_examples=25)
@given(st.data())
def test_any_dispatch_has_the_rows_and_numbers_of_torch(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 20))
    case = Case(
        tuple(data.draw(st.lists(st.integers(0, tokens), min_size=1, max_size=5))),
        tokens,
        data.draw(st.integers(1, 20)),
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    check_spread(case)
    check_gather(case)


PLANTED = [
    Change("spread_weights.cu", "number >> (i % 4 * 8)", "number >> ((3 - i % 4) * 8)"),
    Change("spread_weights.cu", "first / 4 + i / 4 == k", "first / 4 == k"),
    Change("spread_weights.cu", "first / 4 + i / 4 == k ?", "first / 4 + i / 4 >= k ?"),
    Change("spread_weights.cu", "token - source * p.slot_tokens >= valid || ", ""),
    Change("spread_weights.cu", " || place >= p.capacity", " || place == 0xFFFFFFFF"),
    Change("spread_weights.cu", "+ source * 4ull", ""),
    Change("spread_weights.cu", "* p.place_stride", "* 4"),
    Change("spread_weights.cu", "entry += step", "entry += p.entries"),
    Change("spread_weights.cu", "thread % p.row_threads * 16", "0"),
    Change("gather_weights.cu", "<< (i * 8)", "<< (24 - i * 8)"),
    Change("gather_weights.cu", "if (values[0] != values[0]) {", "if (false) {"),
    Change("gather_weights.cu", "k * 4 * ROW_TYPE::BYTES", "k * 8"),
    Change("gather_weights.cu", "entry += step", "entry += entries"),
]


@pytest.mark.parametrize("change", PLANTED, ids=lambda change: f"{change.file}: {change.old}")
def test_a_planted_mistake_is_found(change: Change) -> None:
    with pytest.raises((AssertionError, EmulatorError)):
        for case in CASES:
            check_spread(case, change)
            check_gather(case, change)
