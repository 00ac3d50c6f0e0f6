"""Reads the numbers of result lines, says how they were measured, and lists the speeds of GPU links."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raymoe.report.results import Line

# GB/s in one direction over all links of a GPU, by the GPU's name in the driver.
LINKS = (
    (r"NVIDIA (H200|H100 80GB HBM3|H20)", 450.0, "NVLink 4 ×18"),
    (r"NVIDIA A100-SXM.*", 300.0, "NVLink 3 ×12"),
    (r"NVIDIA G?B[23]00.*", 900.0, "NVLink 5 ×18"),
)
# The highest GB/s measured in one direction over a GPU's links while all GPUs sent: pushes by the copy engine,
# 4x H200, 2026-11-21. No exchange on this machine can be faster.
MEASURED_LINKS = ((r"NVIDIA H200", 381.0),)


def link_of(device: object) -> tuple[float, str] | None:
    """Give the nominal GB/s in one direction of a GPU's links, and their name; None if unknown.

    >>> link_of("NVIDIA H200"), link_of("NVIDIA H100 PCIe"), link_of("cpu")
    ((450.0, 'NVLink 4 ×18'), None, None)
    """
    return next(((gbps, name) for pattern, gbps, name in LINKS if re.fullmatch(pattern, str(device))), None)


def measured_link_gbps(device: object) -> float | None:
    """Give the highest GB/s measured on the links of such a GPU; None if nobody measured them.

    >>> measured_link_gbps("NVIDIA H200"), measured_link_gbps("NVIDIA H100 80GB HBM3")
    (381.0, None)
    """
    return next((most for pattern, most in MEASURED_LINKS if re.fullmatch(pattern, str(device))), None)


def gbps(line: Line) -> float:
    recorded = line["gbps_wire"]
    return float(str(recorded)) if recorded is not None else integer(line, "bytes") / us(line) / 1e3


def us(line: Line) -> float:
    return float(str(line["us_p50"]))


def rank_medians(line: Line) -> list[float]:
    """Give the median of each rank; empty if the line does not have them."""
    times = line["us_by_rank"]
    return [float(median) for median, _ in times] if isinstance(times, list) else []


def integer(line: Line, key: str) -> int:
    return int(str(line[key]))


def how_measured(lines: Sequence[Line]) -> str:
    """Say how the lines were measured, for a figure's title.

    >>> how_measured([{"samples": 50, "runs": 1, "graph": True}])
    'p50 of 50 samples of the slowest rank, CUDA graph'
    >>> how_measured([{"samples": 50, "runs": 20, "graph": True}])
    'p50 of 50 samples of the slowest rank, each the mean of 20 runs, CUDA graph'
    """
    samples = sorted({integer(line, "samples") for line in lines if line["samples"] is not None})
    many = f"{samples[0]}–{samples[-1]}" if len(samples) > 1 else "".join(map(str, samples)) or "the"
    graphs = {bool(line["graph"]) for line in lines}
    how = "CUDA graph" if graphs == {True} else "eager" if graphs == {False} else "CUDA graph or eager"
    runs = sorted({integer(line, "runs") for line in lines if line.get("runs")})
    mean = (
        ""
        if not runs or runs[-1] == 1
        else f"each the mean of {'–'.join(map(str, dict.fromkeys((runs[0], runs[-1]))))} runs, "
    )
    return f"p50 of {many} samples of the slowest rank, {mean}{how}"


def ranks_on(lines: Sequence[Line]) -> str:
    """Name the ranks and their devices, a few of each.

    >>> ranks_on([{"ranks": 2, "device": "cpu"}, {"ranks": 4, "device": "NVIDIA H200"}])
    '2/4 ranks on cpu and NVIDIA H200'
    """
    ranks, devices = ([*dict.fromkeys(str(line[key]) for line in lines)] for key in ("ranks", "device"))
    many = "s" * (ranks != ["1"])
    return f"{'/'.join(ranks[:MOST_NAMED])} rank{many} on {' and '.join(devices[:MOST_NAMED])}"


MOST_NAMED = 4


def three_digits(value: float) -> str:
    """Write a number with about three digits.

    >>> three_digits(381.4), three_digits(21.46), three_digits(0.0571)
    ('381', '21.5', '0.057')
    """
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"
