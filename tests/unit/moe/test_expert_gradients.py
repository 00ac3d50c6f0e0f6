"""Gradients of experts' biases and of weighted rows: sums in float32, of rows that are there alone, on both paths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raymoe.moe import experts as experts_of_a_layer
from raymoe.moe.expert_kernels import ActivationForm, ExpertKernel
from raymoe.moe.expert_rows import Groups, add_expert_bias, gated_activation, weigh_gradients
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights
from raymoe.moe.grouped import grouped_linear
from tests.emulator.build import compiler
from tests.unit.rows.emulated_pipe import close, run_call, tensors_of

BF16 = torch.bfloat16
OFFSETS, COUNTS = torch.tensor([0, 8, 8, 24], dtype=torch.int32), torch.tensor([5, 0, 16], dtype=torch.int32)
ROWS = 40


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Take the path of GPUs for tensors on the CPU; yields the names of the kernels, which are emulated."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler, which compiles kernels for a CPU")
    names: list[str] = []

    def emulate(kernel: ExpertKernel) -> None:
        call = kernel.kernel_call()
        names.append(call.source.stem)
        run_call(call, [*tensors_of(kernel), *tensors_of(kernel.places)])

    monkeypatch.setattr(ExpertKernel, "launch", emulate)
    monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda x: x.dtype == BF16)
    monkeypatch.setattr(experts_of_a_layer, "_in_kernels", lambda _: True)
    yield names


@pytest.fixture(params=["formula", "kernels"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "kernels":
        request.getfixturevalue("launched")
    return str(request.param)


def drawn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts_of(activation: Activation, biases: bool = True) -> Experts:
    weights = ModelWeights(drawn(3, 64, 32, seed=1) / 6, drawn(3, 32, 32, seed=2) / 6)
    if biases:
        weights.gate_up_proj_bias, weights.down_proj_bias = drawn(3, 64, seed=3), drawn(3, 32, seed=4)
    return Experts(weights, activation)


def weights_of_rows(seed: int) -> torch.Tensor:
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) + 0.5


def gradients(experts: Experts, x: torch.Tensor, share: torch.Tensor | None, dy: torch.Tensor) -> list[torch.Tensor]:
    wanted = [x, *([] if share is None else [share]), *experts.parameters()]
    return list(torch.autograd.grad(experts(x, OFFSETS, COUNTS, share), wanted, dy))


# Sums by expert.


@pytest.mark.parametrize("rows", [64, 256, 4096])
def test_the_gradient_of_a_bias_counts_all_rows(path: str, rows: int) -> None:
    """A sum in bfloat16 stays at 256: 256 + 1 is rounded to 256."""
    del path
    bias = torch.zeros(1, 16, dtype=BF16, requires_grad=True)
    groups = Groups(torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32))
    x, weight = torch.zeros(rows, 8, dtype=BF16), torch.zeros(1, 16, 8, dtype=BF16)
    grouped_linear(x, weight, groups.offsets, groups.counts, bias=bias).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [[float(rows)] * 16]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_biases_leave_out_gaps_and_rows_after_the_last_offset(path: str, compiled: bool) -> None:
    del path
    there = Groups(OFFSETS, COUNTS).expert_of_row(ROWS) < 3
    bias, share = drawn(3, 32, seed=1).requires_grad_(), weights_of_rows(2).requires_grad_()
    rows, dy = drawn(ROWS, 32, seed=3), drawn(ROWS, 32, seed=4)
    for each in (rows, dy, share.detach()):
        each[~there] = torch.nan

    def step(rows: torch.Tensor, bias: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return add_expert_bias(rows, bias, Groups(OFFSETS, COUNTS), share)

    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(step(rows, bias, share), [bias, share], dy) for _ in range(2)]
    exact, part = bias.detach().double().requires_grad_(), share.detach()[there].double().requires_grad_()
    expert = Groups(OFFSETS, COUNTS).expert_of_row(ROWS)[there]
    y = exact[expert] * part[:, None]
    wanted = torch.autograd.grad(y, [exact, part], dy[there].double())
    close(found[0][0], wanted[0], 4.0)
    close(found[0][1][there], wanted[1], 32.0)
    assert torch.equal(found[0][0], found[1][0]), "another sum in the second run"


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", [GPT_OSS, SWIGLU], ids=["gpt_oss", "swiglu"])
def test_all_gradients_of_bfloat16_experts_are_near_float64_and_repeat(
    path: str, activation: Activation, weighted: bool, recomputes: bool
) -> None:
    del path
    there = Groups(OFFSETS, COUNTS).expert_of_row(ROWS) < 3
    experts = experts_of(activation)
    experts.recomputes = recomputes
    x, dy = drawn(ROWS, 32, seed=5), drawn(ROWS, 32, seed=6)
    share = weights_of_rows(7)
    for each in (x, dy):
        each[OFFSETS[-1] :] = torch.nan
        each[:24][~there[:24]] = 0
    share[~there] = 0
    factor = share.requires_grad_() if weighted else None
    found, again = (gradients(experts, x.clone().requires_grad_(), factor, dy) for _ in range(2))
    assert all(
        torch.equal(one[there] if len(one) == ROWS else one, two[there] if len(two) == ROWS else two)
        for one, two in zip(found, again, strict=True)
    )
    exact = Experts(ModelWeights(*(each.detach().double() for each in experts.parameters())), activation)
    exact_x, exact_share = x[there].double().requires_grad_(), share.detach()[there].double().requires_grad_()
    offsets = torch.tensor([0, 5, 5, 21], dtype=torch.int32)
    y = exact(exact_x, offsets, COUNTS, exact_share if weighted else None)
    leaves = [exact_x, *([exact_share] if weighted else []), *exact.parameters()]
    for have, want in zip(found, torch.autograd.grad(y, leaves, dy[there].double()), strict=True):
        have = have[there] if len(have) == ROWS else have
        error = (have.double() - want).abs().max() / want.abs().max()
        assert error < 0.02, f"{list(have.shape)}: {error}"


def test_gpt_oss_goes_through_the_kernels_forward_and_backward(launched: list[str]) -> None:
    experts = experts_of(GPT_OSS)
    x, share = drawn(ROWS, 32, seed=5).requires_grad_(), weights_of_rows(6).requires_grad_()
    y = experts(x, OFFSETS, COUNTS, share)
    assert launched == ["add_expert_bias", "gated_activation", "add_expert_bias"]
    launched.clear()
    y.backward(torch.ones_like(y))
    # the sums of both biases, and the products of dy and the second one for the weights
    assert sorted(launched) == ["expert_sums", "expert_sums", "gated_activation_backward", "weigh_gradients"]
    launched.clear()
    frozen = experts_of(GPT_OSS).requires_grad_(requires_grad=False)
    frozen(x, OFFSETS, COUNTS).sum().backward()
    assert launched == ["add_expert_bias", "gated_activation", "add_expert_bias", "gated_activation_backward"]


@pytest.mark.parametrize("activation", [GPT_OSS, SWIGLU], ids=["gpt_oss", "swiglu"])
def test_compiled_experts_are_one_graph_with_the_same_gradients(launched: list[str], activation: Activation) -> None:
    experts, x, share = experts_of(activation), drawn(ROWS, 32, seed=5), weights_of_rows(6)
    x[OFFSETS[-1] :] = 0  # eager CPUs leave them out
    dy, there = drawn(ROWS, 32, seed=7), Groups(OFFSETS, COUNTS).expert_of_row(ROWS) < 3
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    results = []
    for run in (experts, compiled):
        launched.clear()
        leaves = x.clone().requires_grad_(), share.clone().requires_grad_()
        y = run(leaves[0], OFFSETS, COUNTS, leaves[1])
        found = y, *torch.autograd.grad(y, [*leaves, *experts.parameters()], dy.where(there[:, None], 0))
        results.append([each[there] if len(each) == ROWS else each for each in found])
        assert "gated_activation_backward" in launched and "expert_sums" in launched
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("form", [ActivationForm(), ActivationForm(True, 1.702, 1.0, 1.0), ActivationForm(limit=0.5)])
def test_gradients_of_the_formula_equal_finite_differences(form: ActivationForm) -> None:
    """In float64, which no kernel takes."""
    gate_up, bias = (drawn(*shape, seed=1, dtype=torch.float64) for shape in ((12, 8), (2, 8)))
    groups = Groups(torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32))
    weights = torch.rand(12, generator=torch.Generator().manual_seed(2))

    def step(gate_up: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gated_activation(form, gate_up, bias, groups, weights)[:9]

    assert torch.autograd.gradcheck(step, (gate_up.requires_grad_(), bias.requires_grad_()))


def test_operators_pass_opcheck() -> None:
    ops = torch.ops.raymoe
    rows, wide = drawn(ROWS, 8, seed=1, dtype=torch.float32), drawn(ROWS, 16, seed=2, dtype=torch.float32)
    bias, both = drawn(3, 8, seed=3, dtype=torch.float32), drawn(3, 16, seed=4, dtype=torch.float32)
    weights, form = weights_of_rows(5), (True, 1.702, 7.0, 1.0)
    for each in (rows, wide, bias, both, weights):
        each.requires_grad_()
    for share in (weights, None):
        torch.library.opcheck(ops.add_expert_bias, (rows, bias, OFFSETS, COUNTS, share))
        torch.library.opcheck(ops.gated_activation, (wide, both, OFFSETS, COUNTS, share, *form))
        torch.library.opcheck(ops.gated_activation, (wide, None, OFFSETS, COUNTS, share, *form))
    rows, wide, bias, both, weights = (each.detach() for each in (rows, wide, bias, both, weights))
    for share in (weights, None):
        torch.library.opcheck(ops.expert_sums, (rows, OFFSETS, COUNTS, share))
        back = rows, wide, both, OFFSETS, COUNTS, share, *form
        torch.library.opcheck(ops.gated_activation_backward, back)
    torch.library.opcheck(ops.bias_dots, (rows, bias, OFFSETS, COUNTS))
    for other in (wide[:, :8].contiguous(), None):
        torch.library.opcheck(ops.weigh_gradients, (rows.clone(), weights, OFFSETS, other))


# Weights that a combine applied.


@pytest.mark.parametrize("dotted", [False, True])
def test_weighted_gradients_stop_at_the_last_offset(path: str, dotted: bool) -> None:
    del path
    end = int(OFFSETS[-1])
    dy, rows, weights = drawn(ROWS, 32, seed=1), drawn(ROWS, 32, seed=2), weights_of_rows(3)
    for each in (dy, rows, weights):
        each[end:] = torch.nan
    scaled = dy.clone()
    d_weights = weigh_gradients(scaled, weights, OFFSETS, rows if dotted else None)
    close(scaled[:end], dy[:end].double() * weights[:end, None].double())
    assert scaled[end:].isnan().all() and len(d_weights) == (ROWS if dotted else 0)
    if dotted:
        close(d_weights[:end], (dy[:end].double() * rows[:end].double()).sum(dim=1), 64.0)
