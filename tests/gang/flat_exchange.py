"""Times dispatch and combine between two machines: raymoe's over a rail, and one flat all-to-all of Gloo.

The flat one sends a row for each (token, rank), as a careful user of torch.distributed would. It leaves out what
raymoe's does beside: ids and weights, the order of rows by experts, the check that all ranks agree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

import raymoe

TOKENS, HIDDEN, EXPERTS, RANKS = 64, 2048, 16, 4


class FlatExchange:
    """A dispatch and a combine by one all-to-all each."""

    def __init__(self, ids: torch.Tensor) -> None:
        owners = ids // (EXPERTS // RANKS)
        needed = torch.stack([(owners == rank).any(dim=1) for rank in range(RANKS)])
        self.sent = needed.sum(dim=1)
        self.tokens = torch.cat([rank_needs.nonzero().flatten() for rank_needs in needed])

    def __call__(self, x: torch.Tensor) -> None:
        received = torch.empty_like(self.sent)
        dist.all_to_all_single(received, self.sent)
        there, back = received.tolist(), self.sent.tolist()
        rows = torch.empty(sum(there), HIDDEN, dtype=x.dtype)
        dist.all_to_all_single(rows, x[self.tokens], there, back)
        home = torch.empty(len(self.tokens), HIDDEN, dtype=x.dtype)
        dist.all_to_all_single(home, rows, back, there)
        torch.zeros(TOKENS, HIDDEN).index_add_(0, self.tokens, home.float())


def main(store: str, rank: int, repeats: int, *topks: int) -> None:
    """Print, on rank 0, the milliseconds of both, of the slowest rank, by top-k."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    times = {}
    with raymoe.World.of(domain=2, timeout_s=30) as world:
        for topk in topks:
            draw = torch.Generator().manual_seed(100 * topk + rank)
            ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:topk] for _ in range(TOKENS)])
            x, weights = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16(), torch.ones(TOKENS, topk)
            spec = raymoe.ExchangeSpec(tokens=TOKENS, hidden=HIDDEN, experts=EXPERTS, topk=topk)
            flat = slowest(world, repeats, partial(FlatExchange(ids), x))
            with raymoe.Exchange(world, spec) as exchange:
                times[topk] = {
                    "rail": slowest(world, repeats, partial(by_rail, exchange, x, ids, weights)),
                    "flat": flat,
                }
    if rank == 0:
        print(json.dumps(times))


def by_rail(exchange: raymoe.Exchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    got = exchange.dispatch(x, ids, weights)
    exchange.combine(got.x, got)


def slowest(world: raymoe.World, repeats: int, step: Callable[[], None]) -> float:
    """Return the milliseconds of a step on the slowest rank, the median of some after one to warm up."""
    times = []
    for _ in range(1 + repeats):
        world.barrier("start")
        began = perf_counter()
        step()
        times.append(perf_counter() - began)
    by_rank: list[list[float]] = world.swap(times[1:], "times")  # type: ignore[assignment]
    return 1e3 * median(max(step) for step in zip(*by_rank, strict=True))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
