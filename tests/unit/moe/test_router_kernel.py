"""kernels/moe/router.cu on the emulator against a reference in float64, and the formulas and gradients beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.moe import router_formulas as formulas
from raymoe.moe import router_kernels as kernels
from raymoe.moe.router import Router, balance_loss, route
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.router_kernels import Route, RouteBackward, RouterSums
from tests.emulator.build import Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.moe.router_cases import FORMS, any_bias, bias_for, expected, tied
from tests.unit.rows.emulated_pipe import run_call, tensors_of

NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP = 1e-5


def emulate(kernel: Route | RouteBackward | RouterSums, changes: Sequence[Change] = ()) -> None:
    run_call(kernel.kernel_call(), tensors_of(kernel), changes=changes)


def by_kernel(
    logits: Tensor, form: RouterForm, bias: Tensor | None = None, changes: Sequence[Change] = ()
) -> tuple[Tensor, Tensor]:
    """Route as GPUs do, with the kernel emulated."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Route, "launch", lambda kernel: emulate(kernel, changes))
        return kernels.route(logits, bias, form)


def judge(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.float32
    assert torch.equal(found[0], want[0])
    torch.testing.assert_close(found[1], want[1].float(), rtol=STEP, atol=1e-7)


# The kernel.


@NEEDS_COMPILER
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_makes_the_choice_of_the_reference(name: str) -> None:
    """Also where scores tie: then the lowest id comes first."""
    form, bias = FORMS[name], bias_for(name)
    for seed, tokens in enumerate((0, 1, 7, 3)):
        logits = tied(name, tokens, seed)
        judge(by_kernel(logits, form, bias), expected(logits, form, bias))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "all of five"])
def test_the_kernel_takes_logits_of_any_dtype_from_any_address(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    logits = tied(name, 10, 4, dtype)
    for view in (logits, logits[3:], logits.T.contiguous().T, logits.repeat(1, 2)[:, : form.experts]):
        judge(by_kernel(view, form), expected(view, form))


@NEEDS_COMPILER
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_and_the_formula_agree_on_any_logits(name: str) -> None:
    form, bias = FORMS[name], any_bias(name)
    for scale in (0.1, 1.0, 30.0):
        logits = torch.randn(6, form.experts, generator=torch.Generator().manual_seed(9)) * scale
        if scale > 1:
            bias = None  # most scores are 0 or 1, so that only biases decide
        judge(by_kernel(logits, form, bias), formulas.route(logits, form, bias))


ODD = {
    "a NaN": (3, torch.nan),
    "a negative NaN": (3, -torch.nan),
    "an infinity": (3, torch.inf),
    "experts that may not be chosen": (slice(0, 4), -torch.inf),
    "nothing but NaN": (slice(None), torch.nan),
    "nothing but -infinity": (slice(None), -torch.inf),
    "zeros of both signs": (slice(None, None, 2), -0.0),
}


@pytest.mark.one_in(5)
@NEEDS_COMPILER
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss", "olmoe", "deepseek_v2"])
def test_logits_that_are_not_finite_give_valid_ids_and_the_weights_of_the_formula(name: str, odd: str) -> None:
    form, bias = FORMS[name], bias_for(name)
    where, value = ODD[odd]
    logits = torch.randn(2, form.experts, generator=torch.Generator().manual_seed(3))
    if odd.startswith("zeros"):
        logits = torch.zeros_like(logits)
    logits[0, where] = value
    ids, weights = by_kernel(logits, form, bias)
    want_ids, want = formulas.route(logits, form, bias)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=STEP, atol=1e-7, equal_nan=True)
    assert all(len(set(row)) == form.topk and 0 <= min(row) <= max(row) < form.experts for row in ids.tolist())
    assert not weights[1].isnan().any()


