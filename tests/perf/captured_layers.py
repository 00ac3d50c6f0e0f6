"""Time a captured training step of several layers against the durations of the kernels in it.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.perf.captured_layers --out steps.jsonl

Layers in the shape of Qwen3-30B-A3B, forward and backward; with `--optimizer` also fused AdamW in a second graph. Times
are by the clock of workload layer: a replay on a cold L2 cache, after a barrier of all ranks, in microseconds.

torch's profiler then traces some replays on every rank. A rank's line has of the traced replay

- `sum`: the durations of all kernels, copies and fills, added. Kernels that run at the same time count twice, and so
  does the beginning of one that is launched early and waits for the one before it
- `union`: the time in which at least one of them ran
- `span`: from the first one's begin to the last one's end; `traced`: the same replay by the clock

Kernels of an exchange wait for other ranks, and that wait is in all of them. `times_sum` and `times_union` are the
untraced time as a multiple of `sum` and `union`, on the rank where it is larger; `traced_times_sum` is so of `traced`.

Without a GPU the layers are small, and only the eager step is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TEARDOWN_CUPTI", "0")  # between traces, which captured graphs may not outlive

import torch
import torch.distributed as dist

import raymoe
from raymoe.moe import LayerForm, RouterForm
from raymoe.moe.experts import local
from raymoe.report.environment import commit
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock
from tests.perf.host_steps import ON_GPU, everyones

SHAPE = (
    {"hidden": 2048, "experts": 128, "topk": 8, "ffn": 768}
    if ON_GPU
    else {"hidden": 64, "experts": 8, "topk": 2, "ffn": 32}
)
WARMUP = 2
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of a trace that are work of the GPU."""
NAME_LETTERS = 48

Work = Callable[[], None]


class LayersStep:
    """Forward and backward pass of a stack of layers, and the optimizer's step if there is one."""

    def __init__(self, world: raymoe.World, tokens: int, layers: int) -> None:
        dtype = "bfloat16" if ON_GPU else "float32"
        sizes = {"hidden": SHAPE["hidden"], "experts": SHAPE["experts"], "topk": SHAPE["topk"]}
        spec = raymoe.ExchangeSpec(tokens=tokens, dtype=dtype, depth=0, **sizes)
        form = LayerForm(SHAPE["ffn"], RouterForm(spec.experts, spec.topk), norm=1e-6, residual=True)
        self.model = torch.nn.Sequential(*[raymoe.MoELayer(world, spec, form) for _ in range(layers)])
        self.exchange: Any = self.model[0].exchange
        random = torch.Generator(device=world.device).manual_seed(world.rank)
        drawn = torch.randn(2, tokens, spec.hidden, device=world.device, generator=random)
        self.x, self._dy = drawn.to(getattr(torch, dtype)).unbind()
        self.x.requires_grad_()
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self) -> None:
        for leaf in (self.x, *self.model.parameters()):
            leaf.grad = None  # so a graph writes gradients into memory of its own
        y = self.model(self.x)
        with torch.autograd.set_multithreading_enabled(False):  # all on this thread, which may be capturing
            y.backward(self._dy)
        if self._optimizer is not None:
            self._optimizer.step()

    def add_optimizer(self) -> None:
        """Let later steps end with AdamW. Experts are DTensors, so they have a group of their own."""
        experts = list(raymoe.moe.expert_parameters(self.model).values())
        own = {id(each) for each in experts}
        others = [each for each in self.model.parameters() if id(each) not in own]
        groups = [{"params": experts}, {"params": others}]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=True, capturable=ON_GPU)

    def gradients(self) -> list[torch.Tensor]:
        return [local(leaf.grad) for leaf in (self.x, *self.model.parameters())]


# Traces.


@dataclass(frozen=True)
class Trace:
    """The work of one replay: the name, begin and end of each kernel, copy and fill, in microseconds."""

    work: list[tuple[str, float, float]]
    traced_us: float

    @property
    def sum_us(self) -> float:
        return sum(end - begin for _, begin, end in self.work)

    @property
    def union_us(self) -> float:
        """The time in which at least one ran.

        >>> Trace([("a", 0, 4), ("b", 3, 5), ("c", 4, 4.5), ("d", 7, 8)], 9).union_us
        6.0
        """
        total, reached = 0.0, -1.0
        for _, begin, end in sorted(self.work, key=lambda each: each[1]):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    @property
    def span_us(self) -> float:
        return max(end for *_, end in self.work) - min(begin for _, begin, _ in self.work)

    def by_name(self) -> dict[str, list[float]]:
        """Return how often each kernel ran and its time, the longest first."""
        found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for name, begin, end in self.work:
            found[name][0] += 1
            found[name][1] += end - begin
        ordered = sorted(found.items(), key=lambda item: -item[1][1])
        return {name: [int(count), round(us, 1)] for name, (count, us) in ordered}


def traced(sample: Callable[[], float]) -> Trace:
    """Trace a sample, which replays one graph.

    The graph's work has the number of the one call that launched it. Flushes and barriers have others.
    """
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profiled:
        us = sample()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        return graph_of(json.loads(path.read_text())["traceEvents"], us)


