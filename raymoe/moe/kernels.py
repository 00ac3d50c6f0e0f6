"""Compute the functions over rows and the router by kernels: tensors, memory for the results, and the launch.

Each function has the arguments of the operator of its name, but takes `Limits` in the place of `sms`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raymoe.device import few_rows, pipe, pipe_backward, pipe_pieces, router
from raymoe.device.pipe_launch import LEAST_CAPABILITY
from raymoe.device.pipe_shape import Limits
from raymoe.device.pipe_tensors import ALIGNMENT, takes_hidden
from raymoe.moe.expression import MOST_INPUTS, Expression, parse
from raymoe.moe.operators import code
from raymoe.moe.results import new_halved, new_like, new_quantised, new_total
from raymoe.moe.router_formulas import RouterForm


def takes(x: Tensor) -> bool:
    """Whether kernels do the work on this tensor: on GPUs that have bulk copies."""
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= LEAST_CAPABILITY


# Tensors as kernels take them: copied only if their memory does not fit.


def as_rows(x: Tensor) -> Tensor:
    """View a tensor as [T, H], with elements of a row one behind the other and rows at multiples of 16 bytes."""
    rows = x.reshape(-1, x.shape[-1])
    fits = rows.stride(1) == 1 and rows.stride(0) * rows.element_size() % ALIGNMENT == 0
    return rows if fits and rows.data_ptr() % ALIGNMENT == 0 else rows.clone(memory_format=torch.contiguous_format)


def as_vector(vector: Tensor) -> Tensor:
    """View a tensor as a vector that begins at a multiple of 16 bytes."""
    fits = vector.stride(0) == 1 and vector.data_ptr() % ALIGNMENT == 0
    return vector if fits else vector.clone(memory_format=torch.contiguous_format)


# Norms.


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, limits: Limits) -> tuple[Tensor, Tensor]:
    y, total = new_like(x), new_total(x, residual)
    added = (None, None) if residual is None else (as_rows(residual), as_rows(total))
    pipe.rms_norm(pipe.RmsNorm(as_rows(x), as_vector(weight), as_rows(y), eps, None, *added), limits)
    return y, total


def rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, column: bool, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = new_quantised(x.shape, x.device, column)
    total = new_total(x, residual)
    added = (None, None) if residual is None else (as_rows(residual), as_rows(total))
    into = values.view(-1, x.shape[-1]), _flat(scales)
    pipe.rms_norm(pipe.RmsNorm(as_rows(x), as_vector(weight), into[0], eps, into[1], *added), limits)
    return values, scales, total


def _flat(scales: Tensor) -> Tensor:
    return scales if scales.dim() == 2 else scales.view(-1, scales.shape[-1])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, limits: Limits) -> Tensor:
    y = new_like(x)
    pipe.layer_norm(pipe.LayerNorm(as_rows(x), as_vector(weight), as_vector(bias), as_rows(y), eps), limits)
    return y


def layer_norm_fp8(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, column: bool, limits: Limits
) -> tuple[Tensor, Tensor]:
    values, scales = new_quantised(x.shape, x.device, column)
    into = values.view(-1, x.shape[-1]), _flat(scales)
    pipe.layer_norm(pipe.LayerNorm(as_rows(x), as_vector(weight), as_vector(bias), into[0], eps, into[1]), limits)
    return values, scales


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, rows: Tensor, weight: Tensor, eps: float, limits: Limits
) -> tuple[Tensor, Tensor]:
    drows, dweight = new_like(rows), new_like(weight)
    given = as_rows(dy), as_rows(rows), as_vector(weight), as_rows(drows), dweight
    added = None if dtotal is None else as_rows(dtotal)
    pipe_backward.rms_norm_backward(pipe_backward.RmsNormBackward(*given, eps, added), limits)
    return drows, dweight


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = new_like(x), new_like(weight), new_like(weight)
    given = as_rows(dy), as_rows(x), as_vector(weight), as_rows(dx), dweight, dbias
    pipe_backward.layer_norm_backward(pipe_backward.LayerNormBackward(*given, eps), limits)
    return dx, dweight, dbias


# SwiGLU.


def swiglu(gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    y = new_halved(gate_up)
    pipe_pieces.swiglu(pipe_pieces.Swiglu(as_rows(gate_up), as_rows(y), _as_offsets(offsets)), limits)
    return y


def swiglu_fp8(gate_up: Tensor, offsets: Tensor | None, column: bool, limits: Limits) -> tuple[Tensor, Tensor]:
    *leading, width = gate_up.shape
    values, scales = new_quantised(torch.Size([*leading, width // 2]), gate_up.device, column)
    into = values.view(-1, width // 2), _flat(scales)
    pipe_pieces.swiglu(pipe_pieces.Swiglu(as_rows(gate_up), into[0], _as_offsets(offsets), into[1]), limits)
    return values, scales


def weighted_swiglu(gate_up: Tensor, weights: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    y, by_rows = new_halved(gate_up), weights.reshape(-1).contiguous()
    asked = pipe_pieces.Swiglu(as_rows(gate_up), as_rows(y), _as_offsets(offsets), weights=by_rows)
    pipe_pieces.swiglu(asked, limits)
    return y


def weighted_swiglu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor | None, limits: Limits
) -> tuple[Tensor, Tensor]:
    into, given = new_like(gate_up), (as_rows(dy), as_rows(gate_up))
    offsets, by_rows = _as_offsets(offsets), weights.reshape(-1).contiguous()
    sums = pipe_pieces.new_piece_sums(given[1], offsets, limits)
    asked = pipe_pieces.SwigluBackward(*given, as_rows(into), offsets, by_rows, sums)
    pipe_pieces.swiglu_backward(asked, limits)
    d_weights = sums.view(-1) if len(sums) == 1 else sums.sum(dim=0)
    return into, d_weights.view(weights.shape)


def swiglu_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    into = new_like(gate_up)
    asked = pipe_pieces.SwigluBackward(as_rows(dy), as_rows(gate_up), as_rows(into), _as_offsets(offsets))
    pipe_pieces.swiglu_backward(asked, limits)
    return into


def _as_offsets(offsets: Tensor | None) -> Tensor | None:
    return None if offsets is None else offsets.to(torch.int32)


# Products of experts with few rows.


def multiplies_few_rows(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether the kernel computes both products of these experts."""
    sizes = gate_up.shape[2] % few_rows.STEP == 0 and down.shape[2] % few_rows.STEP == 0
    sizes = sizes and down.shape[1] % few_rows.outputs_of_tile(gated=False) == 0
    fit = all(
        each.dtype == torch.bfloat16 and each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0
        for each in (x, gate_up, down)
    )
    return sizes and fit and takes(x)


