"""The program that compute-sanitizer runs: exchanges of two ranks that share a GPU, and kernels of one rank.

    compute-sanitizer --tool synccheck python -m tests.gpu.sanitized cases
    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized cases --exact
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitized cases --alone
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitized cases --baseline
    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized inject memcheck

The exit code is 1 if a result is wrong. The tool reports its findings itself; test_sanitizer.py reads the report.
`inject`: the same rank processes run a bug that the tool must find, or its silence about the cases means nothing.

`--exact`: each tensor is an allocation of its own, and memcheck knows its end. torch's cache hands out parts of large
allocations, and memcheck does not see accesses beyond a part. Captured work cannot allocate, so it uses the cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from raymoe.rows.pipe_shape import Loading
from raymoe.transport.copy_kernel import Ring
from tests.gpu import sanitized_ranks as on_rank
from tests.gpu import test_exchange_gpu as exchange
from tests.gpu.ranks import GPUS, GpuRanks
from tests.gpu.test_exchange_gpu import WITH_WORKSPACE
from tests.unit.exchange.exchange_cases import Case
from tests.unit.moe.gradient_cases import judge_gradients, run_gradients

SIZE = 2
WAIT_S, ANSWER_S, GRACE_S = 100.0, 240.0, 20.0
"""Seconds that a rank waits for a peer, the test for a rank, and for its end. Kernels run 10 to 100 times slower."""
NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"

OFFSETS = [(0, 0), (5, 5), (15, 15), (3, 14), (8, 0), (0, 1), (12, 4)]
COPIES = [
    *((nbytes, Ring(4, 256)) for nbytes in (1, 16, 31, 63, 64, 257, 1000, 5003)),
    (20_003, Ring(12, 1024)),
    (20_000, Ring(1, 512)),
    (100_000, Ring(2, 16384)),
]
STREAMED = ((7000, 72), (350, 1032))
"""Rows and the elements of each: several rows of a tile, and several warps of a row. Each stage is used again."""
ON_ALL_SMS = (1032, 4096, 7168)
"""Elements of a row: warps that share a row, and a block for each row with and without a rest."""


class PatientRanks(GpuRanks):
    """Ranks with longer waits, which end by themselves, so that the tool can report everything."""

    def __init__(self) -> None:
        super().__init__(SIZE, grace_s=GRACE_S)

    def outcomes(self, size: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        return super().outcomes(size, function, *args, **{"timeout_s": WAIT_S, **options})


@dataclass(frozen=True)
class Step:
    """A case to run; `run` raises an error if a result is wrong."""

    name: str
    run: Callable[[GpuRanks], None]
    captured: bool = False


def steps() -> list[Step]:
    """Return all cases with the kinds mixed, so that a run that is cut short has run some of each."""
    exchanges = [exchanged(), on_few_sms(), quantised(), in_halves(), refused(), gradients()]
    return mixed([copied(), streamed(), alone(), *exchanges])


def mixed(kinds: Iterable[list[Step]]) -> list[Step]:
    """Mix the kinds: spread the steps of each evenly over the whole.

    >>> a, b = ([Step(f"{kind}{index}", print) for index in range(count)] for kind, count in (("a", 4), ("b", 2)))
    >>> [step.name for step in mixed([a, b])]
    ['a0', 'b0', 'a1', 'a2', 'b1', 'a3']
    """
    placed = [((index + 0.5) / len(kind), step) for kind in kinds for index, step in enumerate(kind)]
    return [step for _, step in sorted(placed, key=lambda pair: pair[0])]


def copied() -> list[Step]:
    def run(nbytes: int, ring: Ring, ranks: GpuRanks) -> None:
        (wrong,) = ranks.run(1, on_rank.copies, nbytes, ring, OFFSETS)
        assert not wrong, f"wrong bytes or signals, offsets modulo 16 of both ends: {wrong}"

    return [
        Step(f"copy {nbytes} bytes, {ring.stages} x {ring.stage_bytes}", partial(run, nbytes, ring))
        for nbytes, ring in COPIES
    ]


def streamed(loadings: Sequence[Loading] = ("PIPED", "IN_TURN", "PLAIN"), *, arrives: bool = False) -> list[Step]:
    """Return the kernels of raymoe/rows, in short and long rows, with and without a pipeline.

    `arrives`: with kernels whose threads each arrive for themselves, for racecheck.
    """
    return [
        Step(
            f"stream: rows of {hidden}, {loading}",
            _on_one_rank(on_rank.streams, rows, hidden, loading, arrives=arrives),
        )
        for rows, hidden in STREAMED
        for loading in loadings
    ]


def alone(*, arrives: bool = False) -> list[Step]:
    """Return rows on the whole GPU, and the other kernels of a layer."""
    found = [
        Step(
            f"stream: rows of {hidden}, on all SMs",
            _on_one_rank(on_rank.streams_on_all_sms, hidden, arrives=arrives),
        )
        for hidden in ON_ALL_SMS
    ]
    layer = Step("layer: router and few rows", _on_one_rank(on_rank.layer_kernels))
    products = [
        Step(f"layer: {name}", _on_one_rank(function, arrives=arrives and eight_bits))
        for name, function, eight_bits in (
            ("products", on_rank.products, False),
            ("products of 8 bits", on_rank.quantised_products, True),
            ("gradients of products", on_rank.product_gradients, False),
        )
    ]
    return [*found, layer, *products]


def _on_one_rank(
    function: Callable[..., None], *arguments: object, arrives: bool = False
) -> Callable[[GpuRanks], None]:
    def run(ranks: GpuRanks) -> None:
        if arrives:
            ranks.run(1, on_rank.each_thread_arrives, function, *arguments)
        else:
            ranks.run(1, function, *arguments)

    return run


def exchanged() -> list[Step]:
    """Return limits of the contract and drawn cases, backends in turns."""
    kinds = [[*exchange.edges(each, SIZE), *exchange.drawn(each, SIZE, seed=1, count=5)] for each in WITH_WORKSPACE]
    return [
        Step(name_of(case), partial(exchange.judge_all, cases=[case]))
        for together in zip(*kinds, strict=True)
        for case in together
    ]


def on_few_sms() -> list[Step]:
    found = []
    for sms in exchange.FEW_SMS:
        for case in exchange.on_few_sms("fused", SIZE, sms):
            found.append(Step(f"{name_of(case)}, on {sms} SMs", partial(exchange.judge_all, cases=[case])))
        quantised = partial(exchange.test_rows_cross_as_fp8_on_few_sms, sms=sms)
        found.append(Step(f"fused: rows as fp8 on {sms} SMs", quantised))
    return found


def quantised() -> list[Step]:
    found = []
    for spec in exchange.QUANTISED:
        for backend in exchange.QUANTISING:
            name = name_of(Case(SIZE, spec, backend, ()))
            found.append(Step(name, partial(exchange.test_rows_cross_as_fp8, backend=backend, spec=spec)))
    return found


def in_halves() -> list[Step]:
    return [
        Step(
            f"{backend}: in halves{', captured' if captured else ''}",
            partial(exchange.test_operations_run_in_halves, backend=backend, captured=captured),
            captured,
        )
        for captured in (False, True)
        for backend in WITH_WORKSPACE
    ]


def refused() -> list[Step]:
    judge = exchange.test_all_ranks_refuse_bad_data_and_the_next_step_works
    return [
        Step(f"{backend}: refused {fault[0]} {fault[1]}", partial(judge, backend=backend, fault=fault, says=says))
        for fault, says in exchange.FAULTS
        for backend in WITH_WORKSPACE
    ]


def gradients() -> list[Step]:
    """Return forward and backward of each backend, in rows of each dtype and in rows as short as they may be."""
    found = []
    for backend in WITH_WORKSPACE:
        for dtype, hidden, bound in (("float32", 64, 2e-6), ("bfloat16", 64, 2e-2), ("float16", 8, 2e-2)):
            spec = replace(exchange.SMALL, hidden=hidden, dtype=dtype, padding="zero")
            case = Case(SIZE, spec, backend, ("masked", "repeated"), seed=3, weighted=False, prefix=True)
            found.append(Step(f"{backend}: gradients of {dtype}, {hidden} wide", partial(_gradients, case, bound)))
    return found


def _gradients(case: Case, bound: float, ranks: GpuRanks) -> None:
    judge_gradients(case, ranks.run(SIZE, run_gradients, case), bound)


def name_of(case: Case) -> str:
    spec = case.spec
    wire = f" as {spec.wire} {spec.output}" if spec.wire else ""
    return (
        f"{case.backend}: {spec.tokens} x {spec.hidden} {spec.dtype}{wire}, top-{spec.topk} of {spec.experts}, by "
        f"{spec.layout}"
    )


def run_cases(exact: bool, seconds: float, wanted: list[Step]) -> int:
    end, done = time.monotonic() + seconds, 0
    parts = [(False, wanted)]
    if exact:
        parts = [(own, [step for step in wanted if step.captured is not own]) for own in (False, True)]
    for own, part in parts:
        with own_allocations(own), PatientRanks() as ranks:
            for step in part:
                start = time.monotonic()
                if start > end:
                    break
                try:
                    step.run(ranks)
                except BaseException:  # noqa: BLE001 - pytest's own errors are not Exceptions; all mean a wrong result
                    print(f"WRONG {step.name}\n{traceback.format_exc()}", flush=True)
                    return 1
                done += 1
                print(f"{time.monotonic() - start:6.1f} s  {step.name}", flush=True)
    print(f"right: {done} of {len(wanted)}", flush=True)
    return 0


@contextmanager
def own_allocations(wanted: bool) -> Iterator[None]:
    """Let torch allocate each tensor by itself in ranks that are started inside this context."""
    with mock.patch.dict(os.environ, {NO_CACHE: "1"} if wanted else {}):
        if not wanted:
            os.environ.pop(NO_CACHE, None)
        yield


def run_injected(tool: str) -> int:
    case = Case(SIZE, exchange.SMALL, "fused", ("uniform",))
    with PatientRanks() as ranks:
        outcomes = ranks.outcomes(SIZE, on_rank.run_injected, tool, case)
    for rank, outcome in enumerate(outcomes):
        print(f"rank {rank}: {on_rank.MISTAKES[tool]}: {outcome}", flush=True)
    return 0  # the tool says if it found the bug; its exit code replaces only a 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized")
    commands = parser.add_subparsers(dest="what", required=True)
    cases = commands.add_parser("cases")
    cases.add_argument("--exact", action="store_true", help="make each tensor an allocation of its own")
    cases.add_argument(
        "--alone",
        action="store_true",
        help="run only kernels of one rank: copies, rows whose threads each arrive for themselves, routers",
    )
    cases.add_argument("--baseline", action="store_true", help="run only rows that are loaded by IN_TURN, the baseline")
    cases.add_argument("--few-sms", action="store_true", help="run only exchanges on few SMs")
    cases.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this many seconds")
    commands.add_parser("inject").add_argument("tool", choices=sorted(on_rank.MISTAKES))
    options = parser.parse_args()
    if GPUS != 1:
        print(f"the ranks share one GPU, and {GPUS} are visible: set CUDA_VISIBLE_DEVICES to one GPU")
        return 2
    with mock.patch("tests.gpu.ranks.DEADLINE_S", ANSWER_S):
        if options.what == "inject":
            return run_injected(options.tool)
        wanted = steps()
        if options.alone:
            wanted = mixed([copied(), streamed(("PIPED", "PLAIN"), arrives=True), alone(arrives=True)])
        elif options.baseline:
            wanted = streamed(("IN_TURN",))
        elif options.few_sms:
            wanted = on_few_sms()
        return run_cases(options.exact, options.seconds, wanted)


if __name__ == "__main__":
    sys.exit(main())
