"""The router on a GPU: its kernel against the reference and the formulas, eager, captured and compiled."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.errors import ConfigError  # noqa: E402
from raymoe.moe import Router, RouterForm  # noqa: E402
from raymoe.moe import router_formulas as formulas  # noqa: E402
from raymoe.moe import router_kernels as kernels  # noqa: E402
from raymoe.moe.logits import logits_of  # noqa: E402
from raymoe.moe.router import balance_loss, route  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402
from tests.unit.moe.router_cases import FORMS, any_bias, bias_for, expected, tied  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("gpu")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_gpu(name: str) -> torch.Tensor | None:
    bias = bias_for(name)
    return None if bias is None else bias.cuda()


def judge(found: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    assert torch.equal(found[0].cpu(), want[0].cpu())
    torch.testing.assert_close(found[1].cpu(), want[1].float().cpu(), rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_makes_the_choice_of_the_reference(name):
    """Also where scores tie: then the lowest id comes first."""
    form, bias = FORMS[name], bias_for(name)
    assert kernels.routes(torch.empty(1, form.experts), form)
    for seed, tokens in enumerate((0, 1, 7, 130, 600)):
        logits = tied(name, tokens, seed)
        judge(route(logits.cuda(), form, on_gpu(name)), expected(logits, form, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_logits_of_any_dtype_from_any_address(name, dtype):
    form, bias = FORMS[name], bias_for(name)
    logits = tied(name, 40, 4, dtype)
    for given in (logits.cuda(), logits.cuda()[3:], logits.T.contiguous().cuda().T):
        judge(route(given, form, on_gpu(name)), expected(given.cpu(), form, bias))


@pytest.mark.parametrize("name", FORMS)
def test_choices_of_many_tokens_are_those_of_float64(name):
    """A choice that differs from the formula's in float64 must be of scores that rounding makes equal."""
    form, bias = FORMS[name], any_bias(name)
    bias = None if bias is None else bias.cuda()
    logits = torch.randn(4097, form.experts, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    ids, weights = route(logits, form, bias)
    want_ids, want = formulas.route(logits.double(), form, bias)
    same = (ids == want_ids).all(dim=1)
    assert int((~same).sum()) <= 4 + 4097 * form.topk // 2000
    torch.testing.assert_close(weights[same].double(), want[same], rtol=1e-5, atol=1e-7)
    ordered = ids.sort(dim=1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert int(ids.min()) >= 0 and int(ids.max()) < form.experts


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss", "olmoe"])
def test_logits_that_are_not_finite(name, value):
    form, logits = FORMS[name], torch.randn(6, FORMS[name].experts, device="cuda")
    logits[0, 3], logits[1, :4], logits[2] = value, value, value
    judge(route(logits, form, on_gpu(name)), formulas.route(logits, form, on_gpu(name)))


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_formula(name):
    form, bias = FORMS[name], on_gpu(name)
    logits = tied(name, 50, 2).cuda()
    dweights = torch.randn(50, form.topk, device="cuda")
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (found,) = torch.autograd.grad(route(mine, form, bias)[1], mine, dweights)
    (want,) = torch.autograd.grad(formulas.route(exact, form, bias)[1], exact, dweights.double())
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("tokens", [1, 128, 1000])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "mixtral", "gpt_oss"])
def test_a_graph_replays_forward_and_backward_on_other_logits(name, tokens):
    form, bias = FORMS[name], on_gpu(name)
    logits = tied(name, tokens, 0).cuda().requires_grad_()
    dweights = torch.randn(tokens, form.topk, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> tuple[Any, ...]:
        ids, weights = route(logits, form, bias)
        return ids, weights, *torch.autograd.grad(weights, logits, dweights)

    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            logits.copy_(tied(name, tokens, seed))
        graph.replay()
        torch.cuda.synchronize()
        judge(captured[:2], expected(logits.detach().cpu(), form, bias_for(name)))
        assert all(torch.equal(mine, want) for mine, want in zip(captured, step(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 128, 700])
@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_by_the_kernel_is_that_of_float64(name, tokens, dtype):
    form, bias = FORMS[name], on_gpu(name)
    logits = tied(name, tokens, 2, dtype).cuda().requires_grad_()
    dweights = torch.randn(tokens, form.topk, device="cuda")
    _, weights = route(logits, form, bias)
    found = [torch.autograd.grad(weights, logits, dweights, retain_graph=True)[0] for _ in range(2)]
    exact = logits.detach().cpu().double().requires_grad_()
    (want,) = torch.autograd.grad(formulas.route(exact, form, bias_for(name))[1], exact, dweights.cpu().double())
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert found[0].dtype == dtype and torch.equal(*found)
    torch.testing.assert_close(found[0].cpu().double(), want, rtol=step, atol=3e-7)


def test_a_capture_of_forward_and_backward_needs_no_backward_before():
    form = RouterForm(72, 5, "sigmoid", scale=2.0)
    logits = torch.randn(9, 72, device="cuda").requires_grad_()
    dweights, graph = torch.randn(9, 5, device="cuda"), torch.cuda.CUDAGraph()

    def step() -> tuple[Any, ...]:
        ids, weights = route(logits, form)
        return ids, weights, *torch.autograd.grad(weights, logits, dweights)

    route(logits, form)
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(mine, want) for mine, want in zip(captured, step(), strict=True))


def test_the_first_call_of_a_form_is_refused_in_a_capture():
    logits, form, graph = torch.randn(3, 88, device="cuda"), RouterForm(88, 3), torch.cuda.CUDAGraph()
    with pytest.raises(ConfigError, match="call it once before the capture"), torch.cuda.graph(graph):
        route(logits, form)
    judge(route(logits, form), formulas.route(logits, form))


def test_a_choice_that_the_kernel_does_not_make_is_left_to_the_formula():
    form, logits = RouterForm(1030, 4), torch.randn(5, 1030, device="cuda")
    assert not kernels.routes(logits, form)
    judge(route(logits, form), formulas.route(logits, form))


@pytest.mark.parametrize("weight_kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 130, 700])
def test_logits_and_their_gradients_are_those_of_float64(tokens, weight_kind):
    source = torch.Generator("cuda").manual_seed(tokens)
    x, weight = (torch.randn(rows, 7168, device="cuda", generator=source) for rows in (tokens, 256))
    x, weight = x.bfloat16().requires_grad_(), (weight / 7168**0.5).to(weight_kind).requires_grad_()
    dlogits = torch.randn(tokens, 256, device="cuda", generator=source)
    found, exact = logits_of(x, weight), x.double() @ weight.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)
    gradients = torch.autograd.grad(found, (x, weight), dlogits)
    for mine, wanted in zip(gradients, torch.autograd.grad(exact, (x, weight), dlogits.double()), strict=True):
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_torch_compile_takes_a_router_whole(name):
    form = FORMS[name]
    router = Router(form, torch.randn(form.experts, 64), correction=bias_for(name)).cuda()
    x = torch.randn(30, 64, device="cuda")

    def step(layer: Any) -> list[torch.Tensor]:
        rows = x.clone().requires_grad_()
        ids, weights, _ = layer(rows)
        (weights * torch.arange(1.0, form.topk + 1, device="cuda")).sum().backward()
        return [ids, weights.detach(), rows.grad]

    torch.compiler.reset()
    ids, *found = step(torch.compile(router, fullgraph=True))
    want_ids, *want = step(router)
    assert torch.equal(ids, want_ids)
    for mine, exact in zip(found, want, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 128, 4099])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "gpt_oss", "all of five"])
def test_the_balance_loss_is_that_of_float64_and_repeats(name, tokens):
    form = FORMS[name]
    logits = torch.randn(tokens, form.experts, device="cuda").requires_grad_()
    ids = torch.randint(-1, form.experts, (tokens, form.topk), device="cuda")
    exact = logits.detach().double().cpu().requires_grad_()
    loss, want = balance_loss(logits, ids, form), balance_loss(exact, ids.cpu(), form)
    torch.testing.assert_close(loss.double().cpu(), want, rtol=1e-5, atol=1e-7)
    (found,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(want, exact)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-4, atol=1e-8)
    assert all(torch.equal(balance_loss(logits, ids, form), loss) for _ in range(3))


def test_the_balance_loss_is_captured():
    form, graph = FORMS["deepseek_v3"], torch.cuda.CUDAGraph()
    logits = torch.randn(300, form.experts, device="cuda")
    ids = torch.randint(-1, form.experts, (300, form.topk), device="cuda")
    balance_loss(logits, ids, form)
    with torch.cuda.graph(graph):
        captured = balance_loss(logits, ids, form)
    logits.normal_()
    graph.replay()
    assert torch.equal(captured, balance_loss(logits, ids, form))