LAST_LANE = "31 - __clz(__ballot_sync(ALL_LANES, own == best))"
INJECTED_BUGS = {
    "of equal lanes the last": (
        "qwen3",
        Change(
            "router.cu",
            "__ffs(__ballot_sync(ALL_LANES, own == best)) - 1",
            LAST_LANE,
        ),
    ),
    "of equal experts of a lane the last": ("deepseek_v3", Change("router.cu", "open = open && !here;", "")),
    "an expert is chosen again": ("olmoe", Change("router.cu", "orders[i] = here ? LEAST : orders[i];", "")),
    "a group's best alone": (
        "deepseek_v3",
        Change("router.cu", "float_of(first) + float_of(second)", "float_of(first)"),
    ),
    "the second best of one lane alone": (
        "deepseek_v3",
        Change("router.cu", "second = max(min(first, other), max(second, next));", ""),
    ),
    "of equal groups the last": ("deepseek_v3", Change("router.cu", "other < group", "other > group")),
    "one group too many": ("deepseek_v2", Change("router.cu", "better < TOPK_GROUPS", "better <= TOPK_GROUPS")),
    "the bias weighs": (
        "kimi_k2",
        Change("router.cu", "here ? scores[i] : choice.score", "here ? float_of(orders[i]) : choice.score"),
    ),
    "the bias counts the other way": ("kimi_k2", Change("router.cu", "value += __uint", "value -= __uint")),
    "places without an expert": (
        "60 experts",
        Change("router.cu", "there ? order_of(value) : LEAST", "order_of(there ? value : 2.0f)"),
    ),
    "lanes without a choice": (
        "gpt_oss",
        Change("router.cu", "return part / warp_sum(part);", "return part / warp_sum(expf(score - most));"),
    ),
    "the softmax of a lane": ("olmoe", Change("scores.cuh", "1.0f / warp_sum(sum)", "1.0f / sum")),
    "a zero with a sign": ("gpt_oss", Change("scores.cuh", "__float_as_uint(value + 0.0f)", "__float_as_uint(value)")),
    "the last logits of a lane": (
        "qwen3",
        Change("scores.cuh", "into[i + j] = there ? wide[j]", "into[i + j] = there ? wide[j / 2]"),
    ),
}
"""A mistake, and the form in whose cases it shows."""


def judged(name: str, changes: Sequence[Change] = ()) -> None:
    form, bias = FORMS[name], bias_for(name)
    for seed in range(6):
        logits = tied(name, 7, seed)
        logits[0], logits[0, ::2] = 0.0, -0.0
        logits[1] = logits[1].clamp(-0.25, 0.25)
        judge(by_kernel(logits, form, bias, changes), expected(logits, form, bias))


@NEEDS_COMPILER
@pytest.mark.parametrize("bug", INJECTED_BUGS)
def test_an_injected_bug_is_found(bug: str) -> None:
    name, change = INJECTED_BUGS[bug]
    with pytest.raises(AssertionError):
        judged(name, (change,))


@pytest.mark.thorough
@NEEDS_COMPILER
@pytest.mark.parametrize("name", sorted({name for name, _ in INJECTED_BUGS.values()}))
def test_the_same_cases_are_correct_without_the_mistakes(name: str) -> None:
    judged(name)


def test_many_tokens_share_blocks_and_few_do_not() -> None:
    def blocks(tokens: int) -> tuple[int, int]:
        logits, out = torch.empty(tokens, 8, device="meta"), torch.empty(tokens, 2, device="meta")
        call = Route(RouterForm(8, 2), logits, None, out, out).kernel_call()
        return call.blocks(132), call.threads

    assert [blocks(tokens) for tokens in (1, 128, 4096)] == [(1, 32), (128, 32), (1024, 128)]


@pytest.mark.parametrize(
    "form", [RouterForm(1025, 8), RouterForm(64, 33), RouterForm(256, 8, groups=64, topk_groups=8)], ids=str
)
def test_a_choice_that_the_kernel_does_not_make_is_left_to_the_formula(form: RouterForm) -> None:
    assert not kernels.routes(torch.empty(1, form.experts), form)
    with pytest.raises(ConfigError, match="up to 1024 experts and top 32"):
        by_kernel(torch.empty(2, form.experts), form)


# Gradients.


def judge_backward(name: str, tokens: int, dtype: torch.dtype, changes: Sequence[Change] = ()) -> None:
    form = FORMS[name]
    logits, source = tied(name, tokens, 2, dtype), torch.Generator().manual_seed(1)
    dweights = torch.randn(tokens, form.topk, generator=source)
    exact = logits.double().requires_grad_()
    ids, weights = formulas.route(exact, form, bias_for(name))
    (want,) = torch.autograd.grad(weights, exact, dweights.double())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RouteBackward, "launch", lambda kernel: emulate(kernel, changes))
        found = kernels.route_backward(dweights, logits, ids, form)
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert found.dtype == dtype and found.shape == logits.shape
    torch.testing.assert_close(found.double(), want, rtol=step, atol=3e-7)


