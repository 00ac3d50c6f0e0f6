"""Dispatch and combine with gradients, as custom operators of torch.

The operators are `raymoe::dispatch`, `raymoe::dispatch_exact`, `raymoe::combine`, and their backward passes
`raymoe::combine_gradients` and `raymoe::dispatch_gradients`. They take an exchange as a few numbers
(`Exchange.numbers`): its handle, by which the kernels find it, and the sizes of results. Everything else is in tensors.
So `torch.compile` traces through them without an exchange, and selective checkpointing sees them by name.

- `raymoe::slots_of` turns ids of experts into slots where the exchange has some, before the dispatch.
- The backward of dispatch is a combine without weights, which also returns the gradients of the weights. Each entry
  (token, k) has its expert on one rank, which sends one float32 for it.
- The backward of combine is a dispatch of dy. Rows get the same places as in the forward. Where the backend
  `keeps_places`, nothing is counted again and no ids are sent; elsewhere the ids are dispatched again.
- The result of a dispatch owns its rows. The exchange's own memory for rows is not used, so its spec may have depth 0.
- A captured operator keeps nothing alive, like torch's own. Its results are in the memory pool of the graph.
- Operations are collective, in the backward pass too: all ranks run it, with the same inputs requiring gradients.
- A compiled function runs them in the order of the program, and runs all of them, also where a rank has no tokens or
  uses no result. `compiled_order.py` keeps the order. In a compiled forward pass each call also changes
  `Exchange.calls_made`, because torch drops a call from a graph if nothing that leaves the graph depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raymoe.cuda.current import keep_for_current_stream
from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.moe.compiled_order import keep_order
from raymoe.moe.expert_rows import weigh_gradients
from raymoe.rows.direct import refuse_derivatives
from raymoe.rows.operator_definitions import define


@dataclass(frozen=True)
class ExpertRows:
    """The rows for this rank's experts, which this object owns, and what a combine needs.

    Rows of local expert e are `x[expert_offsets[e]:][:expert_counts[e]]`. On CPU ranks all other rows are zero. On GPUs
    those in gaps are what the spec's `padding` says. Rows and weights from `expert_offsets[L]` on are unspecified, and
    so are the gradients that reach them.
    """

    x: torch.Tensor  # [C, H], with gradients; [n, H] of `dispatch_exact`
    weights: torch.Tensor  # float32[C] or [n], with gradients; zero in gaps
    expert_offsets: torch.Tensor  # int32[L + 1]
    expert_counts: torch.Tensor  # int32[L]
    exchange: Exchange
    routing: list[torch.Tensor]
    """The ids (with slots those of slots), the metadata of the dispatch, the experts' offsets, and the number of tokens
    if one was given."""
    site: int = 0
    """The number of the dispatch's call site."""
    topk_idx: torch.Tensor | None = None
    """With layout `token`: int32[C, K] or [n, K], the local experts of each row, -1 elsewhere. The weights are [C, K]
    then, and offsets and counts those of `Dispatched`."""


def dispatch(
    exchange: Exchange,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    *,
    site: int = 0,
) -> ExpertRows:
    """Send rows of `x[T', H]` to the ranks of their experts, with gradients for `x` and `topk_weights`.

    `site` is a number of the caller's, such as that of a layer. Steps whose ranks give different numbers are refused,
    in the backward pass too.

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
    return _dispatch_by(_ops.dispatch, exchange, (x, topk_idx, topk_weights), num_tokens, site)


def dispatch_exact(
    exchange: Exchange,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    *,
    site: int = 0,
) -> ExpertRows:
    """Do what `dispatch` does, for a result that has the n rows up to the last offset alone.

    On GPUs the host waits for that number, so this cannot be captured. Nothing is copied or padded for it, forward or
    backward.
    """
    return _dispatch_by(_ops.dispatch_exact, exchange, (x, topk_idx, topk_weights), num_tokens, site)


def _dispatch_by(
    operator: Any, exchange: Exchange, tokens: tuple[torch.Tensor, ...], num_tokens: object, site: int
) -> ExpertRows:
    if num_tokens is not None and not isinstance(num_tokens, torch.Tensor):
        raise ConfigError(f"num_tokens is {num_tokens!r}; with gradients it is an int32[1] tensor beside x")
    refuse_derivatives("dispatch")
    count = [] if num_tokens is None else [num_tokens]
    if exchange.spec.slots is not None:  # kept for the backward pass, whatever is placed until then
        tokens = tokens[0], _ops.slots_of(exchange.numbers, site, tokens[1]), tokens[2]
    rows, weights, offsets, counts, metadata = operator(exchange.numbers, site, *tokens, count)
    if torch.compiler.is_compiling():
        exchange.calls_made.add_(counts[:1])
    routing = [tokens[1], metadata, offsets, *count]
    return ExpertRows(rows, weights, offsets, counts, exchange, routing, site, _choices_in(metadata, exchange, rows))


def _choices_in(metadata: torch.Tensor, exchange: Exchange, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the ids of rows by token, which are at the end of a dispatch's metadata; None with other layouts."""
    _, capacity, _, words, topk = exchange.numbers
    return metadata[words - capacity * topk :].view(capacity, topk)[: rows.shape[0]] if topk else None


