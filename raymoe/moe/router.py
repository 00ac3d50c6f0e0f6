"""The router: scores of all experts for each token, the chosen experts, and their weights.

Differentiable, without a wait for the device. On GPUs a kernel makes the choice in one launch; CPUs compute by the
formulas. Scores are float32 for any dtype of x: in bfloat16, experts with close scores could swap places from machine
to machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import raymoe.moe.router_formulas as formulas
import raymoe.moe.router_kernels as kernels
import raymoe.rows.row_launch as row_launch
from raymoe.moe.logits import logits_of
from raymoe.moe.router_formulas import RouterForm
from raymoe.rows.direct import Computation, backward_directly, directly, needs_gradient
from raymoe.rows.operator_definitions import define


class Routed(NamedTuple):
    """The choice for each token, in the form that a dispatch takes, and the logits that led to it."""

    topk_idx: torch.Tensor  # int64[T', K]
    topk_weights: torch.Tensor  # float32[T', K], with gradients
    logits: torch.Tensor  # float32[T', E], with gradients


def route(
    logits: torch.Tensor, form: RouterForm, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by `logits[T', E]`: ids int64[T', K], best first, and float32 weights with gradients.

    `bias[E]` counts for the choice, not for the weights. Of equal scores the lowest id comes first. A NaN among a
    token's logits makes its weights NaN, or of sigmoids that are not normalised only the weight of that expert; its ids
    are valid, so a dispatch takes them.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    >>> ids, weights = route(logits, RouterForm(experts=4, topk=2))
    >>> ids.tolist(), [round(weight, 4) for weight in weights[0].tolist()]
    ([[2, 1]], [0.7311, 0.2689])
    >>> route(logits, RouterForm(4, 1, score="sigmoid"), bias=torch.tensor([9.0, 0.0, 0.0, 0.0]))[0].tolist()
    [[0]]
    """
    if logits.is_cpu:
        return formulas.route(logits if logits.dtype == torch.float64 else logits.float(), form, bias)
    tensors = (logits,) if bias is None else (logits, bias)
    if not directly(*tensors):
        weights, ids = _ops.route(logits, bias, *_fields(form))
        return ids, weights
    if needs_gradient(*tensors):
        ids, weights = _Route.of(logits, bias, form)
        return ids, weights
    return _choose(logits, bias, form)


def _fields(form: RouterForm) -> tuple[int, str, bool, float, int, int]:
    """The form as arguments of an operator, without the number of experts, which the logits have."""
    return form.topk, form.score, form.normalise, form.scale, form.groups, form.topk_groups


# The operators of GPUs.

