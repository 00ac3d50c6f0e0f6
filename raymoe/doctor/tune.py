"""Find the faster transport for each size on this machine: make a table of the lines of a run of configs/tune.yaml.

`raymoe doctor --tune` runs that config like any other. These functions do the work before and after the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import TYPE_CHECKING

from raymoe.config import Job
from raymoe.config.sections import format_size
from raymoe.doctor.finding import ProbeOutcome, count
from raymoe.doctor.probes import BOUNDS, Probes
from raymoe.errors import PlacementError, WrongResult

if TYPE_CHECKING:
    from raymoe.transport.choice import Table

CONFIG = "tune"
MIN_GPUS = 2

Line = Mapping[str, object]
Copy = tuple[str, str, int]
"""Pattern, protocol and bytes."""


def gpus_to_tune() -> int:
    """Return how many GPUs this process sees; raise PlacementError if there are fewer than two."""
    with closing(Probes({"cuda": BOUNDS["cuda"]})) as probes:
        return count_gpus(probes["cuda"])


def count_gpus(cuda: ProbeOutcome) -> int:
    """Return the number of GPUs in the outcome of the CUDA probe; raise PlacementError if there are fewer than two.

    >>> count_gpus(ProbeOutcome({"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]}))
    2
    """
    gpus: Sequence[Mapping[str, object]] | None = cuda.values.get("gpus")
    if gpus is not None and len(gpus) >= MIN_GPUS:
        return len(gpus)
    trouble = cuda.values.get("error") or cuda.trouble or "its probe reported no GPU"
    if gpus is not None:
        why = f"this process sees {count(len(gpus), 'GPU')}; use a machine with more, or unset CUDA_VISIBLE_DEVICES"
    elif "missing" in cuda.values:
        why = "there is no NVIDIA driver here; use a machine with GPUs"
    else:
        why = f"CUDA does not start: {trouble}; run `raymoe doctor` for more"
    raise PlacementError(f"asked to measure copies between {MIN_GPUS} GPUs or more, and {why}")


def times_of(lines: Iterable[Line], job: Job) -> dict[Copy, dict[str, float]]:
    """Return the microseconds of each copy by each transport; pairs measured one by one give their median.

    The protocol comes from the case of a line, since a result line has none.
    """
    protocols = _protocols(job)
    measured: dict[Copy, dict[str, list[float]]] = {}
    for line in lines:
        copy = str(line["pattern"]), protocols[str(line["case"])], int(str(line["bytes"]))
        measured.setdefault(copy, {}).setdefault(str(line["transport"]), []).append(float(str(line["us_p50"])))
    return {copy: {name: median(us) for name, us in times.items()} for copy, times in measured.items()}


def table_of(lines: Sequence[Line], job: Job) -> Table:
    """Make the table of transports from all lines of the run, for put and get together."""
    from raymoe.transport.choice import Table, table_from_results  # loads torch

    unverified = [line for line in lines if line["verified"] is not True]
    if unverified or not lines:
        case = unverified[0]["case"] if unverified else None
        reason = f"case {case} has a line that is not verified" if unverified else "the run gave no lines"
        raise WrongResult(f"raymoe doctor --tune writes no table: {reason}")
    protocols = _protocols(job)
    gpu = str(lines[0]["device"])
    rules = [
        rule
        for protocol in dict.fromkeys(protocols.values())
        for rule in table_from_results(
            [line for line in lines if protocols[str(line["case"])] == protocol], protocol, gpu
        ).rules
    ]
    return Table(gpu, tuple(rules))


def report(times: Mapping[Copy, Mapping[str, float]], table: Table) -> str:
    """Format the times of each size, and the transport that `auto` chooses for it."""
    transports = list(dict.fromkeys(name for by_transport in times.values() for name in by_transport))
    rows = [["pattern", "protocol", "bytes", *(f"{name} us" for name in transports), "auto"]]
    for (pattern, protocol, nbytes), by_transport in times.items():
        cells = [f"{by_transport[name]:.1f}" if name in by_transport else "-" for name in transports]
        rows.append([pattern, protocol, format_size(nbytes), *cells, table.pick(pattern, protocol, nbytes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(2, 3 + len(transports))  # columns aligned to the right
    text = [
        "  ".join(
            cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*text, "", *thresholds(table)]) + "\n"


def thresholds(table: Table) -> list[str]:
    """Return a line for each pattern and protocol: from which size `auto` takes which transport.

    >>> from raymoe.transport.choice import BUILT_IN
    >>> thresholds(BUILT_IN)[0].startswith("pairs put: tma")
    True
    """
    lines = []
    for pattern, protocol in dict.fromkeys((rule.pattern, rule.protocol) for rule in table.rules):
        rules = sorted(
            (rule for rule in table.rules if (rule.pattern, rule.protocol) == (pattern, protocol)),
            key=lambda rule: rule.from_bytes,
        )
        more = [f"{rule.transport} from {format_size(rule.from_bytes)}" for rule in rules[1:]]
        lines.append(f"{pattern} {protocol}: {', '.join([rules[0].transport, *more])}")
    return lines


def _protocols(job: Job) -> dict[str, str]:
    return {case.name: case.job.p2p.protocol for case in job.cases()}
