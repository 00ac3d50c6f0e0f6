"""Draws raymoe beside DeepEP over the SMs that they may take: as bars of a table of comparison.md, and as curves."""

from __future__ import annotations

from raymoe.report.figure import MARGIN, Sheet, how_and_where, run_names
from raymoe.report.svg import Axis, Bar, BarChart, BarSegment, Chart, Curve, Key, Point, bar_chart, compact, line_chart
from tests.unit.docs.measured_tables import TABLES, Table
from tests.unit.docs.raw_lines import Column, Line, date_of

TITLE = "At equal numbers of SMs"
SYSTEMS = {"fused": Key("raymoe, fused", "c0"), "deepep_v2": Key("DeepEP V2", "c1")}
SHORT = {"fused": "fused", "deepep_v2": "DeepEP V2"}
OPERATIONS = ("dispatch", "combine")
PHONE = 350
"""The width of the drawings. A telephone is hardly narrower, so that letters keep their size there."""
BETWEEN = Bar("", "", [])
"""Stands between two numbers of SMs."""


def equal_sms_table() -> Table:
    [table] = [table for table in TABLES if table.first == "SMs, 4096 tokens by expert"]
    return table


def column_of(op: str, system: str) -> Column:
    return equal_sms_table().columns[f"{op} `{system}`"]


def shared_sms() -> list[str]:
    """The first cells of the table's rows in which both systems have times."""
    table = equal_sms_table()
    return [row[table.first] for row in table.rows() if all(row[name] for name in table.columns)]


def line_at(op: str, system: str, cell: str) -> Line:
    [line] = column_of(op, system).lines(equal_sms_table().row(cell))
    return line


def bars_of(op: str) -> list[Bar]:
    """A bar of each system for each number of SMs."""
    bars: list[Bar] = []
    for cell in shared_sms():
        bars += [BETWEEN] if bars else []
        for system, key in SYSTEMS.items():
            line = line_at(op, system, cell)
            median, whisker = line["us_p50"], (line["us_min"], line["us_p99"])
            sms = "own choice" if cell == "auto" else f"{cell} SMs"
            label = f"{sms}, {SHORT[system]}" if system == "fused" else SHORT[system]
            segment = BarSegment(0.0, median, key.colour, f"{op}, {sms}, {key.label}: median {median:,.1f} µs")
            bars.append(Bar(label, f"{compact(median)} µs", [segment], whisker))
    return bars


def systems_figure() -> str:
    """Return the file: a panel for each operation, one below the other and on one scale."""
    bars = {op: bars_of(op) for op in OPERATIONS}
    lines = [line_at(op, system, cell) for op in OPERATIONS for system in SYSTEMS for cell in shared_sms()]
    most = max(line["us_p99"] for line in lines)
    shape = lines[0]
    sheet = Sheet(PHONE + 2 * MARGIN)
    sheet.write(TITLE, 15, "title")
    sheet.write(
        f"{shape['tokens']} tokens a rank, hidden {shape['hidden']}, top-{shape['topk']} of {shape['experts']} "
        f"experts, {shape['dtype']}, rows by expert. {how_and_where(lines)}"
    )
    sheet.write(run_names([line["run"] for line in lines]))
    sheet.add_legend(list(SYSTEMS.values()))
    for op in OPERATIONS:
        chart = BarChart(op, bars[op], most, unit="µs, slowest rank: less is better", tight=True)
        sheet.add_row([(op.capitalize(), bar_chart(chart))], PHONE, 1)
    sheet.write(
        "Bars: the median. Thin lines: from the fastest sample to the 99th percentile. Own choice: the SMs that a "
        "system takes if none are set."
    )
    return sheet.file(TITLE)


# Curves over SMs: an earlier commit, a later one, and DeepEP.

BEFORE, AFTER = "juoe", "jiyo"
"""The ends of the names of two runs of bench_sms."""


def swept(run: str, op: str) -> dict[int, Line]:
    """The lines of a run of bench_sms with rows by expert, by their number of SMs."""
    keys = {"layout": "expert", "op": op, "l2": "cold"}
    return {int(line["sms"]): line for line in Column("bench_sms_h200x2", run, keys).lines({})}


def deepep(op: str) -> dict[int, Line]:
    return {int(cell): line_at(op, "deepep_v2", cell) for cell in shared_sms() if cell != "auto"}


def curves_over_sms(op: str) -> dict[str, dict[int, Line]]:
    """By label: what a panel of the figure shows."""
    before, after = (swept(run, op) for run in (BEFORE, AFTER))
    days = [f"raymoe, {date_of(next(iter(lines.values())))}" for lines in (before, after)]
    return {days[0]: before, days[1]: after, "DeepEP V2": deepep(op)}


def over_sms_figure() -> str:
    """Return the file: a panel for each operation, one below the other."""
    panels = {op: curves_over_sms(op) for op in OPERATIONS}
    lines = [line for curves in panels.values() for points in curves.values() for line in points.values()]
    sheet = Sheet(PHONE + 2 * MARGIN)
    title = "Over SMs, before and after"
    sheet.write(title, 15, "title")
    sheet.write(f"{lines[0]['tokens']} tokens a rank, rows by expert. {how_and_where(lines)}")
    sheet.write(run_names(sorted({line["run"] for line in lines})))
    drawn = {
        op: [
            Curve(label, [Point(sms, line["us_p50"]) for sms, line in sorted(points.items())], style)
            for style, (label, points) in enumerate(curves.items())
        ]
        for op, curves in panels.items()
    }
    sheet.add_legend(drawn[OPERATIONS[0]])
    x = Axis("SMs", log=True, write=lambda value: f"{value:.0f}")
    for op, curves in drawn.items():
        picture = line_chart(Chart(op, x, Axis("µs, slowest rank", log=True), curves), (PHONE, 260))
        sheet.add_row([(op.capitalize(), picture)], PHONE, 1)
    sheet.write("Medians, with cold caches: less is better.")
    return sheet.file(title)
