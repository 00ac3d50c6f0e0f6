"""Time combine beside the down product, and dispatch beside the up product, where neither needs the other's results.

    torchrun --nproc-per-node 2 -m tests.perf.combine_beside_product --out lines.jsonl

The exchange is that of other tokens. So no block waits for rows of the product, and the time of both is a lower bound
of what pieces of the product, sent as they are made, can reach. But the last piece of columns cannot be sent before the
product's end. So `parts` has a combine of all columns but the last ones beside the product, and one of these after it,
on all SMs. `pieces` does depend: the product is several, each of some columns, and a combine of these waits for it by
an event. `told` is what a layer does: one product stores its columns in pieces and tells the combine, which is launched
early and waits on the device (kernels/peer/combine.cu). Systems take turns in an order drawn for each round, on a cold
L2 cache, after a barrier of all ranks. Times are medians of rounds, of the slower rank in each.

A line has, for each number of SMs of the exchange: the exchange alone; the product on the other SMs alone; both, and
when each is done; and both with a product that takes no SM of the exchange even after its end (`kept_off`). The last
lines have the times at which each block of both begins and ends, on one clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from raymoe.errors import RaymoeError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.trace import BLOCKS_A_SM, NAMES, TRACE_POINTS
from raymoe.exchange.peer.workspace import Workspace
from raymoe.fp8 import FP8
from raymoe.memory.world import World
from raymoe.report.environment import commit
from raymoe.workload.clock import OpClock
from tests.perf.beside_tensors import LAST_COLUMNS, PIECES, LayerTensors, Shape

SMS = (8, 16, 24, 32, 48)
PAIRS = {"combine": "down", "dispatch": "up"}
BARS = {("combine", "bfloat16"): 90.0, ("combine", FP8): 80.0}
"""The gain in us that is wanted of DeepSeek-V3's shape; of dispatch, this share of its time."""
DISPATCH_BAR = 0.3
SPUN_CYCLES = 500_000
"""Cycles that one thread counts after each sample: their time gives the clock of the SMs."""
LATER_CYCLES = 2_000
"""Cycles by which the product begins later, so that the exchange finds its SMs free."""
WARM_UPS = 2
DRIVER = Path("/sys/module/nvidia/version")
SHAPES = {"deepseek_v3": Shape(4096, 7168, 2048, 256, 8), "narrow": Shape(4096, 4096, 2048, 256, 6)}
DTYPES = ("bfloat16", FP8)


