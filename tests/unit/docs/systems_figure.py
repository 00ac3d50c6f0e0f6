"""Draws raymoe beside DeepEP at equal numbers of SMs, out of a table of docs/evidence/comparison.md."""

from __future__ import annotations

from raymoe.report.figure import MARGIN, Sheet, how_and_where, run_names
from raymoe.report.svg import Bar, BarChart, BarSegment, Key, bar_chart, compact
from tests.unit.docs.measured_tables import TABLES, Table
from tests.unit.docs.raw_lines import Column, Line

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
