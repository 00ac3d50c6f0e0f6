"""Record the routes of a model, replay them in another pass, and count the load of its experts.

A trainer computes the same layers as a rollout engine with other kernels, and some tokens get other experts. It replays
the engine's routes instead: the ids are given, and the weights follow from its own logits, with gradients.

    with record_routes(engine, tokens=4096) as routes:
        engine(x)
    ids = routes.ids()  # int16[layers, tokens, topk], which travels through Ray

    with replay_routes(trainer, ids):
        loss_of(trainer(x)).backward()

Layers are in the order of `model.modules()`. They are those of raymoe, and those of transformers and torchtitan that
`host_routers.py` knows, whoever moves their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError
from raymoe.moe.host_routers import device_of, form_of, site_of
from raymoe.moe.route_site import RouteSite, static
from raymoe.moe.router import Router
from raymoe.moe.router_formulas import RouterForm

ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class _Routed:
    """A router of a model."""

    name: str
    site: RouteSite
    form: RouterForm
    device: torch.device


def _routers_of(model: nn.Module) -> list[_Routed]:
    """Return the routers in the order of modules, all with one K."""
    routers = []
    for name, module in model.named_modules():
        if isinstance(module, Router):
            routers.append(_Routed(name, module.routes, module.form, device_of(module)))
        elif (form := form_of(module)) is not None:
            routers.append(_Routed(name, site_of(module, form), form, device_of(module)))
    if not routers:
        raise ConfigError(
            f"routes of a {type(model).__name__}, which has no router of raymoe, and none of transformers or "
            "torchtitan that raymoe knows"
        )
    if len(topk := {router.form.topk for router in routers}) > 1:
        raise ConfigError(f"routers choose {sorted(topk)} experts a token; routes have one number of them")
    return routers


# Record.


class RecordedRoutes:
    """The routes of a model's tokens, in the order of calls. `record_routes` makes it.

    A CUDA graph that was captured inside of `record_routes` goes on recording in each replay: keep this object as long
    as the graph.
    """

    def __init__(self, routers: list[_Routed], tokens: int) -> None:
        topk, most = routers[0].form.topk, max(router.form.experts for router in routers)
        dtype = torch.int16 if most <= torch.iinfo(torch.int16).max else torch.int32
        self.tokens, self._topk = tokens, topk
        # A tensor for each layer: a compiled function writes to some of them, which may be no parts of others.
        self._logs = [
            static(torch.full((tokens + 1, topk), -1, dtype=dtype, device=router.device)) for router in routers
        ]
        self._logged = [static(torch.zeros(1, dtype=torch.int64, device=router.device)) for router in routers]

    def ids(self) -> Tensor:
        """Return the ids on the CPU, int16[layers, tokens, topk], of the tokens since `clear`. The host waits.

        With more than 32767 experts they are int32. A layer that was not called has -1.
        """
        counts = [int(logged) for logged in self._logged]
        tokens = max(counts)
        if tokens > self.tokens:
            raise ConfigError(
                f"{tokens} tokens came and routes of {self.tokens} were recorded: give record_routes more tokens, or "
                "call clear after ids"
            )
        if uneven := {count for count in counts if count} - {tokens}:
            raise ConfigError(
                f"layers were called with {sorted({*uneven, tokens})} tokens, so their routes are not those of one "
                "batch: record passes that call every layer with the same tokens"
            )
        table = torch.full((len(counts), tokens, self._topk), -1, dtype=self._logs[0].dtype, device="cpu")
        for layer, log, count in zip(table, self._logs, counts, strict=True):
            layer[:count] = log[:count]
        return table

    def clear(self) -> None:
        """Forget the routes, without a wait for the device: the next call records from the first place on."""
        for logged in self._logged:
            logged.zero_()

    def _write_from(self, routers: list[_Routed]) -> None:
        for router, log, logged in zip(routers, self._logs, self._logged, strict=True):
            router.site.log, router.site.logged = log, logged


@contextmanager
def record_routes(model: nn.Module, *, tokens: int) -> Iterator[RecordedRoutes]:
    """Record the ids that the routers of a model choose, of at most `tokens` tokens, on the device.

    Calls in which activation checkpointing repeats a forward pass are left out. Under `replay_routes` the ids that were
    taken are recorded.

    >>> router = Router(RouterForm(experts=4, topk=1), torch.eye(4))
    >>> with record_routes(router, tokens=8) as routes:
    ...     routed = router(torch.eye(4)[[2, 0]]), router(torch.eye(4)[[3]])
    >>> routes.ids().tolist()
    [[[2], [0], [3]]]
    """
    if tokens < 1:
        raise ConfigError(f"record_routes was called with tokens={tokens}; give the most tokens to record, 1 or more")
    routers = _routers_of(model)
    if busy := [router.name for router in routers if router.site.log is not None]:
        raise ConfigError(f"routes of {busy[0] or 'this router'} are recorded already, by a record_routes around this")
    recorded = RecordedRoutes(routers, tokens)
    recorded._write_from(routers)
    try:
        yield recorded
    finally:
        for router in routers:
            router.site.log = router.site.logged = None


# Replay.


class ReplayedRoutes:
    """The routes that the routers of a model take, on their devices. `replay_routes` makes it."""

    def __init__(self, routers: list[_Routed], ids: Any) -> None:
        table = _table_of(ids)
        layers, _, topk = table.shape
        if (layers, topk) != (len(routers), routers[0].form.topk):
            raise ConfigError(
                f"recorded routes {list(table.shape)} for a model of {len(routers)} routers that choose "
                f"{routers[0].form.topk} experts; routes are [layers, tokens, topk]"
            )
        self.parts = [static(layer.to(router.device, copy=True)) for layer, router in zip(table, routers, strict=True)]

    def load(self, ids: Any) -> None:
        """Take other routes of as many tokens, into the same memory: for the next replay of a captured pass."""
        table = _table_of(ids)
        if (shape := (len(self.parts), *self.parts[0].shape)) != tuple(table.shape):
            raise ConfigError(f"recorded routes {list(table.shape)} into the memory of {list(shape)}; sizes stay")
        for part, layer in zip(self.parts, table, strict=True):
            part.copy_(layer)


def _table_of(ids: Any) -> Tensor:
    """Return ids as a tensor. Arrays that came through Ray are read-only, so they are copied."""
    table: Tensor = torch.from_numpy(ids.copy()) if isinstance(ids, numpy.ndarray) else ids
    if table.dim() != 3 or table.dtype not in ID_DTYPES:
        raise ConfigError(
            f"recorded routes are {table.dtype} {list(table.shape)}; integers [layers, tokens, topk] are needed"
        )
    return table


@contextmanager
def replay_routes(model: nn.Module, ids: Any) -> Iterator[ReplayedRoutes]:
    """Let the routers of a model take recorded ids, a tensor or an array [layers, tokens, topk], for one micro-batch.

    Every call of a router inside takes the ids of its layer, so the tokens of a call are those of `ids`. The weights
    are computed from the logits, with gradients. A token with an id below 0 was not recorded: its router chooses.

    Run the backward pass inside too where activation checkpointing repeats forward passes; or give checkpoint
    `context_fn=functools.partial(same_routes, model)`.

    >>> router = Router(RouterForm(experts=4, topk=1), torch.eye(4))
    >>> with replay_routes(router, torch.tensor([[[1], [-1]]])):
    ...     router(torch.eye(4)[[2, 0]]).topk_idx.tolist()
    [[1], [0]]
    """
    routers = _routers_of(model)
    replayed = ReplayedRoutes(routers, ids)
    with _taking([(router.site, part) for router, part in zip(routers, replayed.parts, strict=True)]):
        yield replayed


@contextmanager
def _taking(routes: list[tuple[RouteSite, Tensor | None]]) -> Iterator[None]:
    """Let sites take these ids, and afterwards those that they took before."""
    before = [site.recorded for site, _ in routes]
    for site, recorded in routes:
        site.recorded = recorded
    try:
        yield
    finally:
        for (site, _), recorded in zip(routes, before, strict=True):
            site.recorded = recorded


def same_routes(model: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Let a forward pass that checkpointing repeats take the routes of the first one, whichever are taken by then.

    It is for pipelines, where the backward pass of a micro-batch comes after the forward passes of others:

        checkpoint(block, x, use_reentrant=False, context_fn=functools.partial(same_routes, block))
    """
    routes = [(router.site, router.site.recorded) for router in _routers_of(model)]
    return nullcontext(), _taking(routes)


