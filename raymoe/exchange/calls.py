"""One call at a time into what the exchanges of a workspace, or of a world, have in common."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from raymoe.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """Refuses a call that begins before another one has ended. Threads may take turns: autograd has its own.

    Ranks must agree on the order of operations, and two calls at the same time have none. To wait for the other call
    would hide that, so the second call fails.
    """

    def __init__(self, owner: object = None) -> None:
        """`owner` is the world or the workspace whose exchanges share this."""
        del owner  # `World.shared` gives the world to whatever it makes
        self.lock = threading.Lock()
        self.inside: tuple[int, str] = (0, "")
        """The id of the exchange and the operation of the call that is going on."""

    def close(self, together: bool) -> None:
        """Nothing is held."""

    def refuse(self, exchange: int, op: str, rank: int) -> ConfigError:
        """What to raise for an operation that began too early."""
        other, other_op = self.inside
        whose = "of this exchange" if other == exchange else "of an exchange that shares its memory or connections"
        return ConfigError(
            f"{op} on rank {rank} while {other_op or 'a call'} {whose} has not returned; make one call after another, "
            "in the same order on all ranks"
        )


class Guarded(Protocol):
    """What is asked of an exchange here."""

    world: Any
    _calls: Calls


S = TypeVar("S", bound=Guarded)


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Refuse this operation while any other call is under way in what it shares. Costs 0.4 us.

    torch.compile breaks its graph here and calls the operation as it stands (`exchange.py` sees to what is inside).
    """
    op = method.__name__

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        calls = self._calls
        if not calls.lock.acquire(blocking=False):
            raise calls.refuse(id(self), op, self.world.rank)
        try:
            calls.inside = id(self), op
            return method(self, *args, **kwargs)
        finally:
            calls.lock.release()

    guarded._torchdynamo_disable = True  # type: ignore[attr-defined]
    guarded._torchdynamo_disable_msg = f"{op} of an exchange cannot be traced"  # type: ignore[attr-defined]
    return guarded
