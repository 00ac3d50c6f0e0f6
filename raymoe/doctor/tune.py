"""Which transport serves which size on this machine: the lines of a run of configs/tune.yaml, made into a table.

The command runs that config as it runs any other; what is here comes before the run and after it.
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
FEWEST_GPUS = 2

Line = Mapping[str, object]
Place = tuple[str, str, int]
"""Pattern, protocol and bytes."""


def gpus_to_tune() -> int:
    """How many GPUs this process sees; PlacementError where they are too few to have a peer."""
    with closing(Probes({"cuda": BOUNDS["cuda"]})) as probes:
        return enough(probes["cuda"])


def enough(cuda: ProbeOutcome) -> int:
    """The number of GPUs in what the probe of CUDA told.

    >>> enough(ProbeOutcome({"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]}))
    2
    """
    gpus: Sequence[Mapping[str, object]] | None = cuda.values.get("gpus")
    if gpus is not None and len(gpus) >= FEWEST_GPUS:
        return len(gpus)
    trouble = cuda.values.get("error") or cuda.trouble or "its probe told of no GPU"
    if gpus is not None:
        why = f"this process sees {count(len(gpus), 'GPU')}; use a machine with more, or unset CUDA_VISIBLE_DEVICES"
    elif "missing" in cuda.values:
        why = "there is no NVIDIA driver here; use a machine with GPUs"
    else:
        why = f"CUDA does not start: {trouble}; raymoe doctor tells more"
    raise PlacementError(f"asked to measure copies between {FEWEST_GPUS} GPUs or more, and {why}")


def times_of(lines: Iterable[Line], job: Job) -> dict[Place, dict[str, float]]:
    """Median microseconds of a message by each transport, over all pairs of ranks where they were measured one by one.

    A result line does not say its protocol; the case that it belongs to does.
    """
    protocols = _protocols(job)
    found: dict[Place, dict[str, list[float]]] = {}
    for line in lines:
        place = str(line["pattern"]), protocols[str(line["case"])], int(str(line["bytes"]))
        found.setdefault(place, {}).setdefault(str(line["transport"]), []).append(float(str(line["us_p50"])))
    return {place: {way: median(us) for way, us in ways.items()} for place, ways in found.items()}


def table_of(lines: Sequence[Line], job: Job) -> Table:
    """The table that all lines of the run speak for, put and get together."""
    from raymoe.transport.choice import Table, table_from_results  # loads torch

    wrong = [line for line in lines if line["verified"] is not True]
    if wrong or not lines:
        said = f"case {wrong[0]['case']} has a line that is not verified" if wrong else "the run gave no lines"
        raise WrongResult(f"raymoe doctor --tune writes no table: {said}")
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


def told(times: Mapping[Place, Mapping[str, float]], table: Table) -> str:
    """What was found, size by size, and what `auto` makes of it."""
    ways = list(dict.fromkeys(way for found in times.values() for way in found))
    rows = [["pattern", "protocol", "bytes", *(f"{way} us" for way in ways), "auto"]]
    for (pattern, protocol, nbytes), found in times.items():
        cells = [f"{found[way]:.1f}" if way in found else "-" for way in ways]
        rows.append([pattern, protocol, format_size(nbytes), *cells, table.pick(pattern, protocol, nbytes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(2, 3 + len(ways))
    text = [
        "  ".join(
            cell.rjust(widths[place]) if place in numbers else cell.ljust(widths[place])
            for place, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*text, "", *thresholds(table)]) + "\n"


def thresholds(table: Table) -> list[str]:
    """One line for each pattern and protocol.

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
