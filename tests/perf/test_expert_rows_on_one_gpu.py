"""Work on the rows of gpt-oss's experts, one rank of eight, in a CUDA graph: kernels, and torch over all places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe.expert_rows import Groups  # noqa: E402
from raymoe.moe.experts import GPT_OSS  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402
from tests.perf.test_few_rows_on_one_gpu import clock, counts_of, us_of  # noqa: E402

__all__ = ["clock"]  # a fixture
pytestmark = [*NEEDS_GPU, pytest.mark.perf]
EXPERTS, RANKS, H, F, ALIGNMENT = 16, 8, 2880, 2880, 16
NUMBERS = (True, 1.702, 7.0, 1.0)


class Inputs:
    """The rows of 4096 tokens of each rank, top-4: an eighth of the places has one."""

    def __init__(self) -> None:
        self.counts = counts_of(EXPERTS, 1024)
        ends = ((self.counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0).int()
        self.offsets = torch.cat((ends.new_zeros(1), ends))
        self.capacity, self.there = RANKS * 4096 * 4, int(ends[-1])
        new: Any = {"device": "cuda", "dtype": torch.bfloat16}
        self.wide, self.narrow = torch.randn(self.capacity, 2 * F, **new), torch.randn(self.capacity, H, **new)
        self.other = torch.randn(self.capacity, H, **new)
        self.bias, self.wide_bias = torch.randn(EXPERTS, H, **new), torch.randn(EXPERTS, 2 * F, **new)
        self.weights = torch.rand(self.capacity, device="cuda")
        self.places = self.offsets, self.counts


def torch_activation(given: Inputs) -> torch.Tensor:
    expert = Groups(*given.places).expert_of_row(given.capacity)
    padded = torch.cat((given.wide_bias, given.wide_bias.new_zeros(1, 2 * F)))
    h = GPT_OSS._unweighted(given.wide + padded.index_select(0, expert))
    return (h.float() * given.weights[:, None]).to(h.dtype)


def torch_bias(given: Inputs) -> torch.Tensor:
    expert = Groups(*given.places).expert_of_row(given.capacity)
    padded = torch.cat((given.bias, given.bias.new_zeros(1, H)))
    added = padded.index_select(0, expert).float() * given.weights[:, None]
    return given.narrow + added.to(given.narrow.dtype)


def torch_sums(given: Inputs) -> torch.Tensor:
    expert = Groups(*given.places).expert_of_row(given.capacity)
    return given.bias.new_zeros(EXPERTS + 1, H).index_add_(0, expert, given.narrow)


def torch_weighed(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    d_weights = (given.narrow.float() * given.other.float()).sum(dim=1)
    return (given.narrow.float() * given.weights[:, None]).to(given.narrow.dtype), d_weights


OPS = torch.ops.raymoe
CASES: dict[str, tuple[Callable[[Inputs], Any], Callable[[Inputs], Any] | None, float]] = {
    "gated_activation": (
        lambda g: OPS.gated_activation(g.wide, g.wide_bias, *g.places, g.weights, *NUMBERS),
        torch_activation,
        2 * F + F,
    ),
    "gated_activation_backward": (
        lambda g: OPS.gated_activation_backward(g.narrow, g.wide, g.wide_bias, *g.places, g.weights, *NUMBERS),
        None,
        5 * F,
    ),
    "add_expert_bias": (lambda g: OPS.add_expert_bias(g.narrow, g.bias, *g.places, g.weights), torch_bias, 2 * H),
    "expert_sums": (lambda g: OPS.expert_sums(g.narrow, *g.places, g.weights), torch_sums, H),
    "bias_dots": (lambda g: OPS.bias_dots(g.narrow, g.bias, *g.places), None, H),
    "weigh_gradients": (
        lambda g: OPS.weigh_gradients(g.narrow, g.weights, g.offsets, g.other),
        torch_weighed,
        3 * H,
    ),
}
"""What is timed, the same by torch, and the elements of a row that are read or written."""


@pytest.fixture(scope="module")
def given() -> Inputs:
    return Inputs()


@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_there_take_less_time_than_all_places(clock: Any, given: Inputs, name: str) -> None:
    work, by_torch, elements = CASES[name]
    took = us_of(clock, lambda: work(given))
    speed = given.there * elements * 2 / took / 1e6
    theirs = None if by_torch is None else us_of(clock, lambda: by_torch(given))
    print(f"{name}, {given.there} of {given.capacity} rows: {took:.1f} us, {speed:.2f} TB/s; torch over all: {theirs}")
    assert theirs is None or took < theirs
