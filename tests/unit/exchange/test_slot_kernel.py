"""kernels/slots/take_slots.cu equals the table that CPU ranks read, on the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.exchange.slots import SlotTable
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import Change, compiler
from tests.unit.exchange.exchange_cases import Case
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher
from tests.unit.exchange.test_slots import drawn_experts
from tests.unit.worlds import wired

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")
SPEC = ExchangeSpec(tokens=150, hidden=8, experts=7, topk=3, slots=5)
AWKWARD = (-1, 6, 7, 9, 14, 15, -2, 2**31 - 1, -(2**31), 2**31 - 9)
WIDE = (2**31, 2**32 + 3, 2**63 - 1, -(2**63), 2**63 - 9)


def tables(case: Case, changes: tuple[Change, ...] = ()) -> list[tuple[SlotTable, SlotTable]]:
    """Return for each rank the table that torch reads, and the one that the kernel reads."""
    worlds: list[Any] = wired(case.ranks)
    launcher: Any = EmulatedLauncher(seed=1, changes=changes)
    return [(SlotTable(world, case.spec), SlotTable(world, case.spec, launcher)) for world in worlds]


def ids_of(case: Case, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(-1, case.spec.experts, (tokens, case.spec.topk), generator=source)
    awkward = AWKWARD + (WIDE if dtype == torch.int64 else ())
    ids.flatten()[: len(awkward)] = torch.tensor(awkward)
    return ids.to(dtype)


def differing(case: Case, changes: tuple[Change, ...] = ()) -> int:
    """Count the entries whose slots differ, over placements, dtypes of ids and ranks."""
    count = 0
    for rank, (of_torch, of_kernel) in enumerate(tables(case, changes)):
        for number, dtype in enumerate((torch.int64, torch.int32)):
            experts = drawn_experts(case, number)
            of_torch.write(experts)
            of_kernel.write(experts)
            ids = ids_of(case, case.spec.tokens - rank * 40, dtype)
            want, have = of_torch.slots_of(ids), of_kernel.slots_of(ids)
            assert have.dtype == dtype and have.shape == ids.shape
            count += int((want != have).sum())
    return count


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_kernel_takes_the_slots_that_torch_takes(ranks: int) -> None:
    case = Case(ranks, replace(SPEC, slots=5 if ranks > 1 else 9), "none", (), seed=ranks)
    assert differing(case) == 0


def test_no_token_is_taken_too() -> None:
    for of_torch, of_kernel in tables(Case(2, SPEC, "none", ())):
        ids = torch.empty(0, 3, dtype=torch.int64)
        assert of_torch.slots_of(ids).shape == of_kernel.slots_of(ids).shape == (0, 3)


BUGS = {
    "the rank is left out of the hash": ("+ rank * 0x85EBCA6Bu", ""),
    "a copy is taken by the token alone": ("token_hash(p.rank, token)", "token_hash(p.rank, 0)"),
    "the last copy is never taken": ("(end - first) >> 32", "(end - first - 1) >> 32"),
    "ids without an expert stay": ("+ beyond;", ";"),
    "narrow ids lose their sign": (
        "static_cast<int>(ptx::load_4(p.topk_idx",
        "static_cast<u32>(ptx::load_4(p.topk_idx",
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs_of_the_kernel_are_found(bug: str) -> None:
    path = "take_slots.cu"
    assert differing(Case(2, SPEC, "none", (), seed=5), (Change(path, *BUGS[bug]),)) > 0
