"""Shows the parts of a layer, out of the lines of workload layer: their times in the step and alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.report.columns import Column
from raymoe.report.figure import Figure, Panel, how_and_where
from raymoe.report.measures import three_digits, us
from raymoe.report.results import Line
from raymoe.report.svg import Bar, BarChart, BarSegment, Key

STEP, ALONE, BACKWARD = "step", "_alone", "_backward"
MOST_BARS, MOST_PARTS = 12, 24


@dataclass(frozen=True)
class LayerParts:
    """One case: the time of its step, of each part in it, and of parts alone, in microseconds."""

    case: str
    lines: list[Line]
    step: float
    parts: dict[str, float]
    alone: dict[str, float]
    tails: dict[str, str]
    """The 99th percentile of each part and of the step, as text."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def layer_parts(lines: Sequence[Line]) -> list[LayerParts]:
    """Give the parts of each case that has lines for them. A step that was timed cold and warm has its cold time.

    >>> from raymoe.report.results import complete
    >>> times = {"step": 10.0, "router": 2.0, "experts": 7.0, "experts_alone": 6.5}
    >>> lines = [{"case": "c", "workload": "layer", "op": op, "us_p50": us} for op, us in times.items()]
    >>> (case,) = layer_parts([complete(line, run="a-b", generation=0, commit=None) for line in lines])
    >>> case.step, case.total, case.parts, case.alone
    (10.0, 9.0, {'router': 2.0, 'experts': 7.0}, {'experts': 6.5})
    """
    by_case: dict[tuple[object, object], list[Line]] = {}
    for line in lines:
        if line["workload"] == "layer" and line["us_p50"] is not None and line["l2"] != "warm":
            by_case.setdefault((line["run"], line["case"]), []).append(line)
    cases = []
    for (_, case), of_case in by_case.items():
        times = {str(line["op"]): us(line) for line in of_case}
        parts = {op: time for op, time in times.items() if op != STEP and not op.endswith(ALONE)}
        alone = {op.removesuffix(ALONE): time for op, time in times.items() if op.endswith(ALONE)}
        if parts and STEP in times:
            tails = {str(line["op"]): _tail(line) for line in of_case}
            cases.append(LayerParts(str(case), of_case, times[STEP], parts, alone, tails))
    return cases


def _tail(line: Line) -> str:
    return "-" if line["us_p99"] is None else f"{float(str(line['us_p99'])):,.1f}"


def layer_tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each case: the time of each part in the step, its share, and its time alone."""
    for case in layer_parts(lines):
        names = [*case.parts, STEP]
        times = [*case.parts.values(), case.step]
        columns = [
            Column("part", names),
            Column("us", [f"{time:,.1f}" for time in times], right=True),
            Column("p99 us", [case.tails[name] for name in names], right=True),
            Column("share", [f"{time / case.step:.0%}" if case.step else "-" for time in times], right=True),
        ]
        if case.alone:
            alone = [*(case.alone.get(name) for name in case.parts), sum(case.alone.values())]
            cells = ["-" if time is None else f"{time:,.1f}" for time in alone]
            columns.append(Column("alone us", cells, right=True))
        yield f"parts of the layer, medians, {case.case}", columns


def layer_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw one figure of all cases. Bars are shares of the step, so that short steps can be read too."""
    cases = layer_parts(lines)[:MOST_BARS]
    if not cases:
        return
    names = list(dict.fromkeys(name for case in cases for name in case.parts))[:MOST_PARTS]
    keys = [Key(name, _colour(name, names)) for name in names]
    rows = []
    columns = [Column("part", [*names, STEP])]
    several = len({case.lines[0]["run"] for case in cases}) > 1
    for case in cases:
        label = f"{case.lines[0]['run']}: {case.case}" if several else case.case
        segments, end, whole = [], 0.0, case.step or 1.0
        for key in keys:
            time = case.parts.get(key.label, 0.0)
            begin, end = end, end + time / whole
            if time:
                segments.append(BarSegment(begin, end, key.colour, f"{key.label} {time:,.1f} µs, {time / whole:.1%}"))
        rows.append(Bar(label, f"{three_digits(case.step)} µs", segments, ticks=[1.0]))
        times = [case.parts.get(name) for name in names]
        cells = ["-" if time is None else f"{time:,.1f}" for time in [*times, case.step]]
        columns.append(Column(f"{label} us", cells, right=True))
    most = max(1.0, *(case.total / (case.step or 1.0) for case in cases))
    unit = "time of each part on its slowest rank / time of the step"
    yield Figure(
        "layer-parts",
        "Where the time of a layer goes",
        how_and_where([line for case in cases for line in case.lines]),
        [Panel(BarChart("Parts of a layer", rows, most, unit=unit))],
        columns,
        keys,
        "The thin line is the end of the step, whose time is on the right. Gradients are pale.",
    )


def _colour(name: str, names: Sequence[str]) -> str:
    """Give a part and its gradients one colour; that of the gradients is pale."""
    forward = list(dict.fromkeys(other.removesuffix(BACKWARD) for other in names))
    colour = COLOURS[forward.index(name.removesuffix(BACKWARD)) % len(COLOURS)]
    return f"{colour} faded" if name.endswith(BACKWARD) else colour


COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "grey")
