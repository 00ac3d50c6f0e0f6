"""Shows the lines of workload pointwise: curves over rows, SMs and stages, with their tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymoe.report.columns import COPIES, Column, shares_of_copy, show
from raymoe.report.figure import Figure, Panel, curve_columns, how_and_where
from raymoe.report.results import Line
from raymoe.report.svg import MOST_CURVES, Axis, Chart, Curve, Limit, Point

POINTWISE, OURS, BASELINE = "pointwise", "raymoe", "in_turn"
LEAST_POINTS = 2
MOST_COLUMNS = 64
"""Columns of a table. A damaged file could name thousands of systems."""


@dataclass(frozen=True)
class BandwidthCurves:
    """Lines of one operation: by label, and by number on the axis. `limit` is the fastest copy's line, if it is not a
    curve itself."""

    op: str
    setting: str
    """Settings that differ from those of other figures, as `dtype float16`; empty if there are none."""
    axis: str
    """`tokens`, `sms` or `stages`."""
    curves: Mapping[str, Mapping[int, Line]]
    limit: Line | None = None

    @property
    def stem(self) -> str:
        """The name of the figure's file."""
        return "-".join(("bandwidth", self.op, self.axis, *self.setting.replace(",", "").split()))

    @property
    def title(self) -> str:
        over = {"tokens": "rows", "sms": "SMs", "stages": "stages"}[self.axis]
        return f"Bandwidth of {self.op} over {over}" + (f", {self.setting}" if self.setting else "")

    @property
    def label(self) -> str:
        """The label of the axis."""
        return {"tokens": "rows", "sms": "SMs that the kernel may take", "stages": "stages of a block"}[self.axis]

    @property
    def lines(self) -> list[Line]:
        return [line for points in self.curves.values() for line in points.values()]


def rate(line: Line) -> float:
    """GB/s of memory, read and written."""
    return float(str(line["gbps_memory"]))


def is_copy(label: str) -> bool:
    """Whether the curve of this label is a copy's.

    >>> is_copy("copy"), is_copy("A: own_copy"), is_copy("raymoe")
    (True, True, False)
    """
    return label.rpartition(": ")[2] in COPIES


def bandwidth_curves(lines: Sequence[Line]) -> Iterator[BandwidthCurves]:
    """Give the curves of each operation: over rows by system, then over SMs by stages, then over stages by SMs."""
    timed = [line for line in lines if line["workload"] == POINTWISE and line["gbps_memory"] and line["tokens"]]
    for (op, setting), of_op in _by_operation(timed).items():
        plain = [line for line in of_op if line["sms"] is None and line["stages"] is None]
        by_system = _curves(plain, lambda line: _named(line, timed), "tokens")
        if by_system:
            yield BandwidthCurves(op, setting, "tokens", by_system)
        for axis, other in (("sms", "stages"), ("stages", "sms")):
            yield from _sweeps(op, setting, axis, other, of_op)


def _sweeps(op: str, setting: str, axis: str, other: str, of_op: Sequence[Line]) -> Iterator[BandwidthCurves]:
    """Give the curves over one limit of raymoe's kernels: one for each value of the other limit, and over SMs one of
    the baseline, which has no stages. The rows are the same in a figure."""
    kernels = (OURS, BASELINE) if axis == "sms" else (OURS,)
    swept = [line for line in of_op if line["backend"] in kernels and line[axis] is not None]
    rows = dict.fromkeys(line["tokens"] for line in swept)
    for tokens in rows:
        limited = [line for line in swept if line["tokens"] == tokens]
        curves = _curves(limited, lambda line: _apart(line, swept, _limited(line, other)), axis)
        if curves:
            copies = [line for line in of_op if line["tokens"] == tokens and line["backend"] in COPIES]
            fastest = max(copies, key=rate) if copies else None
            more = ", ".join(filter(None, (setting, f"{tokens} rows" if len(rows) > 1 else "")))
            yield BandwidthCurves(op, more, axis, curves, fastest)


