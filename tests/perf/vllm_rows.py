"""Time the rows of the vLLM adapter beside the all-gather and reduce-scatter that vLLM takes by default, without vLLM.

    torchrun --nproc-per-node 2 -m tests.perf.vllm_rows --out vllm_rows.jsonl

Tokens of a rank in the shape of DeepSeek-V3, bfloat16, every rank with as many. `bring` sends them to their experts,
as the adapter's `prepare` does, and `both` also combines results that are there, as its `finalize` does. Rows are not
exact, so all is captured. Rows for the experts of raymoe, `own`, need no numbers. The all-gather brings every token
with ids and weights to every rank, by three calls of NCCL; the reduce-scatter adds the ranks' sums. No experts run.
Times are by the clock of workload exchange: graphs, a cold L2 cache, the slowest rank, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import raymoe
from raymoe.integrations.vllm_rows import ExpertRowsOfLayer, Options
from raymoe.report.environment import commit
from raymoe.workload.clock import calls_of
from tests.perf.turns import in_turns

HIDDEN, EXPERTS, TOPK = 7168, 256, 8
WAYS = {"expert": Options(), "token": Options(layout="token"), "own": Options(experts="raymoe")}


def add_rows(
    works: dict[str, Callable[[], None]],
    way: str,
    rows: ExpertRowsOfLayer,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    """Add what the adapter does before the experts, and before and after them."""
    weighted, tokens = rows.spec.layout == "expert", len(inputs[0])
    send = rows.send if way == "own" else rows.bring
    results = torch.zeros_like(send(*inputs, tokens).x)
    rows.combine(results, weighted, out)

    def bring() -> None:
        send(*inputs, tokens)

    def both() -> None:
        bring()
        rows.combine(results, weighted, out)

    works[f"{way}, bring"], works[f"{way}, both"] = bring, both


def add_gathered(
    works: dict[str, Callable[[], None]],
    group: dist.ProcessGroup,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    """Add what vLLM does without the adapter."""
    ranks = dist.get_world_size(group)
    everyones = [torch.empty(ranks * len(part), part.shape[1], dtype=part.dtype, device=part.device) for part in inputs]
    sums = torch.zeros_like(everyones[0])

    def gather() -> None:
        for part, all_parts in zip(inputs, everyones, strict=True):
            dist.all_gather_into_tensor(all_parts, part, group)

    def both() -> None:
        gather()
        dist.reduce_scatter_tensor(out, sums, group=group)

    works["all-gather, bring"], works["all-gather, both"] = gather, both


@torch.inference_mode()
def timed(world: raymoe.World, group: dist.ProcessGroup, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of each way, in turns."""
    source = torch.Generator(device=world.device).manual_seed(world.rank)
    x = torch.randn(tokens, HIDDEN, device=world.device, generator=source).to(torch.bfloat16)
    weights, ids = torch.rand(tokens, EXPERTS, device=world.device, generator=source).topk(TOPK)
    inputs, out = (x, ids.to(torch.int32), weights), torch.empty_like(x)
    works: dict[str, Callable[[], None]] = {}
    made = []
    for way, options in WAYS.items():
        alignment = 16 if way == "own" else 1
        spec = raymoe.ExchangeSpec(tokens, HIDDEN, EXPERTS, TOPK, layout=options.layout, alignment=alignment, depth=0)
        first_id = EXPERTS // world.size * world.rank
        made.append(ExpertRowsOfLayer(world, spec, options, exact=False, first_id=first_id))
        add_rows(works, way, made[-1], inputs, out)
    add_gathered(works, group, inputs, out)

    def check() -> None:
        for rows in made:
            rows.largest.check()

    return in_turns(world, works, check, calls_of(tokens), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw lines")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    group = dist.new_group(backend="nccl")
    for tokens in options.tokens:  # each with a world of its own, which closes its exchanges
        with raymoe.World.of(device="cuda") as world:
            times = timed(world, group, tokens, options.rounds)
        if dist.get_rank():
            continue
        line = {"gpu": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "date": str(date.today())}
        line |= {"commit": commit(), "torch": torch.__version__, "tokens": tokens, "us": times}
        print(tokens, "  ".join(f"{name} {median(us):.1f}" for name, us in times.items()), flush=True)
        if options.out is not None:
            with options.out.open("a") as out:
                print(json.dumps(line), file=out)
    os._exit(0)  # destructors of other libraries may wait for one another


if __name__ == "__main__":
    main()