class Timer:
    """Runs systems on two streams and times them: the exchange's, of high priority, and the product's."""

    def __init__(self, tensors: LayerTensors, clock: OpClock, streams: tuple[Any, Any], gpu_sms: int) -> None:
        self.tensors, self.clock, self.gpu_sms = tensors, clock, gpu_sms
        self.main, self.beside = streams
        new_event: Any = torch.cuda.Event  # has no annotations
        self._forked, self._exchanged, self._multiplied, self._done, self._spun = (
            new_event(enable_timing=True) for _ in range(5)
        )

    def one(self, work: Callable[[], object]) -> dict[str, float]:
        """Time work of one stream."""

        def run() -> None:
            work()
            self._spin()

        self.clock.cold_us(run)
        return {"us": self.clock.since_begin(self._done), "mhz": self._mhz()}

    def both(self, op: str, limit: int, blocks: int, last: int = 0) -> dict[str, float]:
        """Time the exchange, which is enqueued first, beside the product. With `last`, so many columns come later."""

        def run() -> None:
            self.enqueue_both(op, limit, blocks, last=last)
            self._spin()

        self.clock.cold_us(run)
        since = self.clock.since_begin
        ends = {"exchange": since(self._exchanged), "product": since(self._multiplied)}
        return {"us": since(self._done), "mhz": self._mhz()} | ends

    def enqueue_both(self, op: str, limit: int, blocks: int, trace: torch.Tensor | None = None, last: int = 0) -> None:
        self._forked.record(self.main)
        if last:
            self.tensors.parts[last][0].run(limit)
        else:
            self.tensors.run(op, limit)
        self._exchanged.record(self.main)
        with torch.cuda.stream(self.beside):
            self.beside.wait_event(self._forked)
            torch.cuda._sleep(LATER_CYCLES)
            self.tensors.products[PAIRS[op]].launch(blocks, trace)
            self._multiplied.record(self.beside)
        self.main.wait_event(self._multiplied)
        if last:
            self.tensors.parts[last][1].run("auto")

    def enqueue_in_turn(self, op: str, trace: torch.Tensor | None = None) -> None:
        """Enqueue a layer's order: dispatch before up, combine after down."""
        product = self.tensors.products[PAIRS[op]]
        if op == "dispatch":
            self.tensors.run(op, "auto")
            product.launch(self.gpu_sms, trace)
        else:
            product.launch(self.gpu_sms, trace)
            self.tensors.run(op, "auto")

    def told(self, limit: int) -> dict[str, float]:
        """Time the down product and the combine beside it, which sends each piece of columns when it is stored."""

        def run() -> None:
            self.tensors.enqueue_told(limit)
            self._spin()
            self.tensors.forget_told(limit)

        self.clock.cold_us(run)
        return {"us": self.clock.since_begin(self._done), "mhz": self._mhz()}

    def in_pieces(self, limit: int, count: int) -> dict[str, float]:
        """Time the down product and its combine in pieces, where each combine waits for its product."""

        def run() -> None:
            self.enqueue_pieces(limit, count)
            self._spin()

        self.clock.cold_us(run)
        return {"us": self.clock.since_begin(self._done), "mhz": self._mhz()}

    def enqueue_pieces(self, limit: int, count: int) -> None:
        pieces = self.tensors.pieces[count]
        self._forked.record(self.main)
        made = []
        with torch.cuda.stream(self.beside):
            self.beside.wait_event(self._forked)
            for product in pieces.products:
                # Nothing runs beside the first product. Later ones leave the combine its SMs.
                product.launch(self.gpu_sms - limit if made else self.gpu_sms)
                event: Any = torch.cuda.Event()
                event.record(self.beside)
                made.append(event)
        for piece, event in enumerate(made):
            self.main.wait_event(event)
            pieces.combine(piece, limit if piece + 1 < count else "auto")

    def _spin(self) -> None:
        self._done.record(self.main)
        torch.cuda._sleep(SPUN_CYCLES)
        self._spun.record(self.main)

    def _mhz(self) -> float:
        return SPUN_CYCLES / (self.clock.since_begin(self._spun) - self.clock.since_begin(self._done))


System = Callable[[], dict[str, float]]


def systems(timer: Timer, op: str, sms: Sequence[int]) -> dict[str, System]:
    """Return what is timed, by name."""
    tensors, most = timer.tensors, timer.gpu_sms
    product = tensors.products[PAIRS[op]]
    named: dict[str, System] = {
        "exchange": lambda: timer.one(lambda: tensors.run(op, "auto")),
        "product": lambda: timer.one(lambda: product.launch(most)),
        "in_turn": lambda: timer.one(lambda: timer.enqueue_in_turn(op)),
    }
    for limit in sms:
        named |= {
            f"exchange {limit}": lambda limit=limit: timer.one(lambda: tensors.run(op, limit)),
            f"product {limit}": lambda limit=limit: timer.one(lambda: product.launch(most - limit)),
            f"beside {limit}": lambda limit=limit: timer.both(op, limit, most),
            f"kept_off {limit}": lambda limit=limit: timer.both(op, limit, most - limit),
        }
        if op == "combine":
            named[f"told {limit}"] = lambda limit=limit: timer.told(limit)
            named |= {
                f"parts {limit} {last}": lambda limit=limit, last=last: timer.both(op, limit, most, last)
                for last in LAST_COLUMNS
            }
            named |= {
                f"pieces {limit} {count}": lambda limit=limit, count=count: timer.in_pieces(limit, count)
                for count in PIECES
            }
    return named


