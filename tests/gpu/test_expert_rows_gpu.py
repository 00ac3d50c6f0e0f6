"""Biases, gated activations and weighted gradients of experts' rows on a GPU: eager, compiled and captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe.expert_kernels import ActivationForm  # noqa: E402
from raymoe.moe.expert_rows import Groups, add_expert_bias, gated_activation, weigh_gradients  # noqa: E402
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights  # noqa: E402
from raymoe.moe.grouped import grouped_linear  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("gpu")]

BF16 = torch.bfloat16
STEPS = ("eager", "compiled", "captured")


def drawn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


class Rows:
    """Experts with gaps after their rows, and as many rows again after the last offset, all of those NaN."""

    def __init__(self, *counts: int, alignment: int = 16) -> None:
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-(count + 1) // alignment) * alignment)
        self.end, self.capacity, self.experts = starts[-1], 2 * starts[-1], len(counts)
        self.groups = Groups(*(torch.tensor(each, dtype=torch.int32, device="cuda") for each in (starts, counts)))
        self.expert = self.groups.expert_of_row(self.capacity)
        self.there = self.expert < self.experts

    def drawn(self, columns: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        rows = drawn(self.capacity, columns, seed=seed, dtype=dtype)
        rows[~self.there] = torch.nan
        return rows

    def weights(self, seed: int) -> torch.Tensor:
        weights = torch.rand(self.capacity, generator=torch.Generator().manual_seed(seed)).cuda() + 0.25
        return weights.where(self.there, torch.nan)


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float = 2**-7) -> None:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    assert error <= bound, f"{list(found.shape)}: {error}"


def prepared(how: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled if that is asked for. Gradients are taken outside, as programs do."""
    return torch.compile(function, fullgraph=True) if how == "compiled" else function


def results_of(how: str, step: Callable[[], Any]) -> list[torch.Tensor]:
    """Run a step, in a graph that is replayed twice if it is `captured`."""
    if how != "captured":
        return [each.clone() for each in step()]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # kernels are loaded before the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            found = step()
        for each in found:
            each.zero_()
        for _ in range(2):
            graph.replay()
        kept = [each.clone() for each in found]
        torch.cuda.synchronize()
    del graph
    return kept


# Sums by expert.


@pytest.mark.parametrize("rows", [64, 256, 4096])
def test_the_gradient_of_a_bias_counts_all_rows(rows: int) -> None:
    """By atomics in bfloat16 it was 256 for 4096 rows, and in random order."""
    bias = torch.zeros(1, 32, device="cuda", dtype=BF16, requires_grad=True)
    x, weight = torch.zeros(rows, 64, device="cuda", dtype=BF16), torch.zeros(1, 32, 64, device="cuda", dtype=BF16)
    places = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, rows], [rows]))
    grouped_linear(x, weight, *places, bias=bias).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [[float(rows)] * 32]


@pytest.mark.parametrize("how", STEPS)
def test_gradients_of_biases_are_near_float64_and_equal_in_five_runs(how: str) -> None:
    rows = Rows(4096, 0, 33, 1000)
    source, dy, share = rows.drawn(96, 1), rows.drawn(96, 2), rows.weights(3).requires_grad_()
    bias = drawn(4, 96, seed=4).requires_grad_()
    dy[rows.there] += 0.5

    add = prepared(how, lambda source, bias, share: add_expert_bias(source, bias, rows.groups, share))

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(add(source, bias, share), (bias, share), dy)

    found = [results_of(how, step) for _ in range(5 if how == "eager" else 2)]
    own = dy[rows.there].double()
    wanted = torch.zeros(4, 96, dtype=torch.float64, device="cuda")
    wanted.index_add_(0, rows.expert[rows.there], own * share.detach()[rows.there, None].double())
    near(found[0][0], wanted, 2**-8)
    near(found[0][1][rows.there], (own * bias.detach()[rows.expert[rows.there]].double()).sum(dim=1), 1e-5)
    for again in found[1:]:
        assert torch.equal(again[0], found[0][0]) and torch.equal(again[1][rows.there], found[0][1][rows.there])