_FIELDS = "int topk, str score, bool normalise, float scale, int groups, int topk_groups"
define(
    {
        "route": f"(Tensor logits, Tensor? bias, {_FIELDS}) -> (Tensor topk_weights, Tensor topk_idx)",
        "router_sums": "(Tensor logits, Tensor topk_idx, bool sigmoid) -> (Tensor score_sums, Tensor load)",
    }
)
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::route", ("cpu", "cuda"))
def _route(logits: torch.Tensor, bias: torch.Tensor | None, *fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = _choose(logits, bias, RouterForm(logits.shape[1], *fields))
    return weights, ids  # the order that opcheck needs: the first result has gradients


def _choose(
    logits: torch.Tensor, bias: torch.Tensor | None, form: RouterForm, *, differentiable: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if not row_launch.takes(logits) or not kernels.routes(logits, form):
        return formulas.route(logits.float(), form, bias)
    return kernels.route(logits, bias, form, differentiable=differentiable)


def _fake_route(
    logits: torch.Tensor, bias: torch.Tensor | None, topk: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    del bias
    shape = (logits.shape[0], topk)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _save_for_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, *fields = inputs
    ctx.form = RouterForm(logits.shape[1], *fields)
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _route_backward(ctx: Any, dweights: torch.Tensor, _: object) -> tuple[Any, ...]:
    logits, topk_idx = ctx.saved_tensors
    return formulas.route_backward(dweights, logits, topk_idx, ctx.form), *[None] * 7


torch.library.register_fake("raymoe::route", _fake_route)
torch.library.register_autograd("raymoe::route", _route_backward, setup_context=_save_for_route)


class _Route(Computation):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = _choose(logits, bias, form, differentiable=True)
        ctx.form = form
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    def backward(ctx: Any, _: object, dweights: torch.Tensor) -> tuple[Any, ...]:
        logits, topk_idx = ctx.saved_tensors
        direct = backward_directly(dweights, logits)
        kernel = direct and row_launch.takes(logits) and kernels.routes(logits, ctx.form)
        compute = kernels.route_backward if kernel else formulas.route_backward
        return compute(dweights, logits, topk_idx, ctx.form), None, None


def expert_load(topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """Count the entries (token, k) of each expert, int64[E], without a wait. Ids of -1 count for none.

    >>> expert_load(torch.tensor([[0, 2], [2, -1]]), experts=4).tolist()
    [1, 0, 2, 0]
    """
    return formulas.expert_load(topk_idx, experts)


def balance_loss(logits: torch.Tensor, topk_idx: torch.Tensor, form: RouterForm) -> torch.Tensor:
    """Return the loss that falls as tokens spread evenly: E times the sum over experts of load times mean score.

    The load is the number of entries of an expert over the number of tokens; only the scores have gradients. Of an even
    load with even scores the loss is K.

    >>> float(balance_loss(torch.zeros(2, 4), torch.tensor([[0, 1], [2, 3]]), RouterForm(experts=4, topk=2)))
    2.0
    """
    sigmoid = form.score == "sigmoid"
    if logits.device.type == "cpu":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        sums = formulas.shares(wide, sigmoid).sum(dim=0)
        load = formulas.expert_load(topk_idx, form.experts)
    else:
        sums, load = _ops.router_sums(logits, topk_idx, sigmoid)
    return form.experts * (load / max(1, len(topk_idx)) * sums / max(1, len(logits))).sum()


@torch.library.impl("raymoe::router_sums", ("cpu", "cuda"))
def _router_sums(logits: torch.Tensor, topk_idx: torch.Tensor, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of each expert's shares of the scores over all tokens, and its load."""
    if row_launch.takes(logits) and kernels.routes(logits, RouterForm(logits.shape[1], 1)):
        return kernels.router_sums(logits, topk_idx, sigmoid)
    load = formulas.expert_load(topk_idx, logits.shape[1]).clone()  # an output of an operator owns its memory
    return formulas.shares(logits.float(), sigmoid).sum(dim=0), load


def _fake_router_sums(logits: torch.Tensor, topk_idx: torch.Tensor, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
    del topk_idx, sigmoid
    experts = logits.shape[1]
    return logits.new_empty(experts, dtype=torch.float32), logits.new_empty(experts, dtype=torch.int64)


def _save_for_router_sums(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, ctx.sigmoid = inputs
    ctx.save_for_backward(logits)
    ctx.mark_non_differentiable(output[1])


def _router_sums_backward(ctx: Any, dsums: torch.Tensor, _: object) -> tuple[Any, ...]:
    (logits,) = ctx.saved_tensors
    return formulas.shares_backward(dsums, logits, ctx.sigmoid), None, None


torch.library.register_fake("raymoe::router_sums", _fake_router_sums)
torch.library.register_autograd("raymoe::router_sums", _router_sums_backward, setup_context=_save_for_router_sums)


class Router(nn.Module):
    """Chooses experts by `weight[E, H]`, and `bias[E]` where the model has one.

    `e_score_correction_bias[E]`, where the model has one, is a buffer: a trainer moves it to balance the load.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        form: RouterForm,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.register_buffer("e_score_correction_bias", correction)

    def forward(self, x: torch.Tensor) -> Routed:
        """Map the tokens of x[..., H], one after the other, to their experts, best first, and the weights."""
        logits = logits_of(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        ids, weights = route(logits, self.form, self.e_score_correction_bias)
        return Routed(ids, weights, logits)


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
