"""Groups the result lines of copies for figures, and lists the speeds of GPU links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.report.results import Line

LATENCY_BYTES = 256 * 1024
"""Up to this size a message's time matters more than its bandwidth."""

# GB/s in one direction over all links of a GPU, by the GPU's name in the driver.
LINKS = (
    (r"NVIDIA (H200|H100 80GB HBM3|H20)", 450.0, "NVLink 4 ×18"),
    (r"NVIDIA A100-SXM.*", 300.0, "NVLink 3 ×12"),
    (r"NVIDIA G?B[23]00.*", 900.0, "NVLink 5 ×18"),
)
# The highest GB/s measured in one direction over a GPU's links while all GPUs sent: pushes by the copy engine,
# 4x H200, 2026-11-21. No exchange on this machine can be faster.
MEASURED_LINKS = ((r"NVIDIA H200", 381.0),)
_SHOWN_ELSEWHERE = {"transports", "bytes", "pattern", "graph", "protocol"}
_COPY = ("pattern", "src", "dst", "bytes")


@dataclass(frozen=True)
class CopyWay:
    """One way of copying: the subject of a curve, and of a matrix for each size."""

    transport: str
    protocol: str = ""
    """put or get; empty if unknown."""
    details: tuple[str, ...] = ()
    """Further settings that distinguish it from other ways."""

    @property
    def label(self) -> str:
        """The name of this way in a legend.

        >>> CopyWay("tma", "get", ("8 SMs",)).label
        'tma pull (8 SMs)'
        """
        word = {"put": " push", "get": " pull"}.get(self.protocol, "")
        return f"{self.transport}{word}" + (f" ({', '.join(self.details)})" if self.details else "")


def ways_of(copies: Sequence[Line], protocol: str = "") -> dict[CopyWay, list[Line]]:
    """Group the lines by the way of the copy.

    Keys are added to the ways until no two lines of a way are of the same copy. `protocol` is that of the job, for
    lines whose case does not name one.
    """
    with_graph = len({line["graph"] for line in copies}) > 1
    extra_keys: list[str] = []
    found: dict[CopyWay, list[Line]] = {}
    for key_to_add in ("", "sms", "ranks", "device", "run", "generation"):
        extra_keys += [key_to_add] if key_to_add else []
        found = {}
        for line in copies:
            words = dict(word.partition("=")[::2] for word in str(line["case"]).split(",") if "=" in word)
            details = [f"{key} {value}" for key, value in words.items() if key not in _SHOWN_ELSEWHERE]
            details += [("graph" if line["graph"] else "eager")] * with_graph
            details += [f"{line[key]} SMs" if key == "sms" else f"{key} {line[key]}" for key in extra_keys]
            way = CopyWay(str(line["transport"]), words.get("protocol", protocol), tuple(details))
            found.setdefault(way, []).append(line)
        copies_of_ways = [(way, *(line[key] for key in _COPY)) for way, lines in found.items() for line in lines]
        if len(set(copies_of_ways)) == len(copies_of_ways):
            break
    return found


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


def integer(line: Line, key: str) -> int:
    return int(str(line[key]))


def how_measured(lines: Sequence[Line]) -> str:
    """Say how the lines were measured, for a figure's title.

    >>> how_measured([{"samples": 50, "graph": True}])
    'p50 of 50 samples of the slowest rank, CUDA graph'
    """
    samples = sorted({integer(line, "samples") for line in lines if line["samples"] is not None})
    many = f"{samples[0]}–{samples[-1]}" if len(samples) > 1 else "".join(map(str, samples)) or "the"
    graphs = {bool(line["graph"]) for line in lines}
    how = "CUDA graph" if graphs == {True} else "eager" if graphs == {False} else "CUDA graph or eager"
    return f"p50 of {many} samples of the slowest rank, {how}"


def machine(lines: Sequence[Line]) -> str:
    """Name the ranks, GPUs and runs of the lines, for a figure's title.

    >>> machine([{"ranks": 4, "device": "NVIDIA H200", "run": run} for run in ("one", "one", "two", "three")])
    '4 ranks on NVIDIA H200 · run one and 2 more'
    """
    first, *more = dict.fromkeys(str(line["run"]) for line in lines)
    return f"{ranks_on(lines)} · run {first}" + (f" and {len(more)} more" if more else "")


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
