"""The load of the experts of a model's layers over all ranks: for a router's bias, and for a program's log."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from raymoe.moe.data_ranks import DataRanks
from raymoe.moe.layer import MoELayer, layers_of
from raymoe.moe.router import Router
from raymoe.moe.training import by_world


@dataclass(frozen=True)
class RoutingStats:
    """The routing of one layer on all ranks."""

    load: list[int]
    """The entries (token, k) of each expert."""
    rows: int
    """The most rows that a rank got in one forward pass, gaps between experts included."""
    capacity: int
    """The rows for which each rank has memory."""

    @property
    def imbalance(self) -> float:
        """The load of the busiest expert over the mean load; 1 if even, 0 without entries.

        >>> RoutingStats(load=[3, 1, 0, 0], rows=3, capacity=8).imbalance
        3.0
        """
        return max(self.load) * len(self.load) / total if (total := sum(self.load)) else 0.0


@torch.no_grad()
def update_router_bias(model: nn.Module, speed: float, group: dist.ProcessGroup | None = None) -> None:
    """Move each router's `e_score_correction_bias` by `speed` towards an even load. All ranks call it, once a step.

    The rule is that of DeepSeek-V3: up for an expert with less than the mean load, else down. The load is that of all
    ranks' forward passes in training mode since the last call. Routers without such a bias are left out. `group` is
    that of `average_expert_gradients`. Nothing waits for the device, except where there is no process group.
    """
    balanced = {name: layer for name, layer in layers_of(model).items() if _bias(layer) is not None}
    loads = _loads(balanced, "bias", group)
    for name, layer in balanced.items():
        bias, load = _bias(layer), loads[name]
        assert bias is not None
        # Whole numbers: every rank moves its copy of the bias by the same bits.
        bias.add_(torch.sign(load.sum() - len(load) * load), alpha=speed)


@torch.no_grad()
def routing_stats(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, RoutingStats]:
    """Return the routing of each layer by name, over all ranks since the last call. All ranks call it; the host waits.

    It counts forward passes in training mode, each once: those that activation checkpointing repeats are left out.
    `group` is that of `average_expert_gradients`.

    >>> from raymoe import ExchangeSpec, World
    >>> from raymoe.moe import LayerForm
    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     layer = MoELayer(world, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), LayerForm(ffn=16))
    ...     y = layer(torch.ones(3, 8, dtype=torch.bfloat16))
    ...     stats = routing_stats(nn.Sequential(layer))
    >>> sorted(stats["0"].load), stats["0"].imbalance
    ([0, 3], 2.0)
    """
    layers, stats = layers_of(model), {}
    loads = _loads(layers, "stats", group)
    for world, those in by_world(layers.values()).items():
        ranks = DataRanks.of(world, group)
        rank = world.rank if ranks.group is None else dist.get_rank(ranks.group)
        rows = torch.zeros(ranks.size, len(those), dtype=torch.int64, device=world.device)
        rows[rank] = torch.cat([layer.row_counts.take_most() for layer in those])
        most = ranks.sum(rows).amax(dim=0).tolist()
        for layer, rows_of_layer in zip(those, most, strict=True):
            stats[id(layer)] = rows_of_layer, layer.exchange.spec.rows(world.size)
    return {name: RoutingStats(loads[name].tolist(), *stats[id(layer)]) for name, layer in layers.items()}


def _bias(layer: MoELayer) -> torch.Tensor | None:
    router = layer.get_submodule(layer._router_name)
    assert isinstance(router, Router)
    return router.e_score_correction_bias


def _loads(layers: dict[str, MoELayer], reader: str, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Return the load of each layer's experts over all ranks since this reader's last call, int64[E]."""
    names, loads = {id(layer): name for name, layer in layers.items()}, {}
    for world, those in by_world(layers.values()).items():
        whole = []
        for layer in those:
            counts = layer.row_counts.take_new(reader)
            if layer.row_counts.by_expert:
                whole.append(counts)
                continue
            table = counts.new_zeros(world.size, len(counts))  # each rank has other experts
            table[world.rank] = counts
            whole.append(table)
        sizes = [table.numel() for table in whole]
        summed = DataRanks.of(world, group).sum(torch.cat([table.flatten() for table in whole]))
        for layer, load in zip(those, torch.split(summed, sizes), strict=True):
            loads[names[id(layer)]] = load
    return loads