@pytest.mark.one_in(3)
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_of_the_gradient_equals_float64(name: str, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 7):
        judge_backward(name, tokens, dtype)


BACKWARD_BUGS = {
    "an expert of another lane": ("expert / PER_LANE)", "threadIdx.x % 32)"),
    "the place in a lane": ("its == lane * PER_LANE + i", "its == lane * PER_LANE + (i ^ 1)"),
    "the last choice": ("for (u32 k = 0; k < TOPK; ++k)", "for (u32 k = 0; k + 1 < TOPK; ++k)"),
    "the scale": (" * p.scale;", ";"),
    "the sum of sigmoids": ("const float total = warp_sum(score) + 1e-20f;", "const float total = 1.0f;"),
    "after the last expert": ("if (first + i >= EXPERTS) {", "if (first + i > EXPERTS) {"),
    "tokens of another row": ("static_cast<u64>(token) * TOPK + lane", "static_cast<u64>(token / 2) * TOPK + lane"),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("bug", BACKWARD_BUGS)
def test_an_injected_bug_in_the_gradient_is_found(bug: str) -> None:
    change = Change("router_backward.cu", *BACKWARD_BUGS[bug])
    with pytest.raises((AssertionError, EmulatorError)):
        for name in FORMS:
            judge_backward(name, 7, torch.float32, (change,))


# Sums over tokens.


def summed(logits: Tensor, ids: Tensor, sigmoid: bool, changes: Sequence[Change] = ()) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RouterSums, "launch", lambda kernel: emulate(kernel, changes))
        return kernels.router_sums(logits, ids, sigmoid)


def judge_sums(tokens: int, experts: int, sigmoid: bool, changes: Sequence[Change] = ()) -> None:
    source = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=source) * 3
    ids = torch.randint(-1, experts, (tokens, 3), generator=source)
    sums, load = summed(logits, ids, sigmoid, changes)
    assert load.tolist() == [int((ids == expert).sum()) for expert in range(experts)]
    wide = logits.double().sigmoid() if sigmoid else logits.double().softmax(dim=-1)
    want = (wide / wide.sum(dim=-1, keepdim=True)).sum(dim=0)
    torch.testing.assert_close(sums.double(), want, rtol=STEP, atol=1e-6)


@NEEDS_COMPILER
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("experts", [5, 60, 256])
def test_sums_and_load_are_those_of_float64(experts: int, sigmoid: bool) -> None:
    for tokens in (0, 1, 9, 41):
        judge_sums(tokens, experts, sigmoid)


@NEEDS_COMPILER
def test_a_token_whose_sigmoids_are_all_zero_has_no_share() -> None:
    logits, ids = torch.zeros(3, 60), torch.zeros(3, 1, dtype=torch.int64)
    logits[1] = -110.0
    sums, _ = summed(logits, ids, sigmoid=True)
    torch.testing.assert_close(sums, torch.full((60,), 2 / 60))
    logits.requires_grad_()
    loss = balance_loss(logits, ids, RouterForm(60, 1, "sigmoid"))
    (found,) = torch.autograd.grad(loss, logits)
    assert bool(loss.isfinite()) and bool(found.isfinite().all())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_of_16_bit_logits_is_computed_in_float32(score: str) -> None:
    form, source = RouterForm(8, 2, score), torch.Generator().manual_seed(0)
    logits = torch.randn(500, 8, generator=source).bfloat16().requires_grad_()
    wide, ids = logits.detach().float().requires_grad_(), torch.randint(0, 8, (500, 2), generator=source)
    losses = balance_loss(logits, ids, form), balance_loss(wide, ids, form)
    assert torch.equal(*(each.detach() for each in losses))
    found, want = (torch.autograd.grad(*each)[0] for each in zip(losses, (logits, wide), strict=True))
    torch.testing.assert_close(found.float(), want, rtol=2**-8, atol=1e-9)


