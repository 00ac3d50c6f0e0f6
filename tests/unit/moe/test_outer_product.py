"""kernels/moe/outer_product.cu on the emulator, against exact results: operands are small integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulator.build import compiler
from tests.unit.moe.emulated_outer import OuterCase, drawn_case, expected, judge, run_outer

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")

F16 = torch.float16


def check(case: OuterCase, blocks: int = 2, seed: int = 0) -> None:
    product = case.product()
    wanted = expected(product)
    run_outer(product, blocks, seed)
    judge(product, wanted)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        OuterCase(),
        OuterCase((64, 65, 0, 128, 3), outputs=8, columns=8),
        OuterCase((16, 48, 33), outputs=136, columns=328),
        OuterCase((200,), outputs=128, columns=256, gap=0),
        OuterCase((300, 1), outputs=64, columns=192, gap=None),
        OuterCase((0, 0), outputs=72, columns=264),
        OuterCase((1,) * 33, outputs=16, columns=16, gap=0),
        OuterCase((31, 5), dtype=F16, columns=136),
    ],
    ids=str,
)
def test_each_expert_multiplies_its_own_rows(case: OuterCase, adds: bool) -> None:
    """Rows of no expert are NaN, which must not spread."""
    check(replace(case, adds=adds))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_blocks_shares_the_tiles(seed: int) -> None:
    check(OuterCase((70, 0, 20, 150), outputs=136, columns=264), blocks=seed % 3 + 1, seed=seed)


@pytest.mark.parametrize("adds", [False, True])
def test_a_second_launch_gives_the_same_bits(adds: bool) -> None:
    """The first one leaves the counter of tiles at zero."""
    case = OuterCase(normal=True, adds=adds)
    once, twice = case.product(), case.product()
    run_outer(once)
    if adds:
        run_outer(once, blocks=3, seed=2)
    run_outer(twice, blocks=3, seed=1, launches=2)
    assert torch.equal(once.d_weight, twice.d_weight)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_drawn_cases(seed: int) -> None:
    check(drawn_case(seed), blocks=seed % 4 + 1, seed=seed)
