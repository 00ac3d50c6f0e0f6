"""Result lines of copies between ranks, sorted by transport, protocol and pattern: the subjects of figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.report.results import Line

# In one direction, of all links of a GPU together, by the name that the driver gives it.
LINKS = (
    (r"NVIDIA (H200|H100 80GB HBM3|H20)", 450.0, "NVLink 4 ×18"),
    (r"NVIDIA A100-SXM.*", 300.0, "NVLink 3 ×12"),
    (r"NVIDIA G?B[23]00.*", 900.0, "NVLink 5 ×18"),
)
# What a GPU's links were seen to give at most in one direction while all GPUs sent: the copy engine's pushes, 4x H200,
# 2026-11-21. No exchange on this machine can be faster.
GAVE = ((r"NVIDIA H200", 381.0),)
_TOLD_ELSEWHERE = {"transports", "bytes", "pattern", "graph", "protocol"}
_COPY = ("pattern", "src", "dst", "bytes")


@dataclass(frozen=True)
class CopyWay:
    """One way of copying: the subject of a curve, and of a matrix for each size."""

    transport: str
    protocol: str = ""
    """put or get; empty where that is not known."""
    details: tuple[str, ...] = ()
    """What else sets it apart from the others."""

    @property
    def label(self) -> str:
        """
        >>> CopyWay("tma", "get", ("8 SMs",)).label
        'tma pull (8 SMs)'
        """
        word = {"put": " push", "get": " pull"}.get(self.protocol, "")
        return f"{self.transport}{word}" + (f" ({', '.join(self.details)})" if self.details else "")


def ways_of(copies: Sequence[Line], protocol: str = "") -> dict[CopyWay, list[Line]]:
    """The lines by the way they went. Two lines of a way never tell of the same copy: more is told apart until then.

    `protocol` is the job's, for lines whose case does not name one.
    """
    with_graph = len({line["graph"] for line in copies}) > 1
    told_apart: list[str] = []
    found: dict[CopyWay, list[Line]] = {}
    for another in ("", "sms", "ranks", "device", "run", "generation"):
        told_apart += [another] if another else []
        found = {}
        for line in copies:
            words = dict(word.partition("=")[::2] for word in str(line["case"]).split(",") if "=" in word)
            details = [f"{key} {value}" for key, value in words.items() if key not in _TOLD_ELSEWHERE]
            details += [("graph" if line["graph"] else "eager")] * with_graph
            details += [f"{line[key]} SMs" if key == "sms" else f"{key} {line[key]}" for key in told_apart]
            way = CopyWay(str(line["transport"]), words.get("protocol", protocol), tuple(details))
            found.setdefault(way, []).append(line)
        told = [(way, *(line[key] for key in _COPY)) for way, lines in found.items() for line in lines]
        if len(set(told)) == len(told):
            break
    return found


def link_of(device: object) -> tuple[float, str] | None:
    """GB/s in one direction of a GPU's links, and their name; None where that is not known.

    >>> link_of("NVIDIA H200"), link_of("NVIDIA H100 PCIe"), link_of("cpu")
    ((450.0, 'NVLink 4 ×18'), None, None)
    """
    return next(((gbps, name) for form, gbps, name in LINKS if re.fullmatch(form, str(device))), None)


def gave(device: object) -> float | None:
    """GB/s that the links of a GPU of this kind were seen to give at most; None where nobody has looked.

    >>> gave("NVIDIA H200"), gave("NVIDIA H100 80GB HBM3")
    (381.0, None)
    """
    return next((most for form, most in GAVE if re.fullmatch(form, str(device))), None)


def gbps(line: Line) -> float:
    given = line["gbps_wire"]
    return float(str(given)) if given is not None else whole(line, "bytes") / us(line) / 1e3


def us(line: Line) -> float:
    return float(str(line["us_p50"]))


def whole(line: Line, key: str) -> int:
    return int(str(line[key]))


def measured(lines: Sequence[Line]) -> str:
    """How the lines were measured, in the words of a figure's title.

    >>> measured([{"samples": 50, "graph": True}])
    'p50 of 50 samples of the slowest rank, CUDA graph'
    """
    samples = sorted({whole(line, "samples") for line in lines if line["samples"] is not None})
    many = f"{samples[0]}–{samples[-1]}" if len(samples) > 1 else "".join(map(str, samples))
    graphs = {bool(line["graph"]) for line in lines}
    how = "CUDA graph" if graphs == {True} else "eager" if graphs == {False} else "CUDA graph or eager"
    return f"p50 of {many} samples of the slowest rank, {how}"


def machine(lines: Sequence[Line]) -> str:
    """What the lines were measured on, and where they are from.

    >>> machine([{"ranks": 4, "device": "NVIDIA H200", "run": run} for run in ("one", "one", "two", "three")])
    '4 ranks on NVIDIA H200 · run one and 2 more'
    """
    ranks = "/".join(str(each) for each in dict.fromkeys(line["ranks"] for line in lines))
    devices = " and ".join(dict.fromkeys(str(line["device"]) for line in lines))
    first, *others = dict.fromkeys(str(line["run"]) for line in lines)
    return f"{ranks} ranks on {devices} · run {first}" + (f" and {len(others)} more" if others else "")


def three_digits(value: float) -> str:
    """
    >>> three_digits(381.4), three_digits(21.46), three_digits(0.0571)
    ('381', '21.5', '0.057')
    """
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"
