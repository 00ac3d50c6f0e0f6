"""The clock of workload products on GPUs: one stream, on which the systems of a step take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from raymoe.memory.world import World
from raymoe.workload.clock import TimedOp
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock
from raymoe.workload.pointwise.operations import poison
from raymoe.workload.products.prepared import Prepared


class GpuClock:
    """Times functions on a stream of its own."""

    def __init__(self, world: World, graph: Literal["auto"] | bool) -> None:
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.stream = new_stream(world.device)
        self.stream.wait_stream(torch.cuda.current_stream(world.device))
        self.captured = graph is not False
        self.clock = TorchGraphClock(world, self.stream, self.settle, captured=self.captured)
        self._products: list[GpuProduct] = []

    def ready(self, make: Callable[[], Prepared]) -> GpuProduct:
        with torch.cuda.stream(self.stream):
            product = GpuProduct(self, make())
        self._products.append(product)
        return product

    def settle(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        for product in self._products:
            product.close()
        self._products.clear()
        self.clock.close()


class GpuProduct:
    """A function of one system; its replays write the same memory each time. Made on the clock's stream."""

    def __init__(self, clock: GpuClock, prepared: Prepared) -> None:
        self.prepared = prepared
        self._clock = clock
        self._y: Tensor | None = None
        self._work()  # compiles and loads before the capture
        clock.settle()
        self._timed: TimedOp | None = clock.clock.timed(self._work)

    def sample(self) -> float:
        assert self._timed is not None
        with torch.cuda.stream(self._clock.stream):
            return self._clock.clock.us_cold(self._timed)

    def result(self) -> Tensor:
        assert self._timed is not None
        with torch.cuda.stream(self._clock.stream):
            if self._y is not None:
                poison(self._y)
            self._timed.warm()
            self._clock.settle()
        assert self._y is not None
        return self._y

    def close(self) -> None:
        self._timed = self._y = None

    def _work(self) -> None:
        self._y = self.prepared.compute()
