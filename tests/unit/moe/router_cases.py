"""Forms of routers for tests, logits whose scores tie exactly, and a reference in float64 with a sort of its own."""

from __future__ import annotations

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.router_kernels import Route, RouteBackward, RouterSums, runs_of

FORMS = {
    "deepseek_v3": RouterForm(256, 8, "sigmoid", scale=2.5, groups=8, topk_groups=4),
    "deepseek_v2": RouterForm(160, 6, "softmax", normalise=False, scale=16.0, groups=8, topk_groups=3),
    "kimi_k2": RouterForm(384, 8, "sigmoid", scale=2.827),
    "qwen3": RouterForm(128, 8),
    "qwen3_next": RouterForm(512, 10),
    "olmoe": RouterForm(64, 8, normalise=False),
    "mixtral": RouterForm(8, 2),
    "gpt_oss": RouterForm(128, 4, "chosen"),
    "all of five": RouterForm(5, 5),
    "60 experts": RouterForm(60, 4, "sigmoid", normalise=False),
    "groups on a part of the lanes": RouterForm(48, 4, "chosen", groups=3, topk_groups=2, scale=0.5),
    "the most": RouterForm(1024, 32, "sigmoid"),
}
BIASED = ("deepseek_v3", "kimi_k2", "groups on a part of the lanes", "60 experts")
"""Forms that are tested with a bias."""


def bias_for(name: str) -> torch.Tensor | None:
    """A bias with few values, so that biased scores tie.

    Where groups compete by sums of sigmoids, all experts of a group have one bias. With several, two groups could have
    sums that are equal, yet not after the rounding of their terms. It is small, so that scores decide among groups too.
    """
    if name not in BIASED:
        return None
    form = FORMS[name]
    if form.score == "sigmoid" and form.groups > 1:
        return (torch.arange(form.groups) % 3 == 1).repeat_interleave(form.per_group) / 256
    return torch.randint(-2, 3, (form.experts,), generator=torch.Generator().manual_seed(5)) / 16


def any_bias(name: str) -> torch.Tensor | None:
    """A bias of any values, for logits whose scores do not tie."""
    if name not in BIASED:
        return None
    return torch.randn(FORMS[name].experts, generator=torch.Generator().manual_seed(6)) / 16


def tied(name: str, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits that are multiples of 1/4. Many are equal, and others are so far apart that no rounding swaps scores."""
    drawn = torch.randn(tokens, FORMS[name].experts, generator=torch.Generator().manual_seed(seed))
    return (drawn * 4).round().div(4).to(dtype)


def expected(
    logits: torch.Tensor, form: RouterForm, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of finite logits by Python's own sort, in float64. Equal scores stay in the order of ids."""
    wide = logits.double()
    kinds = {"softmax": wide.softmax(dim=-1), "sigmoid": wide.sigmoid(), "chosen": wide}
    scores = kinds[form.score]
    biased = scores if bias is None else scores + bias.double()
    ids = torch.tensor([_best(row, form) for row in biased.tolist()], dtype=torch.int64).view(-1, form.topk)
    weights = scores.gather(1, ids)
    if form.score == "chosen":
        weights = weights.softmax(dim=-1)
    elif form.normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights * form.scale


def _best(row: list[float], form: RouterForm) -> list[int]:
    each = form.per_group
    groups = [range(group * each, (group + 1) * each) for group in range(form.groups)]
    if form.groups > 1:
        # Rounded, because the sums of two pairs with equal scores may differ in the last bits.
        score = [round(sum(sorted((row[expert] for expert in group), reverse=True)[:2]), 12) for group in groups]
        groups = [groups[place] for place in _first(score, form.topk_groups)]
    experts = sorted(expert for group in groups for expert in group)
    return [experts[place] for place in _first([round(row[expert], 12) for expert in experts], form.topk)]


def _first(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def router_sources() -> list[KernelSource]:
    """The kernel of every form, as it is launched, and those of 16-bit logits; and kernels of the sums."""
    found = [_source(name, torch.float32) for name in FORMS]
    found += [_source("deepseek_v3", torch.bfloat16), _source("gpt_oss", torch.float16)]
    found += [_backward_source(name, torch.float32) for name in FORMS]
    found += [_backward_source("deepseek_v3", torch.bfloat16), _backward_source("gpt_oss", torch.float16)]
    return [*found, _sums_source(256, sigmoid=True), _sums_source(1024), _sums_source(60)]


def _sums_source(experts: int, sigmoid: bool = False) -> KernelSource:
    logits, ids = torch.empty(9, experts, device="meta"), torch.empty(9, 8, device="meta")
    rows = torch.empty(runs_of(9)[0], experts, device="meta")
    return RouterSums(sigmoid, logits, ids, rows, rows).kernel_call().source


def _backward_source(name: str, dtype: torch.dtype) -> KernelSource:
    form = FORMS[name]
    logits, out = torch.empty(1, form.experts, dtype=dtype, device="meta"), torch.empty(1, form.topk, device="meta")
    return RouteBackward(form, out, logits, out, logits).kernel_call().source


def _source(name: str, dtype: torch.dtype) -> KernelSource:
    form, bias = FORMS[name], bias_for(name)
    logits, out = torch.empty(1, form.experts, dtype=dtype, device="meta"), torch.empty(1, form.topk, device="meta")
    return Route(form, logits, bias, out, out).kernel_call().source