def _limited(line: Line, limit: str) -> str:
    """Name a kernel by one of its limits.

    >>> [_limited({"backend": "raymoe", "stages": stages}, "stages") for stages in (None, 1, 4)]
    ['stages auto', '1 stage', '4 stages']
    """
    if line["backend"] == BASELINE:
        return BASELINE
    unit, value = {"sms": "SMs", "stages": "stages"}[limit], line[limit]
    return f"{unit} auto" if value is None else f"{value} {unit.removesuffix('s') if value == 1 else unit}"


def _by_operation(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """Group lines by operation, and by size and dtype where these differ."""
    by_operation: dict[tuple[str, str], list[Line]] = {}
    widths = {(line["op"], line["hidden"]) for line in lines}
    several_widths = len(widths) > len({op for op, _ in widths})
    several_dtypes = len({line["dtype"] for line in lines}) > 1
    for line in lines:
        words = [f"hidden {show('hidden', line['hidden'])}"] * several_widths
        words += [f"dtype {show('dtype', line['dtype'])}"] * several_dtypes
        by_operation.setdefault((str(line["op"]), ", ".join(words)), []).append(line)
    return by_operation


def _named(line: Line, lines: Sequence[Line]) -> str:
    """Name the system, and what else differs."""
    return _apart(line, lines, str(line["backend"]))


def _apart(line: Line, lines: Sequence[Line], label: str) -> str:
    """Put before a label the run, if there are several, and whether the line is captured, if that differs."""
    if len({other["graph"] for other in lines}) > 1:
        label = f"{'captured' if line['graph'] else 'eager'}: {label}"
    return f"{line['run']}: {label}" if len({other["run"] for other in lines}) > 1 else label


def _curves(lines: Sequence[Line], label: Callable[[Line], str], axis: str) -> dict[str, dict[int, Line]]:
    curves: dict[str, dict[int, Line]] = {}
    for line in lines:
        curves.setdefault(label(line), {})[int(str(line[axis]))] = line
    return curves if any(len(points) >= LEAST_POINTS for points in curves.values()) else {}


def bandwidth_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the bandwidth of each operation over rows, over SMs and over stages. Copies are dashed."""
    for bandwidth in bandwidth_curves(lines):
        curves = [
            Curve(label, [Point(x, rate(points[x])) for x in sorted(points)], index, dashed=is_copy(label))
            for index, (label, points) in enumerate(bandwidth.curves.items())
        ]
        limits = []
        if bandwidth.limit:
            most = rate(bandwidth.limit)
            limits.append(Limit(most, f"{most:,.0f} GB/s, a copy of as many bytes"))
        x = Axis(bandwidth.label, log=True, write=lambda value: f"{value:.0f}")
        chart = Chart(bandwidth.title, x, Axis("GB/s, read and written"), curves[:MOST_CURVES], limits)
        yield Figure(
            bandwidth.stem,
            bandwidth.title,
            how_and_where(bandwidth.lines),
            [Panel(chart)],
            curve_columns(bandwidth.label, str, **{"GB/s": curves}),
            curves[:MOST_CURVES],
        )


# Tables: systems side by side over rows, and raymoe's kernel over SMs and stages.


def bandwidth_tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each set of curves. A cell is `us (GB/s, share of the copy)`."""
    shares = {id(line): share for line, share in zip(lines, shares_of_copy(lines), strict=True)}
    for bandwidth in bandwidth_curves(lines):
        if bandwidth.axis == "stages":
            continue  # the table over SMs has the same cells
        counts = sorted({count for points in bandwidth.curves.values() for count in points})
        header = "SMs" if bandwidth.axis == "sms" else bandwidth.axis
        yield (
            f"{bandwidth.title}: us (GB/s, of the copy)",
            [
                Column(header, [str(count) for count in counts], right=True),
                *(
                    Column(label, [_cell(points.get(count), shares) for count in counts], right=True)
                    for label, points in list(bandwidth.curves.items())[:MOST_COLUMNS]
                ),
            ],
        )


def _cell(line: Line | None, shares: Mapping[int, float | None]) -> str:
    if line is None:
        return "-"
    share = shares.get(id(line))
    return f"{float(str(line['us_p50'])):,.1f} ({rate(line):,.0f}" + (")" if share is None else f", {share:.0%})")
