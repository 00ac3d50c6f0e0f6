"""Run a module on a stream of its own, beside work on the current stream: eagerly, in a capture, in the backward pass.

- **Order.** The module waits for the work that was enqueued before `beside`, and the work after the `with` waits for
  the module. Both waits are events, so a capture has them as edges of its graph.
- **Backward.** torch runs the gradients of an operation on the stream of its forward call, and orders the streams.
- **Memory.** torch reuses freed memory at once on the stream that it was allocated on. The result is allocated on the
  side stream and read on the other. With gradients, the side stream may still read the module's input when it is freed.
  `record_stream` makes torch wait for those readers. In a capture nothing else uses such memory until the capture ends:
  a captured layer holds its result, and with gradients its input, for itself.
- **No deadlock.** Kernels of an exchange wait for other ranks, and all their blocks must be resident. A module's
  kernels may hold SMs that they need, but wait for nothing, so they end and give them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raymoe.memory.world import World

_cuda: Any = torch.cuda  # its functions lack annotations


class SideStream:
    """The side stream of a world's GPU. All layers share it (`World.shared`)."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._stream = _cuda.Stream(world.device)

    @contextmanager
    def beside(self, module: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Iterator[Beside]:
        """Run `module(x)` beside the work inside. It begins where the work calls `start`."""
        call = Beside(self._stream, self._device, module, x)
        try:
            yield call
        finally:  # also after an error: a capture must not end while a stream is apart
            call.join()

    def close(self, together: bool) -> None:
        """Do nothing: torch owns its streams."""


class Beside:
    """One call of a module on a side stream."""

    def __init__(
        self, stream: Any, device: torch.device, module: Callable[[torch.Tensor], Any], x: torch.Tensor
    ) -> None:
        self._stream, self._device, self._module, self._x = stream, device, module, x
        self._ready, self._done = _cuda.Event(), _cuda.Event()
        self._ready.record(_cuda.current_stream(device))
        self._started = False
        self._result: torch.Tensor | None = None

    def start(self) -> None:
        """Enqueue the module now. It waits only for what was enqueued before this object existed."""
        self._stream.wait_event(self._ready)
        self._started = True
        if torch.is_grad_enabled():
            self._x.record_stream(self._stream)  # its gradients read it there, when nothing else holds it
        with _cuda.stream(self._stream):
            try:
                self._result = self._module(self._x)
            finally:
                self._done.record(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the module, if it was started."""
        if not self._started:
            return
        current = _cuda.current_stream(self._device)
        current.wait_event(self._done)
        if self._result is not None:
            self._result.record_stream(current)

    @property
    def result(self) -> torch.Tensor:
        """The module's result, after the `with`."""
        assert self._result is not None, "the work beside did not call start"
        return self._result