def multiply_few_rows(x: Tensor, weight: Tensor, offsets: Tensor, counts: Tensor, *, gated: bool) -> Tensor:
    """Multiply each expert's rows by its weight; `gated`: SwiGLU of the products by gate and up."""
    y = x.new_empty(len(x), weight.shape[1] // (2 if gated else 1))
    few_rows.few_rows(few_rows.FewRows(x, weight, offsets, counts, y, gated))
    return y


# Expressions.


def adds(terms: Sequence[Tensor]) -> bool:
    """Whether the kernel adds these terms of one shape and dtype."""
    return len(terms) <= MOST_INPUTS and takes_hidden(terms[0].shape[-1]) and takes(terms[0])


def pointwise(expression: str, names: str, inputs: Sequence[Tensor], limits: Limits) -> Tensor:
    given = dict(zip(names.split(","), inputs, strict=True))
    full = max(inputs, key=lambda each: (each.dim(), each.numel(), each.shape[-1]))
    return evaluated(parse(expression), given, full, limits)


def evaluated(expression: Expression, given: dict[str, Tensor], full: Tensor, limits: Limits) -> Tensor:
    """Compute an expression from inputs by name. The result is as large as `full`."""
    out = new_like(full)
    inputs = [_as_input(given[name], full) for name in expression.names]
    pipe_pieces.pointwise(pipe_pieces.Pointwise(code(expression), inputs, as_rows(out)), limits)
    return out


def _as_input(tensor: Tensor, full: Tensor) -> Tensor:
    if tensor.shape == full.shape:
        return as_rows(tensor)
    return as_vector(tensor) if tensor.shape == full.shape[-1:] else tensor.reshape(-1, 1)


# Routers.


def routes(logits: Tensor, form: RouterForm) -> bool:
    """Whether the kernel makes this choice; else the formula does."""
    return any(router.takes(_choosing(form), item) for item in (logits.element_size(), 4))


def route(logits: Tensor, bias: Tensor | None, form: RouterForm) -> tuple[Tensor, Tensor]:
    """Return ids and weights."""
    choosing = _choosing(form)
    logits = _as_logits(logits, choosing)
    bias = None if bias is None else bias.float().contiguous()
    topk_idx = logits.new_empty(len(logits), form.topk, dtype=torch.int64)
    topk_weights = logits.new_empty(len(logits), form.topk, dtype=torch.float32)
    router.route(router.Route(choosing, logits, bias, topk_idx, topk_weights, form.scale))
    return topk_idx, topk_weights


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


def _choosing(form: RouterForm) -> router.Choosing:
    return router.Choosing(form.experts, form.topk, form.score, form.normalise, form.groups, form.topk_groups)
