"""Allow one call at a time into the exchanges that share a workspace or a world."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from raymoe.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """Refuses a call that begins before another has returned.

    Different threads may call, one after another: autograd calls from a thread of its own. Ranks must agree on the
    order of operations, and two calls at the same time have no order. Waiting would hide that, so the second call
    fails.
    """

    def __init__(self, owner: object = None) -> None:
        """`owner` is the world or the workspace whose exchanges share this."""
        del owner  # `World.shared` passes the world
        self.lock = threading.Lock()
        self.current: tuple[int, str] = (0, "")
        """The running call: the id of its exchange, and its operation."""

    def close(self, together: bool) -> None:
        """Do nothing: this holds no resource."""

    def error(self, exchange: int, op: str, rank: int) -> ConfigError:
        """Return the error for an operation that began during another."""
        other, other_op = self.current
        whose = "of this exchange" if other == exchange else "of an exchange that shares its memory or connections"
        return ConfigError(
            f"{op} on rank {rank} while {other_op or 'a call'} {whose} has not returned; make one call after another, "
            "in the same order on all ranks"
        )


def one_at_a_time(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorate an operation of an exchange: refuse it while another call that shares its `Calls` runs. Costs 0.4 us.

    torch.compile breaks its graph here and calls the operation untraced. `exchange.py` does the same for inner frames.
    """
    op = method.__name__

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        calls: Calls = self._calls
        if not calls.lock.acquire(blocking=False):
            raise calls.error(id(self), op, self.world.rank)
        try:
            calls.current = id(self), op
            return method(self, *args, **kwargs)
        finally:
            calls.lock.release()

    guarded._torchdynamo_disable = True  # type: ignore[attr-defined]
    guarded._torchdynamo_disable_msg = f"{op} of an exchange cannot be traced"  # type: ignore[attr-defined]
    return guarded
