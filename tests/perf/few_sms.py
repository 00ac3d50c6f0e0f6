"""Time dispatch and combine on some SMs by each way that the code has, in turns, and compare their results bit by bit.

    torchrun --nproc-per-node 2 -m tests.perf.few_sms --out few_sms.jsonl
    torchrun --nproc-per-node 2 -m tests.perf.few_sms --sms 24 --layouts rank --rounds 21

The ways: `all` as on all SMs; `mixed`: every block of a dispatch sends and places; `whole`: a combine does not cut rows
into pieces; `flags`: no tokens go by the LL path; `lines`: all do, by blocks that send and place; `divided`: by blocks
that do one of the two.
The code chooses by the number of SMs (dispatch_grid.py, combine.py and ll.py of raymoe/exchange/peer); here the choice
is made by hand. All ways must give the same rows and the same y, and so must the timed combines: the first difference
ends the run with 1.
Times are by the clock of the workload exchange: graphs, a cold L2 cache, the slowest rank, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import raymoe
from raymoe.workload.clock import OpClock, calls_of

ALL: dict[str, Any] = {"dispatch_grid.is_mixed": lambda *_: False, "combine.MOST_WHOLE_SMS": 0}
FLAGS: dict[str, Any] = {"workspace.is_ll": lambda *_: False}
LINES: dict[str, Any] = {"workspace.is_ll": lambda *_: True}
WAYS: dict[str, dict[str, Any]] = {
    "flags": FLAGS,
    "lines": LINES | {"ll.is_mixed_ll": lambda *_: True, "ll.FEW_ROUNDS": 0},
    "divided": LINES | {"ll.is_mixed_ll": lambda *_: False},
    "all": ALL,
    "mixed": ALL | {"dispatch_grid.is_mixed": lambda *_: True},
    "whole": ALL | {"combine.MOST_WHOLE_SMS": 10**6},
}
"""What differs in raymoe/exchange/peer/ in each way."""


@contextmanager
def way(name: str) -> Iterator[None]:
    """Choose a way for the exchanges that are made inside this context."""
    with ExitStack() as patches:
        for key, value in WAYS[name].items():
            patches.enter_context(mock.patch(f"raymoe.exchange.peer.{key}", value))
        yield


@dataclass
class Tokens:
    """The input of all dispatches."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def drawn(cls, spec: raymoe.ExchangeSpec, world: raymoe.World) -> Tokens:
        random = torch.Generator(device=world.device).manual_seed(world.rank)
        x = torch.randn(spec.tokens, spec.hidden, device=world.device, generator=random).to(torch.bfloat16)
        scores = torch.rand(spec.tokens, spec.experts, device=world.device, generator=random)
        weights, ids = scores.topk(spec.topk)
        return cls(x, ids, weights)


class Timed:
    """An exchange made by one way, with its operations captured."""

    def __init__(self, name: str, exchange: raymoe.Exchange, tokens: Tokens) -> None:
        self.name, self.exchange, self.tokens = name, exchange, tokens
        self.got = exchange.dispatch(tokens.x, tokens.ids, tokens.weights)
        exchange.check()
        valid = self._valid()
        rows = self.got.x if self.got.index is None else self.got.x[self.got.index]
        self.rows = torch.where(valid[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
        self.placed = self.rows.clone()
        self.y = torch.empty_like(tokens.x)
        exchange.combine(self.rows, self.got, out=self.y)
        exchange.check()
        self.result = self.y.clone()

    def _valid(self) -> torch.Tensor:
        """Return which places have rows."""
        valid = torch.zeros(self.exchange.spec.rows(self.exchange.world.size), dtype=torch.bool, device=self.y_device)
        offsets, counts = self.got.expert_offsets.tolist(), self.got.expert_counts.tolist()
        for begin, count in zip(offsets, counts, strict=False):
            valid[begin : begin + count] = True
        return valid

    @property
    def y_device(self) -> torch.device:
        return self.tokens.x.device

    def differs_from(self, other: Timed) -> str | None:
        """Return what differs in the results; None: nothing."""
        if not torch.equal(self.placed, other.placed):
            return "rows"
        if self.result.isnan().any() or not torch.equal(self.result, other.result):
            return "y"
        return None

    def dispatch(self) -> None:
        self.exchange.dispatch(self.tokens.x, self.tokens.ids, self.tokens.weights)

    def combine(self) -> None:
        """Combine the eager dispatch. The result of a captured one may belong to a graph that is never replayed."""
        self.exchange.combine(self.rows, self.got, out=self.y)


def measured(world: raymoe.World, spec: raymoe.ExchangeSpec, sms: int, ways: list[str], rounds: int) -> dict[str, Any]:
    """Return the times of all ways on so many SMs, by operation; raise if their results differ."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), ExitStack() as closing:
        tokens, timed = Tokens.drawn(spec, world), list[Timed]()
        for name in ways:
            with way(name):
                exchange = closing.enter_context(raymoe.Exchange(world, spec, backend="fused", sms=sms))
            timed.append(Timed(name, exchange, tokens))
            if difference := timed[-1].differs_from(timed[0]):
                sys.exit(f"{difference} by {name} differ from those by {ways[0]} on {sms} SMs, rank {world.rank}")

        def settle() -> None:
            for each in timed:
                each.exchange.check()

        clock = OpClock(world, stream, settle, captured=True, calls=calls_of(spec.tokens))
        closing.callback(clock.close)
        ops: dict[tuple[str, str], Any] = {}
        for each in timed:
            for op in ("dispatch", "combine"):
                work: Callable[[], None] = getattr(each, op)
                ops[each.name, op] = clock.timed(work)
        times: dict[tuple[str, str], list[float]] = {key: [] for key in ops}
        for each in timed:
            each.y.fill_(torch.nan)
        for number in range(rounds + 2):
            for key, op in ops.items():
                us = slowest(clock.us_cold(op), world)
                if number >= 2:
                    times[key].append(us)
        for each in timed:
            if not torch.equal(each.y, each.result):
                sys.exit(f"y by {each.name} differs between timed and eager combines on {sms} SMs, rank {world.rank}")
        return {f"{name} {op}": [round(us, 1) for us in every] for (name, op), every in times.items()}


def slowest(us: float, world: raymoe.World) -> float:
    """Return the time of the slowest rank."""
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, us)
    return max(float(each) for each in every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw lines")
    parser.add_argument("--sms", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64, 96, 132])
    parser.add_argument("--layouts", nargs="+", default=["expert", "rank"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--wire", default="bfloat16", help="the type in which rows of a dispatch cross")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    if "rank" in asked.layouts and {"lines", "divided"} & set(asked.ways):
        parser.error("rows by rank do not go by lines; choose other --ways")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    with raymoe.World.of(device="cuda") as world:
        for layout, tokens in product(asked.layouts, asked.tokens):
            shape = {"tokens": tokens, "hidden": asked.hidden, "experts": asked.experts, "topk": asked.topk}
            spec = raymoe.ExchangeSpec(**shape, layout=layout, wire=asked.wire)
            for sms in asked.sms:
                times = measured(world, spec, sms, asked.ways, asked.rounds)
                if world.rank == 0:
                    line = {"gpu": torch.cuda.get_device_name(), "ranks": world.size, **shape}
                    line |= {"layout": layout, "wire": asked.wire}
                    text = "  ".join(f"{name} {median(us):.1f}" for name, us in times.items())
                    print(f"{layout:>6} {tokens:>4} tokens {sms:>3} SMs  {text}", flush=True)
                    if asked.out is not None:
                        with asked.out.open("a") as out:
                            print(json.dumps({**line, "sms": sms, "us": times}), file=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