def combine(exchange: Exchange, rows: torch.Tensor, got: ExpertRows, weighted: bool = True) -> torch.Tensor:
    """Sum the experts' results of each token into `y[T', H]`, with gradients for `rows` and for the weights.

    With `weighted`, this applies the weights and saves `rows` for the backward pass. Without, the experts have applied
    `got.weights`, which costs them less than it costs here. `rows` has the rows of `got.x`. On CPU ranks it may have
    fewer, down to the last offset.
    """
    if got.exchange is not exchange:
        raise ConfigError("got comes from another exchange; combine takes the result of this exchange's dispatch")
    if weighted and got.topk_idx is not None:
        raise ConfigError(
            "weighted is True with layout token, where combine takes sums of rows: multiply the rows by got.weights "
            "before you add them, and give weighted=False"
        )
    if rows.device.type != "cpu" and rows.shape[0] != got.x.shape[0]:
        raise ConfigError(
            f"rows has {rows.shape[0]} rows, and got.x has {got.x.shape[0]}: give as many; dispatch_exact "
            "gives those that came alone"
        )
    refuse_derivatives("combine")
    y, called = _ops.combine(exchange.numbers, got.site, rows, got.weights, got.routing, weighted)
    if torch.compiler.is_compiling():
        exchange.calls_made.add_(called)
    combined: torch.Tensor = y
    return combined


def refuse(exchange: Exchange, got: ExpertRows) -> None:
    """Raise DataRefused on all ranks: a rank whose experts raised calls this in the place of combine."""
    exchange.refuse(_restored(exchange, got.site, got.x.detach(), got.weights.detach(), got.routing))


# The operators.

_DEVICES = ("cpu", "cuda")
_DISPATCH = (
    "(SymInt[] exchange, SymInt site, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor[] num_tokens)"
    " -> (Tensor rows, Tensor weights, Tensor expert_offsets, Tensor expert_counts, Tensor metadata)"
)
_SCHEMAS = {
    "dispatch": _DISPATCH,
    "dispatch_exact": _DISPATCH,
    "combine": "(SymInt[] exchange, SymInt site, Tensor rows, Tensor weights, Tensor[] routing, bool weighted)"
    " -> (Tensor y, Tensor called)",
    "combine_gradients": "(SymInt[] exchange, SymInt site, Tensor rows, Tensor weights, Tensor[] routing)"
    " -> (Tensor dx, Tensor dweights)",
    "dispatch_gradients": "(SymInt[] exchange, SymInt site, Tensor dy, Tensor[] routing, SymInt rows) -> Tensor",
}
define(_SCHEMAS)
define({"slots_of": "(SymInt[] exchange, SymInt site, Tensor topk_idx) -> Tensor"})
_ops: Any = torch.ops.raymoe


def _prepare_graph() -> None:
    """Refuse torch.export, and let the compiler that traces keep the order of all. All fake kernels call this."""
    if torch.compiler.is_exporting():
        raise ConfigError(
            "dispatch or combine inside torch.export: an exchange belongs to the processes that made it, so no "
            "exported program can hold it; export the parts around it, or call torch.compile"
        )
    keep_order(*(getattr(_ops, name).default for name in _SCHEMAS))


