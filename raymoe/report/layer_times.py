"""Reads the times of the parts of layers, out of the lines of workload layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.report.measures import rank_medians, us
from raymoe.report.results import Line

STEP, ALONE, BACKWARD = "step", "_alone", "_backward"


@dataclass(frozen=True)
class LayerParts:
    """One case: the time of its step, of each part in it, and of parts alone, in microseconds."""

    case: str
    lines: list[Line]
    step: float
    parts: dict[str, float]
    """By part: the median of its slowest rank."""
    alone: dict[str, float]
    tails: dict[str, str]
    """The 99th percentile of each part and of the step, as text."""
    ranks: dict[str, list[float]]
    """By part, and for the step: the median of each rank. Empty if the lines do not have them."""

    @property
    def means(self) -> dict[str, float]:
        """The time of each part on an average rank; on the slowest one where no others are known.

        Ranks are slow in different parts, and the others wait for them. So the slowest times of all parts together
        are longer than a step. Those of an average rank are not.
        """
        if not self.ranks:
            return self.parts
        return {part: sum(self.ranks[part]) / len(self.ranks[part]) for part in self.parts}

    @property
    def total(self) -> float:
        return sum(self.means.values())


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
            ranks = {str(line["op"]): rank_medians(line) for line in of_case if line["op"] in (*parts, STEP)}
            known = len({len(medians) for medians in ranks.values()}) == 1 and all(ranks.values())
            cases.append(LayerParts(str(case), of_case, times[STEP], parts, alone, tails, ranks if known else {}))
    return cases


def _tail(line: Line) -> str:
    return "-" if line["us_p99"] is None else f"{float(str(line['us_p99'])):,.1f}"


def shares_of_step(lines: Sequence[Line]) -> list[float | None]:
    """Divide the time of each part on an average rank by the time of its step. Parts alone have no share."""
    shares: dict[tuple[object, object, str], float] = {}
    for case in layer_parts(lines):
        run = case.lines[0]["run"]
        shares |= {(run, case.case, part): time / case.step for part, time in case.means.items() if case.step}
    return [shares.get((line["run"], line["case"], str(line["op"]))) for line in lines]