# Gated activations.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", [ActivationForm(True, 1.702, 1.5, 1.0), ActivationForm(), ActivationForm(limit=1.0)])
@pytest.mark.parametrize("ffn", [64, 2880])
def test_gated_activations_and_their_gradients_equal_the_formula(
    ffn: int, form: ActivationForm, biased: bool, weighted: bool
) -> None:
    """The same operators in float64 on the CPU."""
    rows = Rows(100, 0, 7, 290)
    given = rows.drawn(2 * ffn, 1), drawn(4, 2 * ffn, seed=2) if biased else None
    share, dh = rows.weights(3) if weighted else None, rows.drawn(ffn, 4)
    results = []
    for device, dtype in (("cuda", BF16), ("cpu", torch.float64)):
        leaves = [None if each is None else each.to(device, dtype).requires_grad_() for each in given]
        factor = None if share is None else share.to(device).requires_grad_()
        groups = Groups(rows.groups.offsets.to(device), rows.groups.counts.to(device))
        h = gated_activation(form, leaves[0], leaves[1], groups, factor)
        differentiated = [each for each in (*leaves, factor) if each is not None]
        gradients = torch.autograd.grad(h, differentiated, dh.to(device, dtype))
        results.append([each.cpu() for each in (h.detach(), *gradients)])
    there = rows.there.cpu()
    for have, want in zip(*results, strict=True):
        by_row = len(have) == rows.capacity
        near(have[there] if by_row else have, want[there] if by_row else want)
        if by_row:
            assert not have[: rows.end][~there[: rows.end]].any(), "rows in gaps are zero"


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("activation", [GPT_OSS, SWIGLU, Activation(limit=2.0)], ids=["gpt_oss", "swiglu", "clamped"])
def test_all_gradients_of_experts_with_biases_are_near_float64_and_repeat(how: str, activation: Activation) -> None:
    """The rows from the last offset on are NaN, in dy too."""
    rows = Rows(600, 0, 33, 1000)
    shapes = ((4, 128, 256), (4, 128, 128), (4, 256), (4, 128))
    drawings = [
        drawn(*shape, seed=seed) * (shape[1] ** -0.5 if len(shape) == 3 else 0.5) for seed, shape in enumerate(shapes)
    ]
    experts = Experts(ModelWeights(*drawings, transposed=True), activation)
    x, dy, share = rows.drawn(128, 7), rows.drawn(128, 8), rows.weights(9)
    gaps = ~rows.there
    gaps[rows.end :] = False
    for each in (x, dy, share):
        each[gaps] = 0  # as a dispatch leaves them, for the gradients of weights
    x.requires_grad_()
    share.requires_grad_()

    compute = prepared(how, experts)

    def step() -> tuple[torch.Tensor, ...]:
        y = compute(x, rows.groups.offsets, rows.groups.counts, share)
        return (y.detach(), *torch.autograd.grad(y, [x, share, *experts.parameters()], dy))

    found, again = (results_of(how, step) for _ in range(2))
    exact = Experts(ModelWeights(*(each.detach().double().cpu() for each in drawings), transposed=True), activation)
    leaves = [each.detach()[rows.there].double().cpu().requires_grad_() for each in (x, share)]
    counts = rows.groups.counts.cpu()
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0).int()))
    y = exact(leaves[0], offsets, counts, leaves[1])
    wanted = y, *torch.autograd.grad(y, [*leaves, *exact.parameters()], dy[rows.there].double().cpu())
    for have, same, want in zip(found, again, wanted, strict=True):
        by_row = len(have) == rows.capacity
        have, same = (each[rows.there] if by_row else each for each in (have, same))
        near(have.cpu(), want.detach(), 2e-2 if activation.limit != 2.0 else 6e-2)  # a few are beyond the limit
        assert torch.equal(have, same)


# Weights that a combine applied.


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_weighted_gradients_are_in_place_and_stop_at_the_last_offset(dtype: torch.dtype, how: str) -> None:
    rows = Rows(300, 0, 7, 1001)
    given, other, weights = rows.drawn(1032, 1, dtype), rows.drawn(1032, 2, dtype), rows.weights(3)
    given[rows.end :] = 3.0

    def weighed(given: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dy = given.clone()
        return dy, weigh_gradients(dy, weights, rows.groups.offsets, other)

    compute = prepared(how, weighed)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return compute(given, other)

    dy, d_weights = results_of(how, step)
    own = given[rows.there].double()
    near(dy[rows.there], own * weights[rows.there, None].double(), 1e-6 if dtype == torch.float32 else 2**-8)
    near(d_weights[rows.there], (own * other[rows.there].double()).sum(dim=1), 1e-5)
    assert bool((dy[rows.end :] == 3.0).all())


def test_weighted_gradients_need_no_more_memory_than_a_number_for_each_row() -> None:
    """Two float32 copies of the rows took 15 GB with 8 ranks."""
    capacity, hidden = 65536, 1024
    dy, rows = (torch.zeros(capacity, hidden, dtype=BF16, device="cuda") for _ in range(2))
    weights = torch.ones(capacity, device="cuda")
    offsets = torch.tensor([0, 512], dtype=torch.int32, device="cuda")
    weigh_gradients(dy, weights, offsets, rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weigh_gradients(dy, weights, offsets, rows)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * capacity + 4096


def test_no_call_makes_the_host_wait() -> None:
    rows = Rows(40, 9)
    wide, bias, narrow = rows.drawn(128, 1).requires_grad_(), drawn(2, 128, seed=2).requires_grad_(), rows.drawn(64, 3)
    share, offsets = rows.weights(4).requires_grad_(), rows.groups.offsets

    def step() -> None:
        h = gated_activation(ActivationForm(True, 1.702, 7.0, 1.0), wide, bias, rows.groups, share)
        y = add_expert_bias(h, bias[:, :64], rows.groups, share)
        torch.autograd.grad(y, (wide, bias, share), narrow)
        weigh_gradients(narrow.clone(), share.detach(), offsets, narrow)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
