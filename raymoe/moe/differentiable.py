"""Dispatch and combine with gradients, as custom operators of torch.

The four operators are `raymoe::dispatch`, `raymoe::combine`, and their backward passes `raymoe::combine_gradients` and
`raymoe::dispatch_gradients`. They name an exchange by its handle, an integer. Everything else is in tensors. So
`torch.compile` traces through them, and selective checkpointing sees them by name.

- The backward of dispatch is a combine without weights. The gradients of the weights travel home with it: each entry
  (token, k) has its expert on one rank, which sends one float32 for it.
- The backward of combine is a dispatch of dy. Rows get the same places as in the forward. Where the backend
  `keeps_places`, nothing is counted again and no ids are sent; elsewhere the ids are dispatched again.
- The result of a dispatch owns its rows. The exchange's own memory for rows is not used, so its spec may have depth 0.
- Operations are collective, in the backward pass too: all ranks run it, with the same inputs requiring gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.exchange import Exchange


@dataclass(frozen=True)
class ExpertRows:
    """The rows for this rank's experts, which they own, and what a combine needs.

    Rows of local expert e are `x[expert_offsets[e]:][:expert_counts[e]]`. On CPU ranks all other rows are zero. On GPUs
    those in gaps are what the spec's `padding` says. Rows and weights from `expert_offsets[L]` on are unspecified, and
    so are the gradients that reach them.
    """

    x: torch.Tensor  # [C, H], with gradients
    weights: torch.Tensor  # float32[C], with gradients; zero in gaps
    expert_offsets: torch.Tensor  # int32[L + 1]
    expert_counts: torch.Tensor  # int32[L]
    exchange: Exchange
    routing: list[torch.Tensor]
    """The ids, the metadata of the dispatch, and the number of tokens if one was given."""


def dispatch(
    exchange: Exchange,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
) -> ExpertRows:
    """Send rows of `x[T', H]` to the ranks of their experts, with gradients for `x` and `topk_weights`.

    One rank, two experts that double their rows:

    >>> from raymoe import ExchangeSpec, World
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=4, hidden=4, experts=2, topk=2, dtype="float32", depth=0)
    >>> with world, Exchange(world, spec) as exchange:
    ...     x, weights = torch.ones(1, 4, requires_grad=True), torch.tensor([[0.5, 0.25]], requires_grad=True)
    ...     got = dispatch(exchange, x, torch.tensor([[0, 1]]), weights)
    ...     y = combine(exchange, 2 * got.x, got)
    ...     y.sum().backward()
    >>> y.tolist(), x.grad.tolist(), weights.grad.tolist()
    ([[1.5, 1.5, 1.5, 1.5]], [[1.5, 1.5, 1.5, 1.5]], [[8.0, 8.0]])
    """
    if num_tokens is not None and not isinstance(num_tokens, torch.Tensor):
        raise ConfigError(f"num_tokens is {num_tokens!r}; with gradients it is an int32[1] tensor beside x")
    count = [] if num_tokens is None else [num_tokens]
    rows, weights, offsets, counts, metadata = _ops.dispatch(exchange.handle, x, topk_idx, topk_weights, count)
    return ExpertRows(rows, weights, offsets, counts, exchange, [topk_idx, metadata, *count])


def combine(exchange: Exchange, rows: torch.Tensor, got: ExpertRows, weighted: bool = True) -> torch.Tensor:
    """Sum the experts' results of each token into `y[T', H]`, with gradients for `rows` and for the weights.

    With `weighted`, the weights are applied here, and `rows` are kept for the backward pass. Without, the experts have
    applied `got.weights`, which costs them less than it costs here.
    """
    if got.exchange is not exchange:
        raise ConfigError("got comes from another exchange; combine takes the result of this exchange's dispatch")
    y: torch.Tensor = _ops.combine(exchange.handle, rows, got.weights, got.routing, weighted)
    return y


def refuse(exchange: Exchange, got: ExpertRows) -> None:
    """Call this in the place of combine where the experts raised on this rank. Raises DataRefused, on all ranks."""
    exchange.refuse(_restored(exchange, got.x.detach(), got.weights.detach(), got.routing))


# The operators. `torch.library.custom_op` would load torch's compiler at the first call, which takes a second.

_DEVICES = ("cpu", "cuda")
_SCHEMAS = {
    "dispatch": "(SymInt exchange, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor[] num_tokens)"
    " -> (Tensor rows, Tensor weights, Tensor expert_offsets, Tensor expert_counts, Tensor metadata)",
    "combine": "(SymInt exchange, Tensor rows, Tensor weights, Tensor[] routing, bool weighted) -> Tensor",
    "combine_gradients": "(SymInt exchange, Tensor rows, Tensor weights, Tensor[] routing)"
    " -> (Tensor dx, Tensor dweights)",
    "dispatch_gradients": "(SymInt exchange, Tensor dy, Tensor[] routing) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"raymoe::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::dispatch", _DEVICES)
def _dispatch(
    exchange: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_tokens: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = Exchange.of_handle(exchange)
    rows, got = _moved(found, Tokens(x, topk_idx, topk_weights, num_tokens[0] if num_tokens else None))
    # Where the four are views of one block of metadata, they are copied: outputs must not share memory.
    small = (got.weights, got.expert_offsets, got.expert_counts)
    weights, offsets, counts = (each.clone() if found.world.device.type == "cuda" else each for each in small)
    return rows, weights, offsets, counts, found.pack(got)


def _fake_dispatch(
    exchange: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_tokens: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    del topk_idx, num_tokens
    found = Exchange.of_handle(exchange)
    capacity, local = found.spec.rows(found.world.size), found.spec.local_experts(found.world.size)
    offsets, counts, metadata = (
        x.new_empty(size, dtype=torch.int32) for size in (local + 1, local, found.metadata_words)
    )
    return x.new_empty(capacity, x.shape[1]), topk_weights.new_empty(capacity), offsets, counts, metadata


@torch.library.impl("raymoe::combine", _DEVICES)
def _combine(
    exchange: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor], weighted: bool
) -> torch.Tensor:
    found = Exchange.of_handle(exchange)
    return found.combine(rows.contiguous(), _restored(found, rows, weights, routing), weighted)


def _fake_combine(
    exchange: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor], weighted: bool
) -> torch.Tensor:
    del exchange, weights, weighted
    return rows.new_empty(routing[0].shape[0], rows.shape[1])


@torch.library.impl("raymoe::combine_gradients", _DEVICES)
def _combine_gradients(
    exchange: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward pass of dispatch: the gradients of `x` and of `topk_weights`."""
    found = Exchange.of_handle(exchange)
    rows, weights = rows.contiguous(), weights.contiguous()
    return found.combine_gradients(rows, weights, _restored(found, rows, weights, routing))


def _fake_combine_gradients(
    exchange: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    del exchange
    return rows.new_empty(routing[0].shape[0], rows.shape[1]), weights.new_empty(routing[0].shape)


@torch.library.impl("raymoe::dispatch_gradients", _DEVICES)
def _dispatch_gradients(exchange: int, dy: torch.Tensor, routing: list[torch.Tensor]) -> torch.Tensor:
    """The backward pass of combine: dy of each entry's token in the entry's place."""
    found, topk_idx = Exchange.of_handle(exchange), routing[0]
    dy, weights = dy.contiguous(), torch.zeros(topk_idx.shape, device=dy.device)
    if found.keeps_places:
        rows = _new_rows(found, dy.dtype)
        found.dispatch_known(dy, _restored(found, rows, weights, routing), rows)
        return rows
    return _moved(found, Tokens(dy, topk_idx, weights, routing[2] if len(routing) > 2 else None))[0]


def _fake_dispatch_gradients(exchange: int, dy: torch.Tensor, routing: list[torch.Tensor]) -> torch.Tensor:
    del routing
    found = Exchange.of_handle(exchange)
    return dy.new_empty(found.spec.rows(found.world.size), dy.shape[1])


# Their shared parts.


def _moved(exchange: Exchange, tokens: Tokens) -> tuple[torch.Tensor, Dispatched]:
    """Dispatch into new memory; return the rows and the result."""
    given = tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.num_tokens
    if exchange.spec.layout == "rank":
        got = exchange.dispatch(*given)
        return expert_major(got), got
    rows = _new_rows(exchange, tokens.x.dtype)
    return rows, exchange.dispatch(*given, out=rows)


def _new_rows(exchange: Exchange, dtype: torch.dtype) -> torch.Tensor:
    """Allocate the rows of a dispatch; on CPU ranks those in gaps are zero."""
    spec, world = exchange.spec, exchange.world
    new = torch.zeros if world.device.type == "cpu" else torch.empty
    rows: torch.Tensor = new(spec.rows(world.size), spec.hidden, dtype=dtype, device=world.device)
    return rows


def expert_major(got: Dispatched) -> torch.Tensor:
    """Return the rows of a dispatch expert by expert, copied if they are in the slots."""
    if (index := got.index) is None:
        return got.x
    if index.device.type != "cpu":  # there it is unspecified from the last offset on
        places = torch.arange(len(index), device=index.device)
        index = torch.where(places < got.expert_offsets[-1], index, 0)
    return got.x.index_select(0, index)


def _restored(exchange: Exchange, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]) -> Dispatched:
    """Make the result of the dispatch again, whose combine this is."""
    topk_idx, metadata, *num_tokens = routing
    return exchange.unpack(metadata, rows, weights, Ids(topk_idx, *num_tokens))


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    exchange, _, topk_idx, _, num_tokens = inputs
    ctx.exchange = exchange
    ctx.save_for_backward(topk_idx, output[-1], *num_tokens)
    ctx.mark_non_differentiable(*output[2:])


def _dispatch_backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, *_: object) -> tuple[Any, ...]:
    _refuse_second_derivative(rows, weights)
    routing = list(ctx.saved_tensors)  # read once: checkpointing makes them anew each time
    dx, dweights = _ops.combine_gradients(ctx.exchange, rows, weights, routing)
    return None, dx, None, dweights, [None] * (len(routing) - 2)


def _refuse_second_derivative(*gradients: torch.Tensor) -> None:
    """Raise in a backward pass with `create_graph`, whose graph would lack terms."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in gradients):
        raise ConfigError("dispatch and combine have no second derivative: call backward without create_graph")


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    exchange, rows, weights, routing, weighted = inputs
    ctx.exchange, ctx.weighted = exchange, weighted
    ctx.save_for_backward(*routing, *([rows, weights] if weighted else []))
    del output


def _combine_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    _refuse_second_derivative(dy)
    saved = list(ctx.saved_tensors)
    rows, weights = (saved.pop(-2), saved.pop()) if ctx.weighted else (None, None)
    moved = _ops.dispatch_gradients(ctx.exchange, dy, saved)
    nothing = [None] * len(saved)
    if rows is None or weights is None:
        return None, moved, None, nothing, None
    dweights = (moved.float() * rows.float()).sum(dim=1) if ctx.needs_input_grad[2] else None
    return None, (moved.float() * weights[:, None]).to(moved.dtype), dweights, nothing, None


torch.library.register_fake("raymoe::dispatch", _fake_dispatch)
torch.library.register_fake("raymoe::combine", _fake_combine)
torch.library.register_fake("raymoe::combine_gradients", _fake_combine_gradients)
torch.library.register_fake("raymoe::dispatch_gradients", _fake_dispatch_gradients)
torch.library.register_autograd("raymoe::dispatch", _dispatch_backward, setup_context=_keep_for_dispatch)
torch.library.register_autograd("raymoe::combine", _combine_backward, setup_context=_keep_for_combine)
