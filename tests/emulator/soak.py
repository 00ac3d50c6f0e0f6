"""Runs exchanges and messages of all kinds, drawn at random, for a given time.

    python -m tests.emulator.soak SECONDS [SEED]

A failure is named by its seed. To repeat it: `python -m tests.emulator.soak 0 SEED`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from raymoe.errors import RaymoeError
from tests.emulator.cases import FP8, ROUTINGS, SPREADS, Run, delivered
from tests.emulator.machine import EmulatorError
from tests.emulator.ranks import narrow, small


def drawn_shape(seed: int) -> Callable[[Any, Any], Any]:
    """Return a change of grids: fewer of everything, the same on all ranks."""

    def shape(moving: Any, summing: Any) -> Any:
        rng = random.Random(seed)
        placement_blocks = rng.randint(1, 4)
        stages = rng.randint(1, moving.sender_stages)
        moving = replace(
            moving,
            senders=placement_blocks if moving.mixed else rng.randint(1, 3),
            placement_blocks=placement_blocks,
            counting_blocks=rng.randint(1, placement_blocks),
            sender_warps=rng.randint(1, min(moving.sender_warps, stages)),
            sender_stages=stages,
            placement_warps=rng.randint(1, moving.placement_warps),
            placement_stages=rng.randint(1, moving.placement_stages),
        )
        warps = rng.randint(1, summing.local_warps)
        return moving, replace(
            summing,
            local_blocks=rng.randint(1, 3),
            final_blocks=rng.randint(1, 3),
            local_warps=warps,
            pieces=rng.choice([1, summing.pieces]),
        )

    return shape


def drawn_run(rng: random.Random) -> Run:
    kind, ranks = rng.choice(["fused", "few", "staged", "ll", "few ll"]), rng.choice([1, 2, 2, 3, 3, 4, 5, 8])
    experts = ranks * rng.choice([1, 2, 4, 8])
    spec: dict[str, Any] = {
        "tokens": rng.choice([1, 2, 5, 20, 50]),
        "hidden": rng.choice([8, 16, 64, 72, 136, 400, 1000, 3000]),
        "experts": experts,
        "topk": min(experts, rng.choice([1, 2, 3, 6, 16])),
        "dtype": rng.choice(["bfloat16", "float16", "float32"]),
        "alignment": rng.choice([1, 8, 16, 128]),
        "padding": rng.choice(["any", "zero"]),
    }
    if rng.random() < 0.3:
        raw = {"output": "raw", "hidden": rng.choice([16, 144, 272])}
        spec |= {"wire": FP8, **(raw if rng.random() < 0.5 else {})}
    if "ll" not in kind and ("wire" not in spec or "output" in spec) and rng.random() < 0.2:
        spec["layout"] = "rank"
    # With layout rank, rows stay only until the next dispatch.
    form = rng.choice(["whole", "halves", "known"] + ([] if "layout" in spec else ["pairs", "known pairs"]))
    shape = rng.choice([drawn_shape(rng.randrange(10**9)), small, narrow, None])
    routings = tuple(rng.choice(ROUTINGS) for _ in range(4))
    return Run(kind, ranks, shape, form, spec, rng.random() < 0.5, routings, rng.random() < 0.7)


def fault_of(seed: int) -> str | None:
    """Run the case that this seed draws; return its error, or None."""
    rng = random.Random(seed)
    what: object
    try:
        if rng.random() < 0.15:
            name, protocol, both_ways = rng.choice(list(SPREADS)), rng.choice(["put", "get"]), rng.random() < 0.5
            what = (name, protocol, both_ways)
            delivered(SPREADS[name], seed, protocol, both_ways)
        else:
            what = run = drawn_run(rng)
            run.judged(seed)
    except (EmulatorError, AssertionError, RaymoeError) as error:
        return f"{type(error).__name__} {error}\n  of {what}"
    return None


def main() -> int:
    seconds, seeds = float(sys.argv[1]), random.Random(time.time_ns())
    torch.set_num_threads(1)  # tensors are small, and idle threads spin: a run took three times as long
    begin, runs, faults = time.monotonic(), 0, 0
    while runs == 0 or time.monotonic() - begin < seconds:
        seed = int(sys.argv[2]) if seconds == 0 else seeds.randrange(10**9)
        fault = fault_of(seed)
        runs, faults = runs + 1, faults + (fault is not None)
        if fault is not None:
            print(f"seed {seed}: {fault}", flush=True)
    print(f"{runs} runs, {faults} of them wrong, in {time.monotonic() - begin:.0f} s")
    return faults != 0


if __name__ == "__main__":
    sys.exit(main())
