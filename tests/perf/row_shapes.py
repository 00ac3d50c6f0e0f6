"""Time norms in blocks of other shapes than the code chooses: all in turns, by the clock of workload pointwise.

    python -m tests.perf.row_shapes rms_norm_fp8 --rows 4096 16384 --sms 48 --shapes now fixed:3x5x9 counter:2x7x6

`now` is the shape that the code chooses. `fixed:GROUPSxWARPSxSTAGES` and `counter:...` are pipelines, whose blocks have
fixed rows or take them from a counter. `row:WARPSxTHREADS` is a block for each row, and the threads that an SM holds at
least. Each result is verified once. A line has the share of the faster copy of as many bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from statistics import median
from unittest import mock

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory.world import World
from raymoe.rows import norm_kernels
from raymoe.rows.pipe_shape import TILE_BYTES, Limits, PipeShape, RowWork, row_shape
from raymoe.workload.pointwise.gpu_clock import GpuClock
from raymoe.workload.pointwise.operations import OPERATIONS, RowSizes, drawn
from raymoe.workload.pointwise.row_systems import COPIES, OURS, Task
from raymoe.workload.pointwise.run_pointwise import RowClock, RowStep

NORMS = [op for op in OPERATIONS if "norm" in op]


def shape_of(wanted: str, work: RowWork, limits: Limits) -> PipeShape:
    """Read a shape from the command line.

    >>> work = RowWork(4096, 7168, 16, registers=8)
    >>> shape = shape_of("counter:2x7x6", work, Limits())
    >>> shape.groups, shape.warps, shape.stages, shape.stage_bytes, shape.dynamic
    (2, 7, 6, 14336, True)
    >>> shape_of("row:7x896", work, Limits()).resident
    896
    """
    kind, _, numbers = wanted.partition(":")
    if kind == "now":
        return row_shape(work, limits)
    sizes = [int(number) for number in numbers.split("x")]
    if kind == "row":
        warps, resident = sizes
        return PipeShape("ROW", 1, warps, 1, 0, blocks_of_sm=0, resident=resident)
    groups, warps, stages = sizes
    tile_rows = max(1, min(TILE_BYTES // work.row_bytes, work.rows))
    dynamic = {"fixed": False, "counter": True}[kind]
    if dynamic and work.gradients:
        raise ConfigError(f"{wanted} for gradients, whose sums need fixed rows")
    return PipeShape("PIPED", groups, warps, stages, tile_rows * work.row_bytes, tile_rows, dynamic=dynamic)


@contextmanager
def shaped(wanted: str) -> Iterator[None]:
    """Let norms inside this context have the wanted shape."""
    with mock.patch.object(norm_kernels, "row_shape", partial(shape_of, wanted)):
        yield


def times_of(world: World, clock: RowClock, task: Task, shapes: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each shape and of the copies, by rounds.

    >>> from raymoe.workload.pointwise.run_pointwise import CpuClock
    >>> sizes = RowSizes(tokens=8, width=64, dtype="bfloat16")
    >>> with World.open(0, 1, device="cpu") as world:
    ...     world.wire([world.descriptor()])
    ...     task = Task("rms_norm", drawn("rms_norm", sizes, 0, world.device), sizes)
    ...     list(times_of(world, CpuClock(world), task, ["now"], rounds=2))
    ['copy', 'now']
    """
    steps = {}
    for name in (*(each for each in COPIES if clock.captured or each == "copy"), *shapes):
        with shaped(name if name in shapes else "now"):
            steps[name] = RowStep(world, name if name in COPIES else OURS, task, clock)
        error = steps[name](0, verify=True).error
        bound = OPERATIONS[task.op].bound(getattr(torch, task.sizes.dtype))
        if error is None or not error <= bound:
            raise RaymoeError(f"{task.op} is wrong in the shape {name}: error {error}, bound {bound}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name, step in steps.items():
            times[name] += step(index, verify=False).us
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.row_shapes")
    parser.add_argument("ops", nargs="+", choices=NORMS, metavar="OP")
    parser.add_argument("--rows", nargs="+", type=int, default=[4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--sms", nargs="+", type=int, default=[None])
    parser.add_argument("--shapes", nargs="+", default=["now"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with World.open(0, 1, device="cuda") as world:
        world.wire([world.descriptor()])
        for sms, op, rows in ((sms, op, rows) for sms in options.sms for op in options.ops for rows in options.rows):
            sizes = RowSizes(rows, options.hidden, "bfloat16")
            task = Task(op, drawn(op, sizes, 0, world.device), sizes, sms)
            with closing(GpuClock(world, rows, "auto")) as clock:
                times = times_of(world, clock, task, options.shapes, options.rounds)
            copy = min(median(times[name]) for name in COPIES)
            print(f"{op}, {rows} rows of {options.hidden}, {sms or 'all'} SMs", flush=True)
            for name, us in sorted(times.items(), key=lambda pair: median(pair[1])):
                print(f"  {median(us):8.2f} us, least {min(us):8.2f}, {copy / median(us):.3f}  {name}")


if __name__ == "__main__":
    try:
        main()
    except RaymoeError as error:
        sys.exit(str(error))
