"""Shows the lines of workload products: useful work a second over the rows of an expert, by system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymoe.report.columns import Column, show
from raymoe.report.figure import Figure, Panel, curve_columns, how_and_where
from raymoe.report.results import Line
from raymoe.report.svg import MOST_CURVES, Axis, Chart, Curve, Point

PRODUCTS, COPY = "products", "copy"
LEAST_POINTS = 2
MOST_COLUMNS = 64
"""Columns of a table. A damaged file could name thousands of systems."""
HEADROOM = 1.3
"""The curve of the copy ends where it would be so much above the fastest system: there arithmetic bounds a product."""
_SETTINGS = ("routing", "dtype", "hidden", "ffn", "experts")


@dataclass(frozen=True)
class ProductCurves:
    """The lines of one operation, by system and by rows of an expert."""

    op: str
    setting: str
    """The settings that differ from those of other figures, as `routing hot`; empty if there are none."""
    curves: Mapping[str, Mapping[int, Line]]

    @property
    def stem(self) -> str:
        """The name of the figure's file."""
        return "-".join(("products", self.op, *self.setting.replace(",", "").split()))

    @property
    def title(self) -> str:
        return f"Product {self.op} over rows of an expert" + (f", {self.setting}" if self.setting else "")

    @property
    def lines(self) -> list[Line]:
        return [line for points in self.curves.values() for line in points.values()]

    def rates(self, label: str) -> dict[int, float]:
        """TFLOP/s by rows; of the copy, as if a product took its time."""
        points = self.curves[label]
        if not _is_copy(label):
            return {rows: _number(line, "tflops") for rows, line in points.items() if line["tflops"]}
        rates = {}
        for rows, line in points.items():
            others = [other[rows] for name, other in self.curves.items() if not _is_copy(name) and rows in other]
            timed = [other for other in others if other["tflops"] and other["run"] == line["run"]]
            if timed:
                work = _number(timed[0], "tflops") * _number(timed[0], "us_p50")
                rate = work / _number(line, "us_p50")
                if rate <= HEADROOM * max(_number(other, "tflops") for other in timed):
                    rates[rows] = rate
        return rates


def product_curves(lines: Sequence[Line]) -> Iterator[ProductCurves]:
    """Give the curves of each operation; lines of other sizes, dtypes or kinds of rows have curves of their own."""
    timed = [line for line in lines if line["workload"] == PRODUCTS and line["us_p50"] and line["rows"]]
    several = [key for key in _SETTINGS if len({line[key] for line in timed}) > 1]
    runs = len({line["run"] for line in timed}) > 1
    groups: dict[tuple[str, str], dict[str, dict[int, Line]]] = {}
    for line in timed:
        setting = ", ".join(f"{key} {show(key, line[key])}" for key in several)
        label = f"{line['run']}: {line['backend']}" if runs else str(line["backend"])
        group = groups.setdefault((str(line["op"]), setting), {})
        group.setdefault(label, {})[int(str(line["rows"]))] = line
    for (op, setting), curves in groups.items():
        if any(len(points) >= LEAST_POINTS for points in curves.values()):
            yield ProductCurves(op, setting, curves)


def _is_copy(label: str) -> bool:
    return label.rpartition(": ")[2] == COPY


def _number(line: Line, key: str) -> float:
    return float(str(line[key]))


def product_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw TFLOP/s of useful work over rows. The copy of the weights' bytes is dashed."""
    for product in product_curves(lines):
        curves = []
        for index, label in enumerate(product.curves):
            rates = product.rates(label)
            points = [Point(rows, rates[rows]) for rows in sorted(rates)]
            if points:
                name = label.replace(COPY, "copy of the weights") if _is_copy(label) else label
                curves.append(Curve(name, points, index, dashed=_is_copy(label)))
        x = Axis("rows of an expert", log=True, write=lambda value: f"{value:.0f}")
        chart = Chart(product.title, x, Axis("TFLOP/s of useful work"), curves[:MOST_CURVES], [])
        columns = curve_columns("rows", str, **{"TFLOP/s": curves})
        where = how_and_where(product.lines)
        yield Figure(product.stem, product.title, where, [Panel(chart)], columns, curves[:MOST_CURVES])


def product_tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each operation: systems side by side over rows. A cell is `us (TFLOP/s)`."""
    for product in product_curves(lines):
        counts = sorted({rows for points in product.curves.values() for rows in points})
        yield (
            f"{product.title}: us (TFLOP/s of useful work)",
            [
                Column("rows", [str(rows) for rows in counts], right=True),
                *(
                    Column(label, [_cell(points.get(rows)) for rows in counts], right=True)
                    for label, points in list(product.curves.items())[:MOST_COLUMNS]
                ),
            ],
        )


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    us = f"{_number(line, 'us_p50'):,.1f}"
    return f"{us} ({_number(line, 'tflops'):,.0f})" if line["tflops"] else us
