"""The place of one router at which its routes are recorded, counted and replayed, and the operators that do it.

All of them work on tensors that stay at their addresses, and none waits for the device. So eager calls, replays of CUDA
graphs and compiled functions do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.rows.operator_definitions import define

define(
    {
        "record_route": "(Tensor(a!) log, Tensor(b!) logged, Tensor topk_idx) -> ()",
        "count_route": "(Tensor(a!) load, Tensor topk_idx) -> ()",
    }
)
_ops: Any = torch.ops.raymoe


class RouteSite:
    """The memory that a router writes its routes to, and takes recorded ones from. None: it does not."""

    def __init__(self) -> None:
        self.log: Tensor | None = None
        """Ids [tokens + 1, K] in the order of calls. The last row takes those that have no place."""
        self.logged: Tensor | None = None
        """int64[1]: the tokens that came, also those without a place."""
        self.load: Tensor | None = None
        """int64[E]: the entries (token, k) of each expert."""
        self.recorded: Tensor | None = None
        """Ids [T, K] that the router takes instead of its own. A row with an id below 0 was not recorded."""
        self._replayed = False

    def take(self, tokens: int, topk: int) -> Tensor | None:
        """Return the recorded ids for a call of the router, if there are any."""
        if self.recorded is None:
            self._refuse_other_routes()
            return None
        if not torch.compiler.is_compiling():
            self._replayed = True
        return fitting(self.recorded, tokens, topk)

    def note(self, topk_idx: Tensor) -> None:
        """Record and count the ids of a call, int[T, K]. Calls that repeat a forward pass are left out."""
        if self.log is not None and self.logged is not None:
            _ops.record_route(self.log, self.logged, topk_idx)
        if self.load is not None:
            _ops.count_route(self.load, topk_idx)

    def _refuse_other_routes(self) -> None:
        """Raise where activation checkpointing repeats a forward pass whose routes are gone."""
        if torch.compiler.is_compiling() or not self._replayed:
            return
        if is_repeated():
            raise ConfigError(
                "activation checkpointing repeats a forward pass after its replay_routes has ended, so the router "
                "would choose other experts: run the backward pass inside too, or give checkpoint "
                "context_fn=functools.partial(raymoe.moe.same_routes, model)"
            )
        self._replayed = False


def fitting(recorded: Tensor, tokens: int, topk: int) -> Tensor:
    """Return recorded ids, or raise if they are not those of as many tokens."""
    if tuple(recorded.shape) != (tokens, topk):
        raise ConfigError(
            f"recorded routes {list(recorded.shape)} for {tokens} tokens of top-{topk}; give the routes of the tokens "
            "of this call alone, and rows of -1 for tokens that were not recorded"
        )
    return recorded


def is_repeated() -> bool:
    """Whether this runs inside a backward pass, where activation checkpointing repeats forward passes."""
    return torch._C._current_graph_task_id() != -1


def static(tensor: Tensor) -> Tensor:
    """Tell CUDA graphs of torch.compile that the address stays, as `torch._dynamo.mark_static_address` does."""
    marked: Any = tensor
    marked._dynamo_static_input_type = "unguarded"
    return tensor


# The operators ask at run time whether a pass is repeated: checkpointing may call a compiled function once more.


@torch.library.impl("raymoe::record_route", ("cpu", "cuda"))
def _record_route(log: Tensor, logged: Tensor, topk_idx: Tensor) -> None:
    if is_repeated():
        return
    places = logged + torch.arange(len(topk_idx), device=log.device)
    log.index_copy_(0, places.clamp_(max=len(log) - 1), topk_idx.to(log.dtype))
    logged += len(topk_idx)


@torch.library.impl("raymoe::count_route", ("cpu", "cuda"))
def _count_route(load: Tensor, topk_idx: Tensor) -> None:
    if is_repeated():
        return
    ids = topk_idx.flatten().long()
    known = (ids >= 0) & (ids < len(load))
    load.scatter_add_(0, torch.where(known, ids, 0), known.long())


def _nothing(*_: Tensor) -> None:
    return


torch.library.register_fake("raymoe::record_route", _nothing)
torch.library.register_fake("raymoe::count_route", _nothing)
