"""The table at the end of a run: drawn by rich on a terminal, plain ASCII of one line a row elsewhere."""

import io
import textwrap
from collections.abc import Sequence

from raymoe.report.beside import overlaps
from raymoe.report.columns import Column, caption_of, columns_of
from raymoe.report.fit import fits
from raymoe.report.results import Line
from raymoe.report.side_by_side import tables
from raymoe.report.timelines import timelines


def render(lines: Sequence[Line], *, terminal: bool = False, width: int = 100) -> str:
    """The text of the table, one part for each workload; empty when there is no line. It ends with a line end.

    Exchanges that were measured by several backends over several counts of tokens follow side by side, and straight
    lines through their times; exchanges beside a product, with what each cost the other; where the time of traced ones
    goes.
    """
    parts = []
    for workload in dict.fromkeys(line["workload"] for line in lines):
        part = [line for line in lines if line["workload"] == workload]
        columns = columns_of(part)
        caption = textwrap.fill(caption_of(part), max(width, 40), subsequent_indent="  ", break_on_hyphens=False)
        # rich would fold or cut what does not fit; a row that runs over the edge still says everything.
        fit = sum(size + 2 for size in _widths(columns)) <= width
        parts.append(f"{caption}\n{_drawn(columns, width) if terminal and fit else _plain(columns)}")
        others = (*tables(part), *fits(part), *overlaps(part), *timelines(part))
        parts += [f"{title}\n{_plain(other)}" for title, other in others]
    return "\n".join(parts)


def _widths(columns: Sequence[Column]) -> list[int]:
    return [max(len(column.header), *map(len, column.cells)) for column in columns]


def _plain(columns: Sequence[Column]) -> str:
    """One line a row, never wrapped or cut: a log is searched by line."""
    widths = _widths(columns)
    rows = [[column.header for column in columns], ["-" * width for width in widths]]
    rows += [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    text = []
    for row in rows:
        cells = [
            cell.rjust(size) if column.right else cell.ljust(size)
            for cell, size, column in zip(row, widths, columns, strict=True)
        ]
        text.append("  ".join(cells).rstrip() + "\n")
    return "".join(text)


def _drawn(columns: Sequence[Column], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(Text(column.header), justify="right" if column.right else "left", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
