"""Run directories for tests of the report: a good one, and the command that reads it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raymoe import cli
from raymoe.report.directory import RunDirectory
from raymoe.report.results import Generation, Line, Summary
from tests.unit.report.lines import (
    complete_line,
    copy_case,
    exchange_case,
    gpu_exchange,
    rows_case,
    slow_case,
    traced_exchange,
)

CONFIG = {
    "name": "quick",
    "workload": "exchange",
    "world": {"ranks": 4, "device": "auto"},
    "shape": {"tokens": 512, "hidden": 1024, "experts": 32, "topk": 4, "dtype": "bfloat16"},
    "matrix": {"exchange.backend": ["host", "collective"]},
}
ENVIRONMENT = {
    "raymoe": "0.1.0",
    "commit": "0123456789ab",
    "packages": {"ray": "2.60.0", "torch": None},
    "host": "node-1",
    "cpu": {"model": "Some CPU", "cores": 2},
    "memory": {"total_bytes": 2**34, "limit_bytes": None},
    "ranks": [
        {"rank": 0, "pid": 17, "node": "abc", "gpu": None},
        {"rank": 1, "pid": 18, "node": "abc", "gpu": "GPU-1"},
    ],
}


def overlap_case() -> list[Line]:
    both = "dispatch+product"
    times = {("dispatch", None): 500.0, ("product", None): 450.0, ("dispatch", "product"): 550.0}
    times |= {("product", "dispatch"): 520.0, (both, None): 700.0}
    shared = {**gpu_exchange("fused", 8.0, (4096,))[0], "workload": "overlap", "case": "sms=48", "gbps_wire": None}
    return [line_of(shared | {"op": op, "beside": beside, "us_p50": us}) for (op, beside), us in times.items()]


def line_of(line: Line) -> Line:
    return complete_line({key: value for key, value in line.items() if key not in ("run", "generation", "commit")})


EVERY_KIND: list[Line] = [
    *exchange_case("host", 500.0),
    *exchange_case("collective", 1000.0),
    *copy_case(),
    *gpu_exchange("fused", 10.0, (128, 1024, 2048, 4096, 8192)),
    *gpu_exchange("row_push", 8.0),
    *traced_exchange((64,)),
    *(
        line | {"case": f"{line['case']},sms={sms}"}
        for sms in (8, 16, 32)
        for line in gpu_exchange("fused", 9.0, (16,))
    ),
    *slow_case(),
    *overlap_case(),
    *(line for tokens in (128, 4096) for line in rows_case(tokens=tokens)),
    *(line for sms in (48, 132) for stages in (2, 4) for line in rows_case(sms=sms, stages=stages)),
    complete_line(
        {"case": "layer", "workload": "layer", "op": "step", "tokens": 512, "us_p50": 5.0, "verified": False}
    ),
]


def make(path: Path, lines: Sequence[Line] = EVERY_KIND, exit_code: int = 0, message: str = "done") -> Path:
    """Make the run directory of a run that has ended."""
    with RunDirectory.create(path, "quick") as run:
        run.write_config(CONFIG)
        run.write_environment(ENVIRONMENT)
        for case in dict.fromkeys(line["case"] for line in lines):
            run.add_case([line for line in lines if line["case"] == case])
        generations = [Generation(3.5, "rank 1 died", 1), Generation(3.25, message, number=1, began="restart")]
        run.write_summary(Summary.of(exit_code, message, sorted(run.finished()), run.finished(), generations))
    return path


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: list[str]


def report(*arguments: object) -> Ended:
    """Run `raymoe report` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["report", *map(str, arguments)])
    return Ended(code, out.getvalue(), err.getvalue().splitlines())
