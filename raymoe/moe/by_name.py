"""Find an exchange from the name of a process group, also while torch.compile traces: nothing is made before."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d

from raymoe.errors import ConfigError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

_FOUND: dict[str, Exchange] = {}
"""The exchanges by what was asked for. A graph guards its entry, which goes when the world is closed."""


def exchange_of(
    group: str, backend: str = "auto", timeout_s: float = 60.0, sms: int | str = "auto", **spec: Any
) -> Exchange:
    """Return the exchange of a spec, given by its keys, in the shared world of the process group of this name.

    The first call makes the world and the exchange, so all ranks of the group call it in one order. Where
    torch.compile traces it, that happens at the trace, and all arguments must be constants there: give `tokens` as a
    number, not as the size of a tensor that may change.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> name = dist.group.WORLD.group_name
    >>> exchange = exchange_of(name, tokens=8, hidden=16, experts=4, topk=2)
    >>> exchange is exchange_of(name, tokens=8, hidden=16, experts=4, topk=2)
    True
    >>> exchange.spec.padding, exchange.spec.depth
    ('zero', 0)
    >>> dist.destroy_process_group()
    """
    key = " ".join([group, backend, str(timeout_s), str(sms), *[f"{name}={spec[name]}" for name in spec]])
    _make(key, group, {"backend": backend, "sms": sms}, timeout_s, **spec)
    return _FOUND[key]


def _make(key: str, group: str, options: dict[str, Any], timeout_s: float, **spec: Any) -> bool:
    """Make the exchange if there is none. torch.compile calls this while it traces."""
    resolved, found = _group(group), _FOUND.get(key)
    if found is None or found.closed or found.world.process_group is not resolved:  # names of groups are used again
        with torch.inference_mode(False), torch.no_grad():
            world = World.of(resolved, timeout_s=timeout_s, shared=True)
            # Gradients of weights need zeros in gaps, and the results of `dispatch` own their rows.
            found = world.exchange(ExchangeSpec(**{"padding": "zero", "depth": 0, **spec}), **options)
        world.shared(_Entries).keys.append(key)
        _FOUND[key] = found
    return True


_make._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result, whose
# import takes a second, does


def _group(name: str) -> Any:
    groups: Any = distributed_c10d  # torch has no public function for this, and no types
    try:
        return groups._resolve_process_group(name)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"torch.distributed knows no process group of the name {name!r}") from error


class _Entries:
    """The entries of a world's exchanges, which go when it is closed."""

    def __init__(self, _: World) -> None:
        self.keys: list[str] = []

    def close(self, together: bool) -> None:  # noqa: ARG002
        """Remove them. Graphs are compiled again where they are called after that."""
        for key in self.keys:
            _FOUND.pop(key, None)
