"""An error that ends an operation early makes its exchange unusable."""

from __future__ import annotations

import copy
from types import TracebackType

from raymoe.errors import PeerTimeout, RaymoeError
from raymoe.exchange.backend import HARMLESS_ERRORS
from raymoe.memory.world import World


class Poisoning:
    """Makes an exchange of this world unusable when an error ends an operation early.

    Peers may still be inside that operation, so this rank must not write to them again. It tells them, so that they do
    not wait for it. All calls of an exchange share one object, because a generator costs a microsecond a call.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.error: RaymoeError | None = None
        """Why the exchange is unusable; None: it is not."""
        self.site = 0
        """The number of the layer that called last; 0: none."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, HARMLESS_ERRORS):
            return
        cause, error = error, self._world.give_up(error)
        if isinstance(error, PeerTimeout) and self.site:
            error.advice = (
                f"did all ranks call this layer, number {self.site}, and those before it, in the backward pass too?"
            )
        if isinstance(error, RaymoeError):
            self.error = copy.copy(error)  # drops the traceback, which refers to the exchange
        else:
            what = f"{type(error).__name__} ended an operation early"
            self.error = RaymoeError(f"this exchange is unusable: {what}")
        if error is not cause:
            raise error from cause
