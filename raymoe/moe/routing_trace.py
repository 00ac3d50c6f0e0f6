"""Records the routing of a model into a trace file, which the workloads replay (`routing: {kind: trace}`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from raymoe.errors import ConfigError
from raymoe.moe.layer import MoELayer
from raymoe.moe.router import Routed

MOST_STEPS = 64


class RoutingTrace:
    """The experts that a router chose, a step for each of its calls. Recording lasts while it is a context.

    `module` is a `MoELayer`, or any router. `choose` returns the ids [..., K] of what a router of another library
    returns; without it, that is the only tensor of integers there. Calls after `steps` are not recorded, nor are
    those in which activation checkpointing repeats a forward pass.

    >>> from raymoe.moe import Router, RouterForm
    >>> router = Router(RouterForm(experts=4, topk=1), torch.eye(4))
    >>> with RoutingTrace(router) as trace:
    ...     routed = router(torch.eye(4)[[2, 0]]), router(torch.eye(4)[[3]])
    >>> trace.ids().tolist()
    [[[2], [0]], [[3], [-1]]]
    """

    def __init__(
        self, module: nn.Module, steps: int = MOST_STEPS, choose: Callable[[Any], torch.Tensor] | None = None
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps is {steps}; give 1 or more")
        self._router = module.get_submodule(module._router_name) if isinstance(module, MoELayer) else module
        self._most, self._choose = steps, choose or _only_integers
        self._steps: list[torch.Tensor] = []
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._hook = self._router.register_forward_hook(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hook is not None
        self._hook.remove()

    def _record(self, _module: nn.Module, _inputs: object, output: object) -> None:
        repeated = torch._C._current_graph_task_id() != -1  # inside of a backward pass
        if len(self._steps) < self._most and not repeated:
            ids = self._choose(output)
            self._steps.append(ids.detach().reshape(-1, ids.shape[-1]).to("cpu", torch.int32))

    def ids(self) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.signedinteger]]:
        """Return the ids, int32[steps, tokens, topk]. A step with fewer tokens than others ends with rows of -1."""
        if not self._steps:
            raise ConfigError("the router was not called; run the model inside `with RoutingTrace(...)`")
        topk = {ids.shape[1] for ids in self._steps}
        if len(topk) > 1:
            raise ConfigError(f"the router chose {sorted(topk)} experts a token; a trace has one number of them")
        tokens = max(len(ids) for ids in self._steps)
        table = torch.full((len(self._steps), tokens, topk.pop()), -1, dtype=torch.int32, device="cpu")
        for step, ids in zip(table, self._steps, strict=True):
            step[: len(ids)] = ids
        return table.numpy()

    def save(self, path: str | Path) -> None:
        """Write the ids as numpy does. Each rank has its own tokens, so each writes a file of its own."""
        with Path(path).open("wb") as file:
            numpy.save(file, self.ids(), allow_pickle=False)


def _only_integers(output: object) -> torch.Tensor:
    """Find the ids in the output of a router."""
    if isinstance(output, Routed):
        return output.topk_idx
    parts = output if isinstance(output, tuple | list) else (output,)
    integers = [part for part in parts if isinstance(part, torch.Tensor) and not part.is_floating_point()]
    if len(integers) != 1:
        raise ConfigError(
            f"the router returned {len(integers)} tensors of integers, and its ids are to be one; "
            "give choose=, a function that returns the ids of its output"
        )
    return integers[0]