def graph_of(events: list[dict[str, Any]], us: float) -> Trace:
    """Return the work of the call that launched most; all work if no call launched half of it.

    >>> calls = {"flush": 1, "up": 2, "down": 2}
    >>> work = [{"cat": "kernel", "name": k, "ts": 0, "dur": 1, "args": {"correlation": calls[k]}} for k in calls]
    >>> graph_of([*work, {"ph": "M"}], 9.0).by_name()
    {'up': [1, 1.0], 'down': [1, 1.0]}
    """
    work = [event for event in events if event.get("cat") in DEVICE_WORK]
    launches = Counter(event["args"]["correlation"] for event in work)
    if not launches:
        return Trace([], us)
    (call, count), *_ = launches.most_common(1)
    own = [event for event in work if event["args"]["correlation"] == call or 2 * count < len(work)]
    spans = ((event["name"][:NAME_LETTERS], float(event["ts"]), float(event["dur"])) for event in own)
    return Trace([(name, begin, begin + lasts) for name, begin, lasts in spans], us)


# Times.


def eager_us(step: LayersStep) -> float:
    """Return the time of an eager step, which all ranks begin together, the host's work included."""
    dist.barrier()
    begun = time.perf_counter()
    step()
    step.exchange.check()  # on GPUs it waits for the device
    return (time.perf_counter() - begun) * 1e6


def slowest(values: list[float]) -> list[float]:
    """Return the slowest rank's value of each sample."""
    return [round(max(every), 1) for every in zip(*everyones(values), strict=True)]


def captured_times(step: LayersStep, world: raymoe.World, chosen: argparse.Namespace, compare: bool) -> dict[str, Any]:
    """Capture the step; return its times and what ran in it. With `compare`, also if gradients have the eager bits."""
    new_stream: Any = torch.cuda.Stream  # has no annotations
    stream = new_stream(world.device)
    stream.wait_stream(torch.cuda.current_stream())
    with (
        torch.cuda.stream(stream),
        closing(TorchGraphClock(world, stream, step.exchange.check, captured=True)) as clock,
    ):
        for _ in range(WARMUP):  # loads kernels and makes the optimizer's state
            step()
        step.exchange.check()
        wanted = [gradient.clone() for gradient in step.gradients()] if compare else []
        replay = clock.timed(step)
        own = [clock.us_cold(replay) for _ in range(chosen.rounds + WARMUP)][WARMUP:]
        found: dict[str, Any] = {"us": slowest(own)}
        if compare:
            pairs = zip(step.gradients(), wanted, strict=True)
            found["same_bits"] = all(everyones(all(torch.equal(one, other) for one, other in pairs)))
            wanted.clear()
        if world.rank == 0:
            print(f"captured: {median(found['us'])} us; now traced", flush=True)  # should the profiler fail
        traces = [traced(lambda: clock.us_cold(replay)) for _ in range(chosen.traces + 1)][1:]
        return found | against_kernels(median(own), traces)


def against_kernels(us: float, traces: list[Trace]) -> dict[str, Any]:
    """Compare this rank's time with its traces, and gather all ranks' results."""
    if not all(everyones(bool(traces) and all(trace.work for trace in traces))):
        return {"kernels": "the profiler saw none"}
    middle = sorted(traces, key=lambda trace: trace.sum_us)[len(traces) // 2]
    mine = {"us": us, "kernels": len(middle.work), "sum": middle.sum_us, "union": middle.union_us}
    mine |= {"span": middle.span_us, "traced": middle.traced_us}
    ranks = everyones({name: round(value, 1) for name, value in mine.items()})
    return {
        "ranks_us": ranks,
        "times_sum": round(max(one["us"] / one["sum"] for one in ranks), 4),
        "times_union": round(max(one["us"] / one["union"] for one in ranks), 4),
        "traced_times_sum": round(max(one["traced"] / one["sum"] for one in ranks), 4),
        "by_name": middle.by_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw lines")
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 16, help="tokens of a rank")
    parser.add_argument("--layers", type=int, default=8 if ON_GPU else 2)
    parser.add_argument("--rounds", type=int, default=21 if ON_GPU else 3)
    parser.add_argument("--traces", type=int, default=3)
    parser.add_argument("--optimizer", action="store_true", help="time a second graph, which ends with AdamW")
    chosen = parser.parse_args()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    with raymoe.World.of(device="cuda" if ON_GPU else "cpu", timeout_s=120) as world:
        step = LayersStep(world, chosen.tokens, chosen.layers)
        for optimizer in ("none", "fused AdamW")[: 1 + chosen.optimizer]:
            if optimizer != "none":
                step.add_optimizer()
            times: dict[str, Any] = {"eager_us": slowest([eager_us(step) for _ in range(5)])[WARMUP:]}
            if ON_GPU:
                times |= captured_times(step, world, chosen, compare=optimizer == "none")
            if world.rank == 0:
                say(line_of(world, chosen, optimizer) | times, chosen.out)
    dist.destroy_process_group()


def line_of(world: raymoe.World, chosen: argparse.Namespace, optimizer: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if ON_GPU else "none"
    line = {"gpu": gpu, "ranks": world.size, "date": str(date.today()), "commit": commit(), "torch": torch.__version__}
    return line | {"layers": chosen.layers, "tokens": chosen.tokens, **SHAPE, "optimizer": optimizer}


def say(line: dict[str, Any], out: Path | None) -> None:
    """Print the medians, and append the whole line to the file."""
    text = {name: median(value) if name in ("us", "eager_us") else value for name, value in line.items()}
    print(json.dumps({name: value for name, value in text.items() if name != "by_name"}), flush=True)
    if out is not None:
        with out.open("a") as file:
            print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
