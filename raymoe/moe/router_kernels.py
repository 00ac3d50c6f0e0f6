"""Compute the router by kernels: tensors, memory for the results, and the launch.

Each function has the arguments of the formula of its name.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raymoe.moe import router_launches as router
from raymoe.moe.router_formulas import RouterForm
from raymoe.rows.kernels import takes as takes
from raymoe.rows.pipe_tensors import ALIGNMENT
from raymoe.rows.results import new_like


def routes(logits: Tensor, form: RouterForm) -> bool:
    """Whether the kernel makes this choice; else the formula does."""
    choosing, item = _choosing(form), logits.element_size()
    return router.takes(choosing, item) or router.takes(choosing, 4)


def route(
    logits: Tensor, bias: Tensor | None, form: RouterForm, *, differentiable: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ids and weights; `differentiable`: `route_backward` will follow."""
    choosing = _choosing(form)
    logits = _as_logits(logits, choosing)
    if bias is not None and not (bias.dtype is torch.float32 and bias.is_contiguous()):
        bias = bias.float().contiguous()
    size = len(logits), form.topk
    topk_idx = logits.new_empty(size, dtype=torch.int64)
    topk_weights = logits.new_empty(size, dtype=torch.float32)
    router.route(router.Route(choosing, logits, bias, topk_idx, topk_weights, form.scale, differentiable))
    return topk_idx, topk_weights


def route_backward(dweights: Tensor, logits: Tensor, topk_idx: Tensor, form: RouterForm) -> Tensor:
    """Return the gradient of the logits."""
    choosing = _choosing(form)
    wide = _as_logits(logits, choosing)
    dlogits = new_like(wide)
    call = router.RouteBackward(choosing, dweights.contiguous(), wide, topk_idx, dlogits, form.scale)
    router.route_backward(call)
    return dlogits if dlogits.dtype == logits.dtype else dlogits.to(logits.dtype)


def router_sums(logits: Tensor, topk_idx: Tensor, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of each expert's scores, float32[E], and its entries, int64[E]."""
    experts, topk = logits.shape[1], topk_idx.shape[1]
    logits = _as_logits(logits, router.Choosing(experts, topk, "softmax", False, 1, 1))
    runs, _ = router.runs_of(len(logits))
    score_sums = logits.new_empty(runs, experts, dtype=torch.float32)
    load = logits.new_empty(runs, experts, dtype=torch.int32)
    router.router_sums(router.RouterSums(sigmoid, logits, topk_idx.long().contiguous(), score_sums, load))
    return score_sums.sum(dim=0), load.sum(dim=0)


def _as_logits(logits: Tensor, choosing: router.Choosing) -> Tensor:
    if not router.takes(choosing, logits.element_size()):
        logits = logits.float()
    fits = logits.is_contiguous() and logits.data_ptr() % ALIGNMENT == 0
    return logits if fits else logits.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _choosing(form: RouterForm) -> router.Choosing:
    return router.Choosing(form.experts, form.topk, form.score, form.normalise, form.groups, form.topk_groups)
