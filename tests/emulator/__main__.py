"""Leaves out every barrier, fence and wait of the kernels, one at a time, and prints which of them no case needs.

    python -m tests.emulator [part of a file's name] ...

Takes about twenty minutes for all files. A statement that survives is not needed for the results, or shows a gap in the
machine or in the cases.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

import torch

from raymoe.errors import RaymoeError
from tests.emulator.build import KERNELS, Change
from tests.emulator.cases import FP8, SPREADS, Run, delivered
from tests.emulator.machine import EmulatorError
from tests.emulator.ranks import long_pieces, narrow, small
from tests.unit.exchange.nccl.emulated_rounds import drawn

SEEDS = 8
_STATEMENT = re.compile(
    r"(?:ptx::(?:fence_\w+|bulk_wait\w*<[^>]*>)\(\)|ptx::barrier_of_warps\([^)]*\)|__sync(?:threads|warp)\(\)|(?:block|sender)_barrier\(\));"
)
_OF_A_COPY = {"copy.cu", "transfers.cuh", "unaligned.cuh"}
_OF_ROUNDS = {
    *(
        "publish_routing.cu",
        "count_entries.cu",
        "number_entries.cu",
        "spread_rows.cu",
        "sum_entries.cu",
        "sum_ranks.cu",
    ),
    *("rounds.cuh", "runs.cuh", "traffic.cuh", "numbering.cuh"),
}
"""Files of the backends over NCCL, whose kernels wait for no peer."""
_OF_A_PIPE = {"pipe.cuh", "rows.cuh", "sums.cuh", "sum_partials.cu"}
"""Files of kernels on one GPU: tests/unit/rows/test_pipe_injected_bugs.py leaves out their statements."""
_OF_PRODUCTS = {"product.cu", "product.cuh", "loading.cuh", "results.cuh"}
"""tests/unit/moe/test_product_injected_bugs.py leaves out the statements of these."""


def left_out() -> Iterator[Change]:
    """Yield a change for every statement that orders something."""
    for path in sorted(KERNELS.rglob("*.cu*")):
        if path.name in ("ptx.cuh", "ptx_matrix.cuh", "row_push.cu") or path.name in _OF_A_PIPE | _OF_PRODUCTS:
            continue
        text = re.sub(r"//.*", "", path.read_text())
        for statement in dict.fromkeys(_STATEMENT.findall(text)):
            for which in range(text.count(statement)):
                yield Change(path.name, statement, ";", which)


def attempts(change: Change | None, seed: int) -> list[Callable[[], object]]:
    """Return the runs that may find the change; without a change, all runs."""
    changes, most = () if change is None else (change,), 10_000_000
    many = {"tokens": 40}
    steps = ("uniform", "skewed", "masked", "uniform")
    made: list[Callable[[], object]] = []
    kinds = ("fused", "few") if change is None or change.file == "block_barriers.cuh" else ("fused",)
    if change is None or change.file in _OF_ROUNDS:
        made += [lambda each=each: drawn(each, changes) for each in range(seed * 3, seed * 3 + 3)]
    if change is None or change.file not in _OF_A_COPY | _OF_ROUNDS:
        for kind, shape, form, spec in (
            *((kind, narrow, form, many) for kind in kinds for form in ("pairs", "whole")),
            *((kind, long_pieces, "pairs", {"tokens": 12, "hidden": 3000}) for kind in kinds),
            ("staged", small, "pairs", {}),
            ("copied", small, "pairs", {}),
            ("ll", small, "pairs", {}),
            ("fused", small, "pairs", {"wire": FP8, "tokens": 30, "hidden": 136}),
            ("ll", small, "pairs", {"wire": FP8, "tokens": 30, "hidden": 136}),
            ("fused", small, "pairs", {"wire": FP8, "output": "raw", "tokens": 30, "hidden": 272}),
        ):
            run = Run(kind, 3, shape, form, spec, seed % 2 == 0, steps, True, changes, most)
            made.append(lambda run=run: run.judged(seed))
    if change is None or change.file in _OF_A_COPY | {"ring.cuh", "sync.cuh"}:
        spread = SPREADS["own blocks" if seed % 2 else "in turn"]
        made += [
            lambda protocol=protocol: delivered(spread, seed, protocol, False, changes) for protocol in ("put", "get")
        ]
    return made


def error_without(change: Change | None) -> str | None:
    """Return the error that found the change, or None. Without a change: the error of a run that should be correct."""
    for seed in range(SEEDS):
        for attempt in attempts(change, seed):
            try:
                attempt()
            except (EmulatorError, AssertionError, RaymoeError) as error:
                return f"seed {seed}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def main() -> None:
    torch.set_num_threads(1)  # its tensors are small, and idle threads spin
    if wrong := error_without(None):
        sys.exit(f"a run without any change failed: {wrong}")
    # Fences and waits first.
    for change in sorted(left_out(), key=lambda each: "__sync" in each.old or "_barrier" in each.old):
        if not sys.argv[1:] or any(part in change.file for part in sys.argv[1:]):
            error = error_without(change)
            where = f"{change.file} {change.old} number {change.which}"
            print(f"{'found   ' if error else 'SURVIVES'} {where}{': ' + error[:120] if error else ''}", flush=True)


if __name__ == "__main__":
    main()
