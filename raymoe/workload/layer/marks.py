"""Note the time between the parts of a layer, in its forward and its backward pass.

A mark is an identity between two parts. In the forward pass it notes the end of a part. In the backward pass gradients
come through it the other way, so it notes the beginning of the part's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from raymoe.moe.router import Routed

START, SUM, RECOMPUTED = "start", "sum", "recompute"
BACKWARD = "_backward"


@dataclass(frozen=True)
class _Point:
    part: str
    backward: bool
    """Whether gradients came through the mark."""
    late: bool
    """Whether it was in the backward pass."""
    time: Any


@dataclass
class Marks:
    """The points of one step, in order. `note` tells the time, or enqueues an event that will.

    >>> clock = iter(range(100))
    >>> marks = Marks(lambda: next(clock))
    >>> x = torch.ones(1, requires_grad=True)
    >>> y = marks.at("experts", marks.at(START, x) * 2)
    >>> marks.begin_backward()
    >>> y.backward()
    >>> list(marks.spans())
    [('experts', 0, 1), ('sum_backward', 1, 2), ('experts_backward', 2, 3)]
    """

    note: Callable[[], Any] | None = None
    """None: marks note nothing."""
    topk_idx: torch.Tensor | None = None
    """The choice of the router in the last forward pass."""
    _points: list[_Point] = field(default_factory=list)
    _late: bool = False

    def begin(self) -> None:
        self._points.clear()
        self.topk_idx = None
        self._late = False

    def begin_backward(self) -> None:
        self._late = True

    def at(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put a mark after a part, at its result."""
        marked: torch.Tensor = _Mark.apply(tensor, self, part)  # type: ignore[no-untyped-call]
        return marked

    def add(self, part: str, *, backward: bool) -> None:
        if self.note is not None:
            self._points.append(_Point(part, backward, self._late, self.note()))

    def spans(self) -> Iterator[tuple[str, Any, Any]]:
        """Give each part with the times of its beginning and its end.

        `recompute` is the forward work that a backward pass repeats, up to the last mark that it passes.
        """
        gradients_of = SUM
        for begin, end in pairwise(self._points):
            if begin.backward:
                gradients_of = begin.part
            if not end.late:
                yield end.part, begin.time, end.time
            elif end.backward:
                yield gradients_of + BACKWARD, begin.time, end.time
            else:
                yield RECOMPUTED, begin.time, end.time

    def put_into(self, layer: Any) -> None:
        """Put a mark after each part of a `MoELayer`."""

        def after(part: str) -> Callable[..., torch.Tensor]:
            return lambda _module, _inputs, result: self.at(part, result)

        def after_router(_module: object, _inputs: object, routed: Routed) -> Routed:
            self.topk_idx = routed.topk_idx
            return routed._replace(topk_weights=self.at("router", routed.topk_weights))

        def before_experts(_module: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            rows, *others = inputs
            if isinstance(rows, tuple):  # 8-bit values and their scales
                return (self.at("dispatch", rows[0]), rows[1]), *others
            return self.at("dispatch", rows), *others

        routed = layer.routed
        layer.routed = lambda *inputs: self.at("combine", routed(*inputs))
        if layer.norm is not None:
            layer.norm.register_forward_hook(after("norm"))
        layer.gate.register_forward_hook(after_router)
        layer.experts.register_forward_pre_hook(before_experts)
        layer.experts.register_forward_hook(after("experts"))
        if "shared_experts" in dict(layer.named_children()):
            layer.shared_experts.register_forward_hook(after("shared"))


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, marks: Marks, part: str) -> torch.Tensor:
        ctx.marks, ctx.part = marks, part
        marks.add(part, backward=False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.marks.add(ctx.part, backward=True)
        return gradient, None, None
