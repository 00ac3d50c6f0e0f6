"""Time what options cost, in turns: a layer with `deterministic="batch"`, and a dispatch with a placement table.

    torchrun --nproc-per-node 2 -m tests.perf.option_costs --out option_costs.jsonl

One GPU does too: the layer then has all experts, and a dispatch crosses no link.

The layer has the shape of DeepSeek-V3 with its router, norm and shared expert. The placement has a slot for each
expert, in ascending order, so rows go where they go without a table. Times are by the clock of workload exchange:
graphs, a cold L2 cache, the slowest rank, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import raymoe
from raymoe.moe import LayerForm, RouterForm
from raymoe.report.environment import commit
from raymoe.workload.clock import calls_of
from tests.perf.turns import in_turns

HIDDEN, EXPERTS, TOPK, FFN = 7168, 256, 8, 2048
ROUTER = RouterForm(EXPERTS, TOPK, "sigmoid", groups=8, topk_groups=4, scale=2.5)
FORM = LayerForm(FFN, ROUTER, shared=FFN, norm=1e-6)


def rows(world: raymoe.World, tokens: int) -> torch.Tensor:
    random = torch.Generator(device=world.device).manual_seed(world.rank)
    return torch.randn(tokens, HIDDEN, device=world.device, generator=random).to(torch.bfloat16)


@torch.no_grad()
def layers(world: raymoe.World, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of a layer's forward pass without the option and with it."""
    x = rows(world, tokens)
    spec = raymoe.ExchangeSpec(tokens=tokens, hidden=HIDDEN, experts=EXPERTS, topk=TOPK)
    layer, graphs = raymoe.MoELayer(world, spec, FORM), {}
    for name, deterministic in (("default", None), ("batch", "batch")):
        layer.deterministic = deterministic
        layer(x)
        layer.exchange.check()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            layer(x)
    return in_turns(world, {name: graph.replay for name, graph in graphs.items()}, layer.exchange.check, 0, rounds)


def dispatches(world: raymoe.World, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of dispatch and combine without a placement and with one."""
    x = rows(world, tokens)
    random = torch.Generator(device=world.device).manual_seed(world.rank)
    weights, ids = torch.rand(tokens, EXPERTS, device=world.device, generator=random).topk(TOPK)
    spec = raymoe.ExchangeSpec(tokens=tokens, hidden=HIDDEN, experts=EXPERTS, topk=TOPK)
    with ExitStack() as closing:
        exchanges = {
            "fixed": closing.enter_context(raymoe.Exchange(world, spec, backend="fused")),
            "table": closing.enter_context(
                raymoe.Exchange(world, replace(spec, slots=EXPERTS // world.size), backend="fused")
            ),
        }
        works: dict[str, Callable[[], None]] = {}
        for name, exchange in exchanges.items():
            add_works(works, name, exchange, (x, ids, weights))

        def check() -> None:
            for exchange in exchanges.values():
                exchange.check()

        return in_turns(world, works, check, calls_of(tokens), rounds)


def add_works(
    works: dict[str, Callable[[], None]], name: str, exchange: raymoe.Exchange, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Add a dispatch and a combine of this exchange."""
    dispatched = exchange.dispatch(*inputs)
    exchange.check()
    results = torch.zeros_like(dispatched.x)

    def dispatch() -> None:
        exchange.dispatch(*inputs)

    def combine() -> None:  # of the eager dispatch: that of a captured one may be in a graph that is never replayed
        exchange.combine(results, dispatched)

    works[f"{name} dispatch"], works[f"{name} combine"] = dispatch, combine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw lines")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    with raymoe.World.of(device="cuda") as world:
        for tokens in options.tokens:
            for what, timed in (("layer", layers), ("exchange", dispatches)):
                times = timed(world, tokens, options.rounds)
                if world.rank:
                    continue
                line = {"gpu": torch.cuda.get_device_name(), "ranks": world.size, "date": str(date.today())}
                line |= {"commit": commit(), "what": what, "tokens": tokens, "us": times}
                print(what, tokens, "  ".join(f"{name} {median(us):.1f}" for name, us in times.items()), flush=True)
                if options.out is not None:
                    with options.out.open("a") as out:
                        print(json.dumps(line), file=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
