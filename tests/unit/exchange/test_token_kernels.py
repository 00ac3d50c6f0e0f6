"""kernels/token_rows/ computes what torch does between both parts of layout `token`, on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raymoe.exchange.backend import Backend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.token_rows import TokenBackend
from tests.emulator.build import Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher
from tests.unit.worlds import wired

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")
AWKWARD = (-1, 7, 8, 9, 15, -2, -4, 2**31 - 1, -(2**31))
WIDE = (2**31, 2**32 + 3, 2**63 - 1, -(2**63), 2**63 - 9)


class NoPart:
    """Stands for a part of the backend, which only says what it can do."""

    sms = None
    capturable = keeps_places = True


def both(ranks: int, topk: int, changes: tuple[Change, ...] = ()) -> list[tuple[TokenBackend, TokenBackend]]:
    """Return for each rank the backend that asks torch, and the one that launches kernels."""
    spec = ExchangeSpec(tokens=53, hidden=8, experts=4 * ranks, topk=topk, layout="token")
    launcher: Any = EmulatedLauncher(seed=topk, changes=changes)
    parts: list[Backend] = [NoPart(), NoPart()]  # type: ignore[list-item]
    worlds: list[Any] = wired(ranks)
    return [
        (TokenBackend(world, spec, parts, None), TokenBackend(world, spec, parts, None, launcher)) for world in worlds
    ]


def differing(pairs: list[tuple[TokenBackend, TokenBackend]], ranks: int, topk: int) -> int:
    """Count the numbers that differ: of ids of both dtypes, known and not, and of rows of which some came."""
    source, count = torch.Generator().manual_seed(ranks), 0
    for rank, (by_torch, by_kernel) in enumerate(pairs):
        assert by_kernel._kernels is not None
        for dtype in (torch.int64, torch.int32):
            ids = torch.randint(-1, 4 * ranks, (53 - 20 * rank, topk), generator=source)
            awkward = AWKWARD + (WIDE if dtype == torch.int64 else ())
            first = ids.flatten()[: len(awkward)]
            first.copy_(torch.tensor(awkward)[: len(first)])
            weights = torch.rand(ids.shape, generator=source)
            want, have = by_torch._pack(ids.to(dtype), weights), by_kernel._kernels.pack(ids.to(dtype), weights)
            assert [each.dtype for each in have] == [each.dtype for each in want]
            count += sum(int((mine != theirs).sum()) for mine, theirs in zip(have, want, strict=True))
        capacity, width = by_torch._capacity, by_torch._width
        brought = torch.rand(capacity, width, generator=source)
        brought[:, :topk] = torch.randint(-1, 4 * ranks, (capacity, topk), generator=source)
        brought[:, 2 * topk : 2 * topk + 2] = torch.randint(0, 99, (capacity, 2), generator=source)
        for came in (0, 17, capacity):
            rows = brought.clone()
            rows[came:] = torch.nan
            offsets = torch.tensor([0, came], dtype=torch.int32)
            want, have = by_torch._take(rows, offsets), by_kernel._kernels.take(rows, offsets)
            assert [each.dtype for each in have] == [each.dtype for each in want]
            count += sum(int((mine != theirs).sum()) for mine, theirs in zip(have, want, strict=True))
    return count


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_kernels_compute_what_torch_computes(ranks: int, topk: int) -> None:
    assert differing(both(ranks, topk), ranks, topk) == 0


def test_no_token_is_packed_too() -> None:
    for by_torch, by_kernel in both(2, 2):
        assert by_kernel._kernels is not None
        ids, weights = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
        want, have = by_torch._pack(ids, weights), by_kernel._kernels.pack(ids, weights)
        assert [each.shape for each in have] == [each.shape for each in want]


BUGS = {
    "a token is sent to a rank twice": ("first && owner_of(p, id_of(p, entry - i)) != owner", "first"),
    "the first entry of a token is not looked at": ("i <= k; ++i", "i < k; ++i"),
    "negative ids are rounded up": ("-1 - (-(id + 1)) / local", "id / local"),
    "unknown ids get a home": ("bool first = known", "bool first = true"),
    "wrong ids are hidden from the rows' part": ("known ? home : id", "home"),
    "a home is a rank": ("owner * p.local : -1", "owner : -1"),
    "numbers after a token's are left": ("u32 at = 2 * p.topk + 2; at", "u32 at = 2 * p.topk + 3; at"),
    "rows that did not come are read": ("bool there = row < came", "bool there = row <= came"),
    "experts of the rank after are taken": (
        "expert < static_cast<float>(p.local)",
        "expert <= static_cast<float>(p.local)",
    ),
    "experts of the rank before are taken": ("expert >= 0.0f", "expert >= -1.0f"),
    "with one expert for each token only one source is stored": ("i += p.topk", "i += 2"),
    "an entry is counted for each row": ("if (here) {", "if (here && k == 0) {"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bug", BUGS)
def test_an_injected_bug_is_found(bug: str) -> None:
    file = "pack_choices.cu" if list(BUGS).index(bug) < 7 else "take_choices.cu"
    change = Change(file, *BUGS[bug])
    try:
        assert any(differing(both(3, topk, (change,)), 3, topk) for topk in (4, 1))
    except EmulatorError:
        return
