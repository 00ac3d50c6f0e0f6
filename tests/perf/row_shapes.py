"""Time norms in blocks of other shapes than the code chooses: all in turns, on a cold L2 cache of one GPU.

    python -m tests.perf.row_shapes rms_norm_fp8 --rows 4096 16384 --sms 48 --shapes now fixed:3x5x9 counter:2x7x6

`now` is the shape that the code chooses. `fixed:GROUPSxWARPSxSTAGES` and `counter:...` are pipelines, whose blocks have
fixed rows or take them from a counter. `row:WARPSxTHREADS` is a block for each row, and the threads that an SM holds at
least. Results are compared with those of the first shape. A line has the share of the faster copy of as many bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch

from raymoe.device import pipe, pipe_backward, pipe_launch
from raymoe.device.pipe import LayerNorm, RmsNorm, layer_norm_call, rms_norm_call
from raymoe.device.pipe_backward import LayerNormBackward, RmsNormBackward, backward_calls
from raymoe.device.pipe_pieces import Pointwise, pointwise
from raymoe.device.pipe_shape import TILE_BYTES, Limits, PipeShape, RowWork, row_shape
from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.workload.clock import TimedOp
from raymoe.workload.pointwise.gpu import TorchGraphClock

BYTES = {"rms_norm": 4, "add_rms_norm": 8, "layer_norm": 4}
BYTES |= {"rms_norm_fp8": 3, "add_rms_norm_fp8": 7, "layer_norm_fp8": 3}
BYTES |= {"rms_norm_backward": 6, "add_rms_norm_backward": 8, "layer_norm_backward": 6}
"""Bytes that an element reads and writes, by operation; scales and vectors do not count."""
Launches = list[pipe_launch.KernelCall]


def shape_of(asked: str, work: RowWork, limits: Limits) -> PipeShape:
    """The shape that is asked for.

    >>> work = RowWork(4096, 7168, 16, registers=8)
    >>> made = shape_of("counter:2x7x6", work, Limits())
    >>> made.groups, made.warps, made.stages, made.stage_bytes, made.dynamic
    (2, 7, 6, 14336, True)
    >>> shape_of("row:7x896", work, Limits()).resident
    896
    """
    kind, _, numbers = asked.partition(":")
    if kind == "now":
        return row_shape(work, limits)
    given = [int(number) for number in numbers.split("x")]
    if kind == "row":
        warps, resident = given
        return PipeShape("ROW", 1, warps, 1, 0, blocks_of_sm=0, resident=resident)
    groups, warps, stages = given
    tile_rows = max(1, min(TILE_BYTES // work.row_bytes, work.rows))
    dynamic = {"fixed": False, "counter": True}[kind]
    if dynamic and work.gradients:
        raise ConfigError(f"{asked} for gradients, whose sums need fixed rows")
    return PipeShape("PIPED", groups, warps, stages, tile_rows * work.row_bytes, tile_rows, dynamic=dynamic)


@contextmanager
def shaped(asked: str) -> Iterator[None]:
    """Let calls that are made inside this context have the shape that is asked for."""
    choose = partial(shape_of, asked)
    with mock.patch.object(pipe, "row_shape", choose), mock.patch.object(pipe_backward, "row_shape", choose):
        yield


@dataclass
class Case:
    """The tensors of an operation, and its launches by the shapes that are asked for."""

    op: str
    rows: int
    hidden: int
    sms: int | None
    device: torch.device
    results: list[torch.Tensor] = field(default_factory=list)

    def new(self, rows: int | None = None) -> torch.Tensor:
        shape = (self.hidden,) if rows is None else (rows, self.hidden)
        return torch.randn(shape, device=self.device).bfloat16()

    def launches(self) -> Callable[[], Launches]:
        """A maker of launches; each has the shape of the time when it is made."""
        x, weight, layer = self.new(self.rows), self.new(), self.op.startswith("layer")
        more = self.new(self.rows) if self.op.startswith("add_") else None
        if self.op.endswith("backward"):
            dy, dx, d_weight, d_bias = self.new(self.rows), torch.empty_like(x), *torch.empty(2, self.hidden).to(weight)
            self.results = [dx, d_weight]
            asked: Any = LayerNormBackward(dy, x, weight, dx, d_weight, d_bias)
            if not layer:
                asked = RmsNormBackward(dy, x, weight, dx, d_weight, d_total=more)
            sms = self.sms or pipe_launch.gpu_sms(self.device)

            def backward() -> Launches:
                calls = backward_calls(asked, Limits(sms))
                return [calls.gradients, calls.sums]

            return backward
        quantised = self.op.endswith("fp8")
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn if quantised else None)
        scales = torch.empty(self.rows, -(-self.hidden // 128), device=self.device) if quantised else None
        self.results = [out]
        if layer:
            normed = LayerNorm(x, weight, weight, out, scales=scales)
            return lambda: [layer_norm_call(normed, Limits(self.sms))]
        plain = RmsNorm(
            x, weight, out, scales=scales, residual=more, residual_out=None if more is None else self.new(self.rows)
        )
        return lambda: [rms_norm_call(plain, Limits(self.sms))]


def copies_of(case: Case) -> dict[str, Callable[[], object]]:
    nbytes = BYTES[case.op] * case.rows * case.hidden
    source = torch.zeros(nbytes // 4 // 1024, 1024, dtype=torch.bfloat16, device=case.device)
    into = torch.empty_like(source)
    return {"copy": lambda: into.copy_(source), "own_copy": lambda: pointwise(Pointwise("v0", [source], into))}


def judge(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], name: str) -> None:
    for one, other in zip(got, want, strict=True):
        size = other.float().abs().amax()
        assert bool(((one.float() - other.float()).abs() <= 0.07 * size).all()), f"{name} has other results"


def times_of(case: Case, shapes: Sequence[str], clock: TorchGraphClock, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each shape and of the copies, by rounds."""
    make, works, want = case.launches(), copies_of(case), None
    for name in shapes:
        with shaped(name):
            made = make()

        def work(made: Launches = made) -> None:
            for call in made:
                pipe_launch.launch(call, case.sms, case.device)

        work()
        got = [each.clone() for each in case.results]
        want = want or got
        judge(got, want, name)
        works[name] = work
    timed: dict[str, TimedOp] = {}
    for name, each in works.items():
        each()
        clock.stream.synchronize()
        timed[name] = clock.timed(each)
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, op in timed.items():
            found[name].append(clock.us_cold(op))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.row_shapes")
    parser.add_argument("ops", nargs="+", choices=BYTES, metavar="OP")
    parser.add_argument("--rows", nargs="+", type=int, default=[4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--sms", nargs="+", type=int, default=[None])
    parser.add_argument("--shapes", nargs="+", default=["now"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with World.open(0, 1, device="cuda") as world, torch.no_grad():
        world.wire([world.descriptor()])
        new_stream: Any = torch.cuda.Stream  # has no annotations
        stream = new_stream(world.device)
        for sms in options.sms:
            for op in options.ops:
                for rows in options.rows:
                    case = Case(op, rows, options.hidden, sms, world.device)
                    clock = TorchGraphClock(world, stream, stream.synchronize, captured=True)
                    with closing(clock), torch.cuda.stream(stream):
                        found = times_of(case, options.shapes, clock, options.rounds)
                    copy = min(median(found["copy"]), median(found["own_copy"]))
                    print(f"{op}, {rows} rows of {options.hidden}, {sms or 'all'} SMs", flush=True)
                    for name, times in sorted(found.items(), key=lambda pair: median(pair[1])):
                        print(f"  {median(times):8.2f} us, least {min(times):8.2f}, {copy / median(times):.3f}  {name}")


if __name__ == "__main__":
    main()