@torch.library.impl("raymoe::slots_of", _DEVICES)
def _slots_of(exchange: list[int], site: int, topk_idx: torch.Tensor) -> torch.Tensor:
    return _exchange_of(exchange).slots_of(topk_idx, site)


def _fake_slots_of(exchange: list[int], site: int, topk_idx: torch.Tensor) -> torch.Tensor:
    del exchange, site
    return torch.empty_like(topk_idx)


_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.impl("raymoe::dispatch", _DEVICES)
def _dispatch(
    exchange: list[int],
    site: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: list[torch.Tensor],
) -> _Outputs:
    used = _exchange_of(exchange)
    rows, got = _dispatched(used, Tokens(x, topk_idx, topk_weights, _only(num_tokens), site=site))
    return rows, *_owned(used, got.weights, got.expert_offsets, got.expert_counts), used.pack(got)


@torch.library.impl("raymoe::dispatch_exact", _DEVICES)
def _dispatch_exact(
    exchange: list[int],
    site: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: list[torch.Tensor],
) -> _Outputs:
    used = _exchange_of(exchange)
    rows, got = _dispatched(used, Tokens(x, topk_idx, topk_weights, _only(num_tokens), site=site))
    there = got.count()
    small = _owned(used, got.weights[:there], got.expert_offsets, got.expert_counts)
    return rows[:there], *small, used.pack(got)


def _dispatched(used: Exchange, tokens: Tokens) -> tuple[torch.Tensor, Dispatched]:
    """Dispatch into new memory; return all C rows, expert by expert, and the result."""
    rows = _new_rows(used, tokens.x.dtype) if used.spec.layout != "rank" else None
    got = used.dispatch_unkept(tokens, rows)
    return expert_major(got) if rows is None else rows, got


