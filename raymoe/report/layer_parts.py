"""The parts of a layer: their times in the step and alone, out of the lines of workload layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.report.columns import Column
from raymoe.report.copies import us
from raymoe.report.results import Line

STEP, ALONE = "step", "_alone"


@dataclass(frozen=True)
class LayerParts:
    """One case: the time of its step, of each part in it, and of parts alone, in microseconds."""

    case: str
    lines: list[Line]
    step: float
    parts: dict[str, float]
    alone: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def layer_parts(lines: Sequence[Line]) -> list[LayerParts]:
    """Give the parts of each case that has lines for them. Of a step that was timed cold and warm, the cold time.

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
    found = []
    for (_, case), of_case in by_case.items():
        times = {str(line["op"]): us(line) for line in of_case}
        parts = {op: time for op, time in times.items() if op != STEP and not op.endswith(ALONE)}
        alone = {op.removesuffix(ALONE): time for op, time in times.items() if op.endswith(ALONE)}
        if parts and STEP in times:
            found.append(LayerParts(str(case), of_case, times[STEP], parts, alone))
    return found


def layer_tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each case: the time of each part in the step, its share, and its time alone."""
    for found in layer_parts(lines):
        names = [*found.parts, STEP]
        times = [*found.parts.values(), found.step]
        columns = [
            Column("part", names),
            Column("us", [f"{time:,.1f}" for time in times], right=True),
            Column("share", [f"{time / found.step:.0%}" if found.step else "-" for time in times], right=True),
        ]
        if found.alone:
            alone = [*(found.alone.get(name) for name in found.parts), sum(found.alone.values())]
            cells = ["-" if time is None else f"{time:,.1f}" for time in alone]
            columns.append(Column("alone us", cells, right=True))
        yield f"parts of the layer, medians, {found.case}", columns
