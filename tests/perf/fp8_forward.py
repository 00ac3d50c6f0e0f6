"""Time what a training step would gain if the products of its forward pass alone were of 8 bits, on one GPU.

    python -m tests.perf.fp8_forward --out fp8_forward.jsonl

The layer has the shape of DeepSeek-V3 with 128 experts: as many experts and rows as a rank of two. Gradients are in
bfloat16, and need x and the products of gate and up in 16 bits. Times are of captured work on a cold L2 cache, in
microseconds:

- `step`: the layer with all gradients, norm, router and shared expert included
- `products`: the two products of its forward pass
- `products_fp8`: the same of 8 bits, which keep nothing for gradients
- `products_fp8_kept`: the same with gate and up in 16 bits, by the kernels that exist: one product, SwiGLU, quantising
- `quantise_rows`: of the dispatched rows
- `quantise_weights`: of both products, by torch, 8 experts after 8 experts
- `convert_weights`: their values without scales, in one pass: the least that a kernel could take

`gain` is the time of a step now as a multiple of its time with `products_fp8`: `free` if quantising took no time,
`one_pass` with `quantise_rows` and `convert_weights`, `now` with `products_fp8_kept`, `quantise_rows` and
`quantise_weights`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import raymoe
from raymoe.fp8 import FP8, quantise_weight
from raymoe.moe import LayerForm, RouterForm, grouped_linear, grouped_swiglu, swiglu
from raymoe.moe.experts import local
from raymoe.report.environment import commit
from raymoe.rows.quantised_rows import quantise_rows
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock

ON_GPU = torch.cuda.is_available()
TOKENS, HIDDEN, EXPERTS, TOPK, FFN = (4096, 7168, 128, 8, 2048) if ON_GPU else (64, 256, 16, 2, 128)
AT_ONCE = 8
"""Experts whose weights are quantised together: torch needs several times their bytes in float32."""
WARMUP = 2

Work = Callable[[], object]


def layer_of(world: raymoe.World) -> raymoe.MoELayer:
    spec = raymoe.ExchangeSpec(tokens=TOKENS, hidden=HIDDEN, experts=EXPERTS, topk=TOPK, depth=0)
    router = RouterForm(EXPERTS, TOPK, "sigmoid", groups=8, topk_groups=4, scale=2.5)
    return raymoe.MoELayer(world, spec, LayerForm(FFN, router, shared=FFN, norm=1e-6, residual=True))


def step_of(layer: raymoe.MoELayer, x: torch.Tensor) -> Work:
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    dy = torch.randn_like(x)

    def step() -> object:
        y = layer(leaves[0])
        with torch.autograd.set_multithreading_enabled(False):  # all on this thread, which may be capturing
            return torch.autograd.grad(y, leaves, dy)

    return step


@torch.no_grad()
def parts_of(layer: raymoe.MoELayer, x: torch.Tensor) -> dict[str, Work]:
    """Return the products of a forward pass in 16 and in 8 bits, and what quantises their operands."""
    h, routing = layer.route(x)
    dispatched = layer.dispatch_rows(h, routing.topk_idx, routing.topk_weights)
    rows, places = dispatched.x.clone(), (dispatched.expert_offsets, dispatched.expert_counts)
    weights = [local(weight.detach()) for weight in (layer.experts.gate_up_proj, layer.experts.down_proj)]
    pairs = [tuple(map(torch.cat, zip(*quantised(weight), strict=True))) for weight in weights]
    up, down = weights
    rows_pair = quantise_rows(rows)

    def products() -> object:
        middle, gate_up = grouped_swiglu(rows, up, *places, return_gate_up=True)
        return grouped_linear(middle, down, *places), gate_up

    def products_fp8() -> object:
        return grouped_linear(grouped_swiglu(rows_pair, pairs[0], *places, output=FP8), pairs[1], *places)

    def products_fp8_kept() -> object:
        gate_up = grouped_linear(rows_pair, pairs[0], *places)
        middle = swiglu(gate_up)
        return grouped_linear(quantise_rows(middle), pairs[1], *places), middle

    return {
        "products": products,
        "products_fp8": products_fp8,
        "products_fp8_kept": products_fp8_kept,
        "quantise_rows": lambda: quantise_rows(rows),
        "convert_weights": lambda: [weight.to(torch.float8_e4m3fn) for weight in weights],
        "quantise_weights": lambda: [quantised(weight) for weight in weights],
    }


def quantised(weight: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return values and scales of some experts after the other."""
    return [quantise_weight(part) for part in weight.split(AT_ONCE)]


def times_on_gpu(world: raymoe.World, works: dict[str, Work], settle: Callable[[], None], rounds: int) -> Any:
    """Capture one work after the other, and return the times of its replays: a graph keeps its memory."""
    new_stream: Any = torch.cuda.Stream  # has no annotations
    stream, times = new_stream(world.device), {}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for name, work in works.items():
            with (
                closing(TorchGraphClock(world, stream, settle, captured=True)) as clock,
                torch.set_grad_enabled(name == "step"),
            ):
                work()  # loads and allocates before the capture
                settle()
                replay = clock.timed(lambda work=work: work())
                times[name] = [round(clock.us_cold(replay), 1) for _ in range(rounds + WARMUP)][WARMUP:]
            print(name, median(times[name]), flush=True)
    return times


def times_on_cpu(works: dict[str, Work]) -> dict[str, list[float]]:
    times = {}
    for name, work in works.items():
        with torch.set_grad_enabled(name == "step"):
            work()
            begun = time.perf_counter()
            work()
        times[name] = [round((time.perf_counter() - begun) * 1e6, 1)]
    return times


def gains(us: dict[str, float]) -> dict[str, float]:
    """Return the time of a step now as a multiple of its time with products of 8 bits.

    >>> us = {"step": 20.0, "products": 6.0, "products_fp8": 4.0, "products_fp8_kept": 5.0, "quantise_rows": 1.0}
    >>> gains({**us, "quantise_weights": 9.0, "convert_weights": 1.0})
    {'free': 1.1111, 'one_pass': 1.0, 'now': 0.6897}
    """
    rest = us["step"] - us["products"]
    times = {
        "free": rest + us["products_fp8"],
        "one_pass": rest + us["products_fp8"] + us["quantise_rows"] + us["convert_weights"],
        "now": rest + us["products_fp8_kept"] + us["quantise_rows"] + us["quantise_weights"],
    }
    return {name: round(us["step"] / time, 4) for name, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw line")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    with raymoe.World.open(0, 1, device="cuda" if ON_GPU else "cpu") as world:
        world.wire([world.descriptor()])
        layer, random = layer_of(world), torch.Generator(device=world.device).manual_seed(0)
        x = torch.randn(TOKENS, HIDDEN, device=world.device, generator=random).bfloat16()
        works = {"step": step_of(layer, x), **parts_of(layer, x)}
        settle = layer.exchange.check
        times = times_on_gpu(world, works, settle, chosen.rounds) if ON_GPU else times_on_cpu(works)
    gpu = torch.cuda.get_device_name() if ON_GPU else "none"
    line: dict[str, Any] = {"gpu": gpu, "date": str(date.today()), "commit": commit(), "torch": torch.__version__}
    line |= {"tokens": TOKENS, "hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, "ffn": FFN}
    gained = gains({name: median(every) for name, every in times.items()})
    print(json.dumps({**line, "gain": gained}), flush=True)
    if chosen.out is not None:
        with chosen.out.open("a") as out:
            print(json.dumps({**line, "us": times, "gain": gained}), file=out)


if __name__ == "__main__":
    main()