# Count.


class CountedRoutes:
    """The load of each layer's experts by this rank's tokens. `count_routes` makes it.

    A CUDA graph that was captured inside of `count_routes` goes on counting in each replay: keep this object as long as
    the graph.
    """

    def __init__(self, routers: list[_Routed]) -> None:
        experts = {router.form.experts for router in routers}
        if len(experts) > 1:
            raise ConfigError(f"layers have {sorted(experts)} experts; count those of one number at a time")
        [count] = experts
        self._loads = [static(torch.zeros(count, dtype=torch.int64, device=router.device)) for router in routers]

    def load(self) -> Tensor:
        """Return the entries (token, k) of each expert since `clear`, int64[layers, E], without a wait.

        It is on the device. Sum it over the ranks with all_reduce; `plan_placement` takes a row of it.
        """
        device = self._loads[0].device
        return torch.stack([load.to(device) for load in self._loads])

    def clear(self) -> None:
        """Count from zero, without a wait."""
        for load in self._loads:
            load.zero_()


@contextmanager
def count_routes(model: nn.Module) -> Iterator[CountedRoutes]:
    """Count the entries (token, k) of each expert of a model, on the device, over all calls inside.

    Calls in which activation checkpointing repeats a forward pass are left out.

    >>> router = Router(RouterForm(experts=4, topk=1), torch.eye(4))
    >>> with count_routes(router) as counted:
    ...     routed = router(torch.eye(4)[[2, 0]]), router(torch.eye(4)[[2]])
    >>> counted.load().tolist()
    [[1, 0, 2, 0]]
    """
    routers = _routers_of(model)
    if busy := [router.name for router in routers if router.site.load is not None]:
        raise ConfigError(f"routes of {busy[0] or 'this router'} are counted already, by a count_routes around this")
    counted = CountedRoutes(routers)
    for router, load in zip(routers, counted._loads, strict=True):
        router.site.load = load
    try:
        yield counted
    finally:
        for router in routers:
            router.site.load = None