SUMS_BUGS = {
    "counts of an earlier block": ("            counts[expert] = 0;\n", ""),
    "counts are added to before they are zero": ("__syncthreads();  // counts", "// counts"),
    "warps are read before they are done": ("__syncthreads();  // all warps", "// all warps"),
    "tokens of the next run": ("min(first + p.run, p.tokens)", "min(first + p.run + 1, p.tokens)"),
    "the last warp's sums": ("warp < WARPS;", "warp + 1 < WARPS;"),
    "an entry without an expert": ("if (expert < EXPERTS) {", "if (expert + 1 < EXPERTS + 1) {"),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("bug", SUMS_BUGS)
def test_an_injected_bug_in_the_sums_is_found(bug: str) -> None:
    with pytest.raises((AssertionError, EmulatorError)):
        judge_sums(41, 60, True, (Change("router_sums.cu", *SUMS_BUGS[bug]),))


# The formulas, and the operators with their gradients.


@pytest.mark.parametrize("name", FORMS)
def test_the_formula_makes_the_choice_of_the_reference(name: str) -> None:
    form, bias = FORMS[name], bias_for(name)
    logits = tied(name, 9, 1)
    judge(formulas.route(logits, form, bias), expected(logits, form, bias))
    judge(route(logits, form, bias), expected(logits, form, bias))


def by_operator(logits: Tensor, form: RouterForm, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    fields = form.topk, form.score, form.normalise, form.scale, form.groups, form.topk_groups
    weights, ids = torch.ops.raymoe.route(logits, bias, *fields)
    return ids, weights


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_of_the_operator_is_that_of_the_formula(name: str, dtype: torch.dtype) -> None:
    form, bias = FORMS[name], bias_for(name)
    logits, dweights = tied(name, 6, 2, dtype), torch.randn(6, form.topk, generator=torch.Generator().manual_seed(1))
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ids, weights = by_operator(leaf, form, bias)
    assert not ids.requires_grad
    (found,) = torch.autograd.grad(weights, leaf, dweights)
    (want,) = torch.autograd.grad(formulas.route(exact, form, bias)[1], exact, dweights.double())
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), want, rtol=step, atol=2e-7)


@pytest.mark.parametrize("name", ["deepseek_v3", "olmoe", "gpt_oss", "mixtral"])
def test_the_operator_keeps_the_rules_of_torch(name: str) -> None:
    form, logits = FORMS[name], tied(name, 4, 3).requires_grad_()
    fields = form.topk, form.score, form.normalise, form.scale, form.groups, form.topk_groups
    torch.library.opcheck(torch.ops.raymoe.route, (logits, bias_for(name), *fields))


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "gpt_oss"])
def test_gradients_reach_the_router_through_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router whose operator launches the kernel has the gradients of one that computes by the formula."""
    form = FORMS[name]
    x, weight = torch.randn(5, 16), torch.randn(form.experts, 16)
    gradients = []
    for emulated in (False, True):
        if emulated:
            monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: True)
            monkeypatch.setattr(Route, "launch", emulate)
            monkeypatch.setattr("raymoe.moe.router.route", by_operator)
        router, rows = Router(form, weight.clone(), correction=bias_for(name)), x.clone().requires_grad_()
        routed = router(rows)
        (routed.topk_weights * torch.arange(1.0, form.topk + 1)).sum().backward()
        gradients.append([routed.topk_idx, rows.grad, router.weight.grad])
    for result, want in zip(*gradients, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-6)


def test_the_operator_is_traced_whole() -> None:
    form = replace(FORMS["deepseek_v3"], experts=32, groups=4, topk_groups=2, topk=3)

    def weigh(logits: Tensor) -> Tensor:
        ids, weights = by_operator(logits, form, None)
        return weights * ids

    first, again = (torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    weigh(first).sum().backward()
    torch.compile(weigh, backend="aot_eager", fullgraph=True)(again).sum().backward()
    torch.testing.assert_close(again.grad, first.grad)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_of_the_sums_is_that_of_the_formula(score: str) -> None:
    form, source = RouterForm(12, 2, score), torch.Generator().manual_seed(2)
    logits, dsums = torch.randn(7, 12, generator=source), torch.randn(12, generator=source)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ids = torch.randint(-1, 12, (7, 2))
    sums, load = torch.ops.raymoe.router_sums(leaf, ids, score == "sigmoid")
    (found,) = torch.autograd.grad(sums, leaf, dsums)
    (want,) = torch.autograd.grad(formulas.shares(exact, score == "sigmoid").sum(dim=0), exact, dsums.double())
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-7)
    by_operator = form.experts * (load / 7 * sums / 7).sum()
    torch.testing.assert_close(by_operator, balance_loss(logits, ids, form))
    torch.library.opcheck(torch.ops.raymoe.router_sums, (leaf, ids, score == "sigmoid"))
