"""Run a layer on parts of its rows, so that the exchange of a part runs beside the products of another.

Enqueued, of two parts:

    exchange's stream   dispatch 0   dispatch 1                   combine 0   combine 1
    current stream      shared expert            experts 0        experts 1               sum

An operation of the exchange waits for its rows by an event, and so do the experts. Products leave the exchange its SMs
(left_sms.py); where it takes all, nothing runs beside it.

Memory: tensors that both streams use are held until the current stream has waited for the last combine. So torch gives
none of them to others before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.memory.world import World
from raymoe.moe.layer import MoELayer
from raymoe.moe.left_sms import leaving
from raymoe.rows.elementwise import add

_cuda: Any = torch.cuda  # its functions lack annotations
HIGH_PRIORITY = -1


class ExchangeStream:
    """A stream of a world's GPU for exchanges beside products. All layers share it (`World.shared`)."""

    def __init__(self, world: World) -> None:
        self.stream = _cuda.Stream(world.device, priority=HIGH_PRIORITY)

    def close(self, together: bool) -> None:
        """Do nothing: torch owns its streams."""


class _SecondStream:
    """A stream, and the order between it and the current one. On CPU ranks there is one thread for both."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._stream = world.shared(ExchangeStream).stream if world.device.type == "cuda" else None

    def after_current(self) -> None:
        """Let the second stream wait for what the current stream has."""
        if self._stream is not None:
            self._stream.wait_event(_cuda.current_stream(self._device).record_event())

    def mark(self) -> Any:
        """Return an event after what the second stream has; None without a stream."""
        return None if self._stream is None else self._stream.record_event()

    def current_after(self, mark: Any) -> None:
        """Let the current stream wait for a mark."""
        if mark is not None:
            _cuda.current_stream(self._device).wait_event(mark)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let the current stream wait for the second one at the end, also after an error.

        A capture must not end while a stream is apart.
        """
        try:
            yield
        finally:
            self.current_after(self.mark())

    def entered(self) -> Any:
        """Return a context that enqueues on the second stream."""
        return nullcontext() if self._stream is None else _cuda.stream(self._stream)


def in_microbatches(layer: MoELayer, x: torch.Tensor, count: int = 2) -> torch.Tensor:
    """Map x[..., H] to y[..., H] as the layer does, in `count` parts of the rows. For inference, without gradients.

    All ranks call it, with the same count. Each part has at most the tokens of the layer's spec, which may be
    fewer than x has. With `sms` in the layer a part's exchange runs beside another part's products.

    >>> from raymoe import ExchangeSpec
    >>> from raymoe.moe import LayerForm
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=3, hidden=8, experts=2, topk=1, dtype="float32")
    >>> with world, torch.no_grad():
    ...     layer = MoELayer(world, spec, LayerForm(ffn=16, shared=4, norm=1e-6, residual=True))
    ...     y = in_microbatches(layer, torch.ones(5, 8))
    ...     torch.testing.assert_close(y[:3], layer(torch.ones(3, 8)))
    """
    _check(layer, x, count)
    flat = x.reshape(-1, layer.exchange.spec.hidden)
    h, routing = layer.route(flat)
    summed = torch.empty_like(h)
    given, results = (h, routing.topk_idx, routing.topk_weights), summed.tensor_split(count)
    parts = list(zip(*(each.tensor_split(count) for each in given), strict=True))
    second, held = _SecondStream(layer.world), []
    second.after_current()
    with second.joined(), leaving(_sms_of_exchange(layer)):
        coming = _dispatch(layer, second, *parts[0])
        shared = (layer.apply_shared(h),) if layer.has_shared else ()
        for part, result in enumerate(results):
            dispatched, mark = coming
            if part + 1 < count:
                coming = _dispatch(layer, second, *parts[part + 1])
            second.current_after(mark)
            rows = layer.multiply_rows(dispatched).to(h.dtype)
            second.after_current()
            with second.entered():
                layer.exchange.combine_unkept(rows, dispatched, layer.deterministic is None, result)
            held += [dispatched, rows]
    residual = (flat,) if layer.residual else ()
    return add(summed, *shared, *residual).to(x.dtype).view(x.shape)


def _dispatch(layer: MoELayer, second: _SecondStream, *part: torch.Tensor) -> tuple[Dispatched, Any]:
    """Dispatch a part on the second stream; return its rows and the mark after which they are there."""
    with second.entered():
        return layer.dispatch_rows(*part, apart=True), second.mark()


def _sms_of_exchange(layer: MoELayer) -> int:
    """Return the SMs that products leave to the exchange: none where it takes all."""
    world, sms = layer.world, layer.exchange.sms
    return sms if world.device.type == "cuda" and sms is not None and sms < world.gpu.sms else 0


def _check(layer: MoELayer, x: torch.Tensor, count: int) -> None:
    spec = layer.exchange.spec
    if type(count) is not int or count < 1:
        raise ConfigError(f"count is {count!r}; a whole number of at least 1 is needed")
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *layer.parameters())):
        raise ConfigError("microbatches of a layer have no gradients, and a tensor needs one; call them under no_grad")
    if x.dim() == 0 or x.shape[-1] != spec.hidden:
        raise ConfigError(f"x has shape {list(x.shape)}; this layer takes rows of {spec.hidden}")
    if layer.gives_scores:
        raise ConfigError("microbatches of a layer that returns its scores; call the layer itself")
