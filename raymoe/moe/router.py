"""The router: scores of all experts for each token, the chosen experts, and their weights.

Differentiable, without a wait for the device. On GPUs a kernel makes the choice in one launch; CPUs compute by the
formulas. Scores are float32 for any dtype of x: in bfloat16, experts with close scores could swap places from machine
to machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import raymoe.moe.router_formulas as formulas
import raymoe.moe.router_kernels as kernels
import raymoe.rows.row_launch as row_launch
from raymoe.moe.by_row import in_tiles
from raymoe.moe.logits import logits_of
from raymoe.moe.route_site import RouteSite, fitting
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


def replay_route(
    logits: torch.Tensor, form: RouterForm, recorded: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take recorded ids [T', K], of any dtype, and compute their weights from `logits[T', E]`, with gradients.

    A token with an id below 0 was not recorded: `route` chooses for it. Where the recorded ids are those that `route`
    chooses, the weights are the same bits.

    >>> logits, recorded = torch.tensor([[0.0, 1.0, 2.0, -1.0]] * 2), torch.tensor([[0, 1], [-1, -1]])
    >>> ids, weights = replay_route(logits, RouterForm(experts=4, topk=2), recorded)
    >>> ids.tolist(), [round(weight, 4) for weight in weights[0].tolist()]
    ([[0, 1], [2, 1]], [0.2689, 0.7311])
    """
    if not logits.is_cpu:
        weights, ids = _ops.replay_route(logits, bias, recorded, *_fields(form))
        return ids, weights
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return formulas.replay(formulas.route(wide, form, bias), recorded, _weights_of(wide, form))


def _weights_of(logits: torch.Tensor, form: RouterForm) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that weighs ids; those out of range, which a dispatch refuses, read no memory of others."""
    return lambda ids: formulas.weights_of(logits, ids.clamp(max=form.experts - 1), form)


def _fields(form: RouterForm) -> tuple[int, str, bool, float, int, int]:
    """The form as arguments of an operator, without the number of experts, which the logits have."""
    return form.topk, form.score, form.normalise, form.scale, form.groups, form.topk_groups


# The operators of GPUs.

_FIELDS = "int topk, str score, bool normalise, float scale, int groups, int topk_groups"
define(
    {
        "route": f"(Tensor logits, Tensor? bias, {_FIELDS}) -> (Tensor topk_weights, Tensor topk_idx)",
        "replay_route": f"(Tensor logits, Tensor? bias, Tensor recorded, {_FIELDS})"
        " -> (Tensor topk_weights, Tensor topk_idx)",
        "router_sums": "(Tensor logits, Tensor topk_idx, bool sigmoid) -> (Tensor score_sums, Tensor load)",
    }
)
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::route", ("cpu", "cuda"))
def _route(logits: torch.Tensor, bias: torch.Tensor | None, *fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = _choose(logits, bias, RouterForm(logits.shape[1], *fields))
    return weights, ids  # the order that opcheck needs: the first result has gradients


@torch.library.impl("raymoe::replay_route", ("cpu", "cuda"))
def _replay_route(
    logits: torch.Tensor, bias: torch.Tensor | None, recorded: torch.Tensor, *fields: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    form = RouterForm(logits.shape[1], *fields)
    ids, weights = formulas.replay(_choose(logits, bias, form), recorded, _weights_of(logits.float(), form))
    return weights, ids


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


def _fake_replay_route(
    logits: torch.Tensor, bias: torch.Tensor | None, recorded: torch.Tensor, topk: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    del recorded
    return _fake_route(logits, bias, topk)


def _save_for_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, *others = inputs
    fields = others[-len(_FIELDS.split(",")) :]
    ctx.others = len(others)
    ctx.form = RouterForm(logits.shape[1], *fields)
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _route_backward(ctx: Any, dweights: torch.Tensor, _: object) -> tuple[Any, ...]:
    logits, topk_idx = ctx.saved_tensors
    # Of ids out of range, which a dispatch refuses, only the memory matters.
    topk_idx = topk_idx.clamp(max=ctx.form.experts - 1)
    return formulas.route_backward(dweights, logits, topk_idx, ctx.form), *[None] * ctx.others


for _name, _fake in (("route", _fake_route), ("replay_route", _fake_replay_route)):
    torch.library.register_fake(f"raymoe::{_name}", _fake)
    torch.library.register_autograd(f"raymoe::{_name}", _route_backward, setup_context=_save_for_route)


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
        self.routes = RouteSite()
        self.by_row = False
        """Whether the bits of a token's result depend on that token alone (docs/reproducibility.md)."""

    def forward(self, x: torch.Tensor, recorded: torch.Tensor | None = None) -> Routed:
        """Map the tokens of x[..., H], one after the other, to their experts, best first, and the weights.

        `recorded` has ids [T', K] for the tokens, which it takes instead of its choice (`replay_route`).
        """
        rows = x.reshape(-1, x.shape[-1])
        if self.by_row:
            logits = in_tiles(lambda tile: logits_of(tile, self.weight, self.bias), rows)
        else:
            logits = logits_of(rows, self.weight, self.bias)
        site, form, bias = self.routes, self.form, self.e_score_correction_bias
        if recorded is None:
            recorded = site.take(len(logits), form.topk)
        else:
            recorded = fitting(recorded.reshape(-1, recorded.shape[-1]), len(logits), form.topk)
        if recorded is None:
            ids, weights = route(logits, form, bias)
        else:
            ids, weights = replay_route(logits, form, recorded, bias)
        site.note(ids)
        return Routed(ids, weights, logits)


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