def measured(world: World, named: dict[str, System], rounds: int) -> dict[str, dict[str, float]]:
    """Return medians over rounds. A time is that of the slowest rank, the clock that of this one."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in named}
    for index in range(WARM_UPS + rounds):
        order = list(named)
        random.Random(index).shuffle(order)
        for name in order:
            sample = named[name]()
            if index >= WARM_UPS:
                samples[name].append(sample)
    ranks: list[Any] = world.swap(samples, "combine beside product: samples")
    medians = {}
    for name, own in samples.items():
        keys = [key for key in own[0] if key != "mhz"]
        medians[name] = {
            key: median(max(of_rank[name][index][key] for of_rank in ranks) for index in range(rounds)) for key in keys
        }
        medians[name]["mhz"] = median(sample["mhz"] for sample in own)
    return medians


def is_right(world: World, timer: Timer, op: str, sms: Sequence[int]) -> bool:
    """Whether both operations beside each other give the bytes that they give in turn, on all ranks."""
    tensors, names = timer.tensors, (op, PAIRS[op])
    wrong: list[str] = []

    def results(enqueue: Callable[[], None]) -> list[torch.Tensor]:
        for name in names:
            tensors.result_of(name).zero_()
        enqueue()
        tensors.exchanges["auto"].check()
        return [tensors.result_of(name) for name in names]

    want = [part.clone() for part in results(lambda: timer.enqueue_in_turn(op))]
    for limit in sms:
        found = results(lambda limit=limit: timer.enqueue_both(op, limit, timer.gpu_sms))
        if not all(map(torch.equal, found, want)) or not all(bool(part.any()) for part in found):
            wrong.append(f"beside {limit}")
        for last, parts in tensors.parts.items() if op == "combine" else ():
            timer.enqueue_both(op, limit, timer.gpu_sms, last=last)
            tensors.exchanges["auto"].check()
            y = torch.cat([part.y for part in parts], dim=1)
            if not torch.allclose(y.float(), tensors.summed.float(), rtol=2e-2, atol=6e-2):
                wrong.append(f"parts {limit} {last}")
        for count, pieces in tensors.pieces.items() if op == "combine" else ():
            tensors.exchanges["auto"].combine(tensors.products["down"].y, tensors.got["auto"], out=tensors.summed)
            timer.enqueue_pieces(limit, count)
            tensors.exchanges["auto"].check()
            y = torch.cat(pieces.sums, dim=1)
            if not torch.allclose(y.float(), tensors.summed.float(), rtol=2e-2, atol=6e-2):
                wrong.append(f"pieces {limit} {count}")
        if op == "combine" and not _told_is_right(tensors, limit):
            wrong.append(f"told {limit}")
    if wrong:
        print(f"rank {world.rank}: wrong results of {', '.join(wrong)}", file=sys.stderr, flush=True)
    return not any(world.swap(bool(wrong), f"combine beside product: {op} verified"))


def _told_is_right(tensors: LayerTensors, limit: int) -> bool:
    """Whether pieces that are sent as they are stored give the bits of a combine after the product. Run twice.

    Other sums are in `summed` afterwards.
    """
    down, right = tensors.products["down"], True
    tensors.exchanges["auto"].combine(down.y, tensors.got["auto"], out=tensors.summed)
    want = tensors.summed.clone()
    for _ in range(2):
        down.y.zero_()
        tensors.summed.zero_()
        tensors.enqueue_told(limit)
        tensors.exchanges["auto"].check()
        right = right and torch.equal(tensors.summed, want)
        tensors.forget_told(limit)
    return right


def line_of(times: dict[str, dict[str, float]], op: str, sms: Sequence[int]) -> dict[str, Any]:
    """Return the measured part of a result line.

    >>> times = {name: {"us": us, "mhz": 1500.0} for name, us in
    ...          (("exchange", 200.0), ("product", 1000.0), ("in_turn", 1190.0), ("exchange 8", 900.0),
    ...           ("product 8", 1064.0))}
    >>> both = {"us": 1110.0, "exchange": 950.0, "product": 1110.0, "mhz": 1400.0}
    >>> line = line_of(times | {"beside 8": both, "kept_off 8": both | {"us": 1130.0}}, "combine", [8])
    >>> line["gain_in_parts_us"]
    >>> line["sum_us"], line["best_sms"], line["gain_us"], line["beside"]["8"]["kept_off_us"]
    (1190.0, 8, 80.0, 1130.0)
    """

    def us(name: str, key: str = "us") -> float:
        return round(times[name][key], 1)

    beside = {
        str(limit): {
            "exchange_us": us(f"exchange {limit}"),
            "product_us": us(f"product {limit}"),
            "both_us": us(f"beside {limit}"),
            "exchange_ends_us": us(f"beside {limit}", "exchange"),
            "product_ends_us": us(f"beside {limit}", "product"),
            "kept_off_us": us(f"kept_off {limit}"),
            "mhz": round(times[f"beside {limit}"]["mhz"]),
        }
        for limit in sms
    }
    told = {limit: us(f"told {limit}") for limit in sms if f"told {limit}" in times}
    for limit, taken in told.items():
        beside[str(limit)]["told_us"] = taken
    parts, pieces = ({name: us(name) for name in times if name.startswith(kind)} for kind in ("parts", "pieces"))
    for name, taken in (parts | pieces).items():
        kind, limit, size = name.split()
        beside[limit][f"{kind}_{size}_us"] = taken
    best = min(sms, key=lambda limit: beside[str(limit)]["both_us"])
    gain = round(us("in_turn") - beside[str(best)]["both_us"], 1)
    return {
        "op": f"{op}+{PAIRS[op]}",
        "exchange_us": us("exchange"),
        "product_us": us("product"),
        "sum_us": us("in_turn"),
        "mhz": {name: round(times[name]["mhz"]) for name in ("exchange", "product", "in_turn")},
        "beside": beside,
        "best_sms": best,
        "gain_us": gain,
        "gain_in_parts_us": round(us("in_turn") - min(parts.values()), 1) if parts else None,
        "gain_told_us": round(us("in_turn") - min(told.values()), 1) if told else None,
        "gain_in_pieces_us": round(us("in_turn") - min(pieces.values()), 1) if pieces else None,
    }


def bar_of(op: str, shape: str, dtype: str, exchange_us: float) -> float | None:
    """Return the gain that is wanted; None where none was named.

    >>> bar_of("combine", "deepseek_v3", "bfloat16", 200.0), bar_of("dispatch", "deepseek_v3", "float8_e4m3", 180.0)
    (90.0, 54.0)
    """
    if shape != "deepseek_v3":
        return None
    return BARS.get((op, dtype)) or round(DISPATCH_BAR * exchange_us, 1)


def traced_line(timer: Timer, op: str, limit: int) -> dict[str, Any]:
    """Return when each block of both began and ended, in us after the first: in turn, beside each other, and told."""
    tensors, world = timer.tensors, timer.tensors.world
    spec, begin, end = tensors.spec, NAMES.index("start"), NAMES.index("end")
    line: dict[str, Any] = {"op": f"trace of {op}+{PAIRS[op]}", "sms": limit}
    most = BLOCKS_A_SM * timer.gpu_sms
    with ExitStack() as stack:
        space = stack.enter_context(Workspace(world, spec, traced=True))
        exchanges = {
            each: stack.enter_context(Exchange(world, spec, "fused", workspace=space, sms=each))
            for each in ("auto", limit)
        }
        plain = tensors.exchanges, tensors.got
        tensors.exchanges = {**tensors.exchanges, **exchanges}
        tensors.got = tensors.got | {each: tensors.dispatch(each, tensors.out) for each in exchanges}
        for name, enqueue in (
            ("in_turn", lambda times: timer.enqueue_in_turn(op, times)),
            ("beside", lambda times: timer.enqueue_both(op, limit, timer.gpu_sms, times)),
            ("told", lambda times: tensors.enqueue_told(limit, times)),
        ):
            for _ in range(WARM_UPS + 1):  # the last one counts
                of_product = torch.zeros(most, TRACE_POINTS, dtype=torch.int64, device=world.device)
                tensors.exchanges["auto"].check()
                space._traces[op].zero_()
                timer.clock.cold_us(lambda enqueue=enqueue, of_product=of_product: enqueue(of_product))
                tensors.forget_told(limit)
            of_exchange = space._traces[op]
            blocks = {"exchange": of_exchange.tolist(), "product": of_product.tolist()}
            began = min(row[begin] for rows in blocks.values() for row in rows if row[begin])
            exchanges["auto"].check()
            line[name] = {
                part: [[round((row[at] - began) / 1e3, 1) for at in (begin, end)] for row in rows if row[begin]]
                for part, rows in blocks.items()
            }
        tensors.exchanges, tensors.got = plain
    return line


@contextmanager
def timing(world: World, shape: str, dtype: str, sms: Sequence[int]) -> Iterator[Timer]:
    """Make the tensors of a case and a clock. Everything is enqueued on a stream of high priority."""
    new_stream: Any = torch.cuda.Stream  # has no annotations
    streams = new_stream(world.device, priority=-1), new_stream(world.device, priority=0)
    with ExitStack() as stack, torch.cuda.stream(streams[0]):
        tensors = LayerTensors(world, SHAPES[shape], dtype, sms, stack)
        settle = tensors.exchanges["auto"].check
        clock = stack.enter_context(closing(OpClock(world, streams[0], settle, captured=False)))
        yield Timer(tensors, clock, streams, world.gpu.sms)


def lines_of(world: World, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Give the lines of all cases, then of the traces, until the time is over on a rank."""
    began, best = time.monotonic(), {}
    cases = [(shape, dtype) for dtype in options.dtypes for shape in options.shapes]
    traced = [case for case in cases if options.trace and case[0] == cases[0][0]]
    for number, (shape, dtype) in enumerate([*cases, *traced]):
        keys = {"shape": shape, "dtype": dtype, **vars(SHAPES[shape]), "ranks": world.size, "rounds": options.rounds}
        spent: list[Any] = world.swap(time.monotonic() - began, f"combine beside product: case {number}")
        if max(spent) > options.seconds:
            yield keys | {"op": "left out", "seconds": round(max(spent), 1)}
        elif number < len(cases):
            with timing(world, shape, dtype, options.sms) as timer:
                for op in PAIRS:
                    verified = is_right(world, timer, op, options.sms)
                    line = line_of(measured(world, systems(timer, op, options.sms), options.rounds), op, options.sms)
                    best[op, shape, dtype] = line["best_sms"]
                    yield keys | line | {"bar_us": bar_of(op, shape, dtype, line["exchange_us"]), "verified": verified}
        else:
            with timing(world, shape, dtype, []) as timer:
                yield keys | traced_line(timer, "combine", best["combine", shape, dtype])


def facts() -> dict[str, Any]:
    """Return what each line says of its machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = DRIVER.read_text().strip() if DRIVER.exists() else None
    return {"gpu": gpu, "driver": driver, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.combine_beside_product")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--sms", nargs="+", type=int, default=list(SMS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=70, help="no case begins after so many")
    parser.add_argument("--no-trace", dest="trace", action="store_false")
    parser.add_argument("--out", type=Path, help="a file that takes the lines too")
    parser.add_argument("--commit", default=commit(), help="of the code, where the sources are no repository")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    try:
        with World.of() as world, torch.no_grad():
            for line in lines_of(world, options):
                if world.rank == 0:
                    text = json.dumps(line | {"commit": options.commit} | facts())
                    print(text, flush=True)
                    if options.out is not None:
                        with options.out.open("a") as file:
                            file.write(text + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RaymoeError as error:
        sys.exit(str(error))