def _owned(
    used: Exchange, weights: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy what is, on GPUs, views of one block of metadata: an operator's outputs must not share memory."""
    if used.world.device.type != "cuda":
        return weights, offsets, counts
    return weights.clone(), offsets.clone(), counts.clone()


def _fake_dispatch(
    exchange: list[int],
    site: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: list[torch.Tensor],
) -> _Outputs:
    del site, topk_idx, num_tokens
    return _fake_outputs(exchange, x, topk_weights, exchange[1])


def _fake_dispatch_exact(
    exchange: list[int],
    site: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: list[torch.Tensor],
) -> _Outputs:
    del site, topk_idx, num_tokens
    return _fake_outputs(exchange, x, topk_weights, torch.library.get_ctx().new_dynamic_size())


def _fake_outputs(exchange: list[int], x: torch.Tensor, topk_weights: torch.Tensor, there: Any) -> _Outputs:
    _prepare_graph()
    _, _, local, words, topk = exchange
    sizes = 2 if topk else local + 1, local, words
    offsets, counts, metadata = (x.new_empty(size, dtype=torch.int32) for size in sizes)
    weights = topk_weights.new_empty(there, topk) if topk else topk_weights.new_empty(there)
    return x.new_empty(there, x.shape[1]), weights, offsets, counts, metadata


@torch.library.impl("raymoe::combine", _DEVICES)
def _combine(
    exchange: list[int],
    site: int,
    rows: torch.Tensor,
    weights: torch.Tensor,
    routing: list[torch.Tensor],
    weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    used = _exchange_of(exchange)
    y = used.combine_unkept(rows.contiguous(), _restored(used, site, rows, weights, routing), weighted)
    new = torch.zeros if y.device.type == "cpu" else torch.empty  # nobody reads it; on GPUs zeros would be a kernel
    return y, new(1, dtype=torch.int32, device=y.device)


def _fake_combine(
    exchange: list[int],
    site: int,
    rows: torch.Tensor,
    weights: torch.Tensor,
    routing: list[torch.Tensor],
    weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    del exchange, site, weights, weighted
    _prepare_graph()
    return rows.new_empty(routing[0].shape[0], rows.shape[1]), rows.new_empty(1, dtype=torch.int32)


@torch.library.impl("raymoe::combine_gradients", _DEVICES)
def _combine_gradients(
    exchange: list[int], site: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward pass of dispatch: the gradients of `x` and of `topk_weights`."""
    used = _exchange_of(exchange)
    rows, weights = rows.contiguous(), weights.contiguous()
    return used.combine_gradients(rows, weights, _restored(used, site, rows, weights, routing))


def _fake_combine_gradients(
    exchange: list[int], site: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    del exchange, site
    _prepare_graph()
    return rows.new_empty(routing[0].shape[0], rows.shape[1]), weights.new_empty(routing[0].shape)


@torch.library.impl("raymoe::dispatch_gradients", _DEVICES)
def _dispatch_gradients(
    exchange: list[int], site: int, dy: torch.Tensor, routing: list[torch.Tensor], rows: int
) -> torch.Tensor:
    """The backward pass of combine: dy of an entry's token in the entry's place. `rows` is the length of the result."""
    moved = _moved_gradients(_exchange_of(exchange), site, dy.contiguous(), routing)
    return moved if len(moved) == rows else moved[:rows]


def _moved_gradients(used: Exchange, site: int, dy: torch.Tensor, routing: list[torch.Tensor]) -> torch.Tensor:
    """Dispatch dy to the places of an earlier dispatch: [C, H]."""
    rows, weights = _new_rows(used, dy.dtype), torch.zeros(routing[0].shape, device=dy.device)
    got = _restored(used, site, rows, weights, routing)
    if used.keeps_places:
        used.dispatch_known(dy, got, rows)
        return rows
    topk_idx, _, _, *num_tokens = routing
    keep_for_current_stream(topk_idx, *num_tokens)  # the caller gave them to the dispatch, perhaps on another stream
    tokens = Tokens(dy, topk_idx, weights, _only(num_tokens), site=site)
    if used.spec.layout == "rank":
        return expert_major(used.dispatch_again(tokens, got, None))
    used.dispatch_again(tokens, got, rows)
    return rows


def _fake_dispatch_gradients(
    exchange: list[int], site: int, dy: torch.Tensor, routing: list[torch.Tensor], rows: int
) -> torch.Tensor:
    del exchange, site, routing
    _prepare_graph()
    return dy.new_empty(rows, dy.shape[1])


# The backward passes by themselves. Their types let mypy check the arguments; those of torch's operators it cannot see.


def return_gradients(
    numbers: list[int], site: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the backward pass of a dispatch; `numbers` are those of its exchange."""
    dx, dweights = _ops.combine_gradients(numbers, site, rows, weights, routing)
    return dx, dweights


def send_gradients(
    numbers: list[int], site: int, dy: torch.Tensor, routing: list[torch.Tensor], rows: int | None = None
) -> torch.Tensor:
    """Do the backward pass of a combine of `rows` rows, by default C; `numbers` are those of its exchange."""
    moved: torch.Tensor = _ops.dispatch_gradients(numbers, site, dy, routing, numbers[1] if rows is None else rows)
    return moved


# The shared parts of the operators.


def _exchange_of(numbers: list[int]) -> Exchange:
    return Exchange.of_handle(numbers[0])


def _only(num_tokens: list[torch.Tensor]) -> torch.Tensor | None:
    return num_tokens[0] if num_tokens else None


def _new_rows(exchange: Exchange, dtype: torch.dtype) -> torch.Tensor:
    """Allocate the rows of a dispatch. On CPU ranks they are zero, so rows in gaps are."""
    spec, world = exchange.spec, exchange.world
    new = torch.zeros if world.device.type == "cpu" else torch.empty
    rows: torch.Tensor = new(spec.rows(world.size), spec.hidden, dtype=dtype, device=world.device)
    return rows


def expert_major(got: Dispatched) -> torch.Tensor:
    """Return the rows of a dispatch expert by expert, copied if they are in the slots."""
    index = _places_in_slots(got)
    return got.x if index is None else got.x.index_select(0, index)


def expert_major_pair(got: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8-bit rows of a dispatch with output `raw` as `expert_major` does, and their scales."""
    assert got.scales is not None
    if (index := _places_in_slots(got)) is None:
        return got.x, got.scales
    values = got.x.view(torch.uint8).index_select(0, index).view(got.x.dtype)
    return values, got.scales.index_select(0, index)


def _places_in_slots(got: Dispatched) -> torch.Tensor | None:
    """Return the slot of each row; None where rows are expert by expert already."""
    if (index := got.index) is None or index.device.type == "cpu":
        return index
    places = torch.arange(len(index), device=index.device)
    # From the last offset on it is unspecified.
    return torch.where(places < got.expert_offsets[-1], index, 0)


def _restored(
    exchange: Exchange, site: int, rows: torch.Tensor, weights: torch.Tensor, routing: list[torch.Tensor]
) -> Dispatched:
    """Make the result of the dispatch again that this combines."""
    topk_idx, metadata, _, *num_tokens = routing
    got = exchange.unpack(metadata, rows, weights, Ids(topk_idx, *num_tokens), site)
    if rows.device.type != "cpu":
        got.counted = len(rows)  # `combine` has compared it with the rows of the dispatch
    return got


def _save_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    exchange, site, _, topk_idx, _, num_tokens = inputs
    ctx.exchange, ctx.site = exchange, site
    ctx.save_for_backward(topk_idx, output[-1], output[2], *num_tokens)
    ctx.mark_non_differentiable(*output[2:])


def _dispatch_backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, *_: object) -> tuple[Any, ...]:
    _refuse_second_derivative(rows, weights)
    routing = list(ctx.saved_tensors)  # read once: checkpointing makes them anew each time
    dx, dweights = return_gradients(ctx.exchange, ctx.site, rows, weights, routing)
    return None, None, dx, None, dweights, [None] * (len(routing) - 3)


def _refuse_second_derivative(*gradients: torch.Tensor) -> None:
    """Raise in a backward pass with `create_graph`, whose graph would lack terms."""
    if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients):
        raise ConfigError("dispatch and combine have no second derivative: call backward without create_graph")


def _save_for_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    exchange, site, rows, weights, routing, weighted = inputs
    ctx.exchange, ctx.site, ctx.weighted, ctx.rows = exchange, site, weighted, rows.shape[0]
    ctx.save_for_backward(*routing, *([rows, weights] if weighted else []))
    ctx.mark_non_differentiable(output[1])


def _combine_backward(ctx: Any, dy: torch.Tensor, *_: object) -> tuple[Any, ...]:
    _refuse_second_derivative(dy)
    saved = list(ctx.saved_tensors)
    rows, weights = (saved.pop(-2), saved.pop()) if ctx.weighted else (None, None)
    moved = send_gradients(ctx.exchange, ctx.site, dy, saved, ctx.rows)
    nothing = [None] * len(saved)
    if rows is None or weights is None:
        return None, None, moved, None, nothing, None
    needs_weights = ctx.needs_input_grad[3]
    missing = weights.shape[0] - rows.shape[0]
    used = weights[: rows.shape[0]] if missing else weights
    dweights = weigh_gradients(moved, used, saved[2], rows if needs_weights else None)
    if missing and needs_weights:
        dweights = torch.nn.functional.pad(dweights, (0, missing))
    return None, None, moved, dweights if needs_weights else None, nothing, None


torch.library.register_fake("raymoe::slots_of", _fake_slots_of)
torch.library.register_fake("raymoe::dispatch", _fake_dispatch)
torch.library.register_fake("raymoe::dispatch_exact", _fake_dispatch_exact)
torch.library.register_fake("raymoe::combine", _fake_combine)
torch.library.register_fake("raymoe::combine_gradients", _fake_combine_gradients)
torch.library.register_fake("raymoe::dispatch_gradients", _fake_dispatch_gradients)
torch.library.register_autograd("raymoe::dispatch", _dispatch_backward, setup_context=_save_for_dispatch)
torch.library.register_autograd("raymoe::dispatch_exact", _dispatch_backward, setup_context=_save_for_dispatch)
torch.library.register_autograd("raymoe::combine", _combine_backward, setup_context=_save_for_combine)
