"""The router's kernel in a CUDA graph: its time, torch.compile's for the same formula, and FlashInfer's kernel's.

Logits are there already.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe.router import route  # noqa: E402
from raymoe.moe.router_formulas import TINY, RouterForm  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402
from tests.unit.moe.router_cases import FORMS  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]

REPLAYS = 30
BARS_US = {1: 5.0, 128: 5.0, 4096: 15.0}
FASTER = 3.0
"""At least so many times as fast as torch.compile's kernels."""
NAMES = ("deepseek_v3", "qwen3", "mixtral", "gpt_oss")


def compiled(form: RouterForm, bias: Any) -> Callable[[Any], Any]:
    """The formula as a model's code has it, with torch.topk, which leaves the order of equal scores open."""

    def formula(logits: Any) -> Any:
        if form.score == "chosen":
            best, ids = logits.topk(form.topk, dim=-1)
            return ids, best.softmax(dim=-1) * form.scale
        scores = logits.sigmoid() if form.score == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if bias is None else scores + bias
        if form.groups > 1:
            grouped = choice.view(-1, form.groups, form.per_group)
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(form.topk_groups, dim=-1).indices
            kept = torch.zeros(len(logits), form.groups, device=logits.device).scatter(1, best, 1.0)
            choice = grouped.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)
        ids = choice.topk(form.topk, dim=-1).indices
        weights = scores.gather(1, ids)
        if form.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return ids, weights * form.scale

    made: Callable[[Any], Any] = torch.compile(formula, fullgraph=True, dynamic=False)
    return made


def us_of(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of a call: the median over replays of a graph of `calls` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        kept += [call() for _ in range(calls)]
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            graph.replay()
            end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[3:])


@pytest.mark.parametrize("tokens", BARS_US)
@pytest.mark.parametrize("name", NAMES)
def test_the_router_is_quick_and_faster_than_torch_compile(name: str, tokens: int) -> None:
    form = FORMS[name]
    bias = torch.randn(form.experts, device="cuda") / 16 if form.score == "sigmoid" else None
    logits = torch.randn(tokens, form.experts, device="cuda")
    torch.compiler.reset()
    theirs = compiled(form, bias)
    torch.testing.assert_close(route(logits, form, bias)[1], theirs(logits)[1], rtol=1e-4, atol=1e-6)
    took, compiled_us = (us_of(call, 20) for call in (lambda: route(logits, form, bias), lambda: theirs(logits)))
    print(f"router {name} {tokens}: {took:.2f} us, torch.compile {compiled_us:.2f} us, {compiled_us / took:.1f} x")
    assert took <= BARS_US[tokens]
    assert compiled_us / took >= FASTER


@pytest.mark.parametrize("tokens", [1, 16, 128, 1024, 4096])
def test_the_router_beside_flashinfer(tokens: int) -> None:
    """Their kernel writes to tensors that are there already."""
    theirs: Any = pytest.importorskip("flashinfer.fused_moe").fused_topk_deepseek
    form = FORMS["deepseek_v3"]
    bias, logits = torch.randn(form.experts, device="cuda") / 16, torch.randn(tokens, form.experts, device="cuda")
    weights = torch.empty(tokens, form.topk, device="cuda")
    ids = torch.empty(tokens, form.topk, dtype=torch.int32, device="cuda")
    groups = form.groups, form.topk_groups

    def choose() -> None:
        theirs(logits, bias, *groups, form.topk, form.scale, weights, ids)

    choose()
    own_ids, own_weights = route(logits, form, bias)[:2]
    order, own_order = ids.sort(dim=1), own_ids.sort(dim=1)
    differ = (order.values != own_order.values).any(dim=1)
    assert differ.sum() <= tokens // 1000  # where scores are equal but for rounding
    found, own = (each.gather(1, at.indices)[~differ] for each, at in ((weights, order), (own_weights, own_order)))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)
    took, their_us = (us_of(call, 20) for call in (lambda: route(logits, form, bias), choose))
    print(f"router deepseek_v3 {tokens}: {took:.2f} us, flashinfer {their_us:.2f} us, {their_us / took:.2f} x")
