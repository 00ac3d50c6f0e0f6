"""Draws when each block of a combine and of a product began and ended, as a line of an experiment has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from raymoe.report.figure import MARGIN, Sheet
from raymoe.report.svg import Drawing, Key, compact, linear_ticks, safe
from tests.unit.docs.derived_tables import TOLD_COMBINES, json_lines
from tests.unit.docs.raw_lines import Line

TITLE = "Combine and down product on one clock"
PARTS = {"product": Key("product", "c0"), "exchange": Key("combine", "c1")}
PANELS = {
    "in_turn": "One after the other",
    "beside": "A combine of other rows beside it",
    "told": "The combine of its rows, in pieces",
}
WIDTH, ROW, LEFT, RIGHT = 350, 1.4, 2, 12
"""Of a drawing: as wide as a telephone, so that letters keep their size there."""

Times = tuple[float, float]
Row = list[tuple[str, Times]]
"""What runs on one SM, in its order: a part and when its block begins and ends."""


def traced_line() -> Line:
    """The first trace: of experts with 16 bits."""
    line = next(line for line in json_lines(TOLD_COMBINES) if line["op"] == "trace of combine+down")
    assert line["dtype"] == "bfloat16"
    return line


def blocks_of(panel: str, part: str) -> list[Times]:
    """When each block begins and ends, in us after the first block of the panel."""
    return [(begin, end) for begin, end in traced_line()[panel][part]]


def rows_of(panel: str) -> list[Row]:
    """The blocks of a panel, at most one at a time in a row: first the rows that a block of the product begins.

    The line does not name SMs. A block that had to wait stands after the one that has ended last before it.
    """
    rows: list[Row] = []
    blocks = sorted((times, part) for part in PARTS for times in blocks_of(panel, part))
    for (begin, end), part in blocks:
        free = [row for row in rows if row[-1][1][1] <= begin]
        if free:
            max(free, key=lambda row: row[-1][1][1]).append((part, (begin, end)))
        else:
            rows.append([(part, (begin, end))])
    return sorted(rows, key=lambda row: row[0][0] == "exchange")


def last_end(panel: str) -> float:
    return max(end for part in PARTS for _, end in blocks_of(panel, part))


def spread_of_ends(panel: str, part: str) -> float:
    """The time from the first end of a part's blocks to the last."""
    ends = [end for _, end in blocks_of(panel, part)]
    return max(ends) - min(ends)


def pause(panel: str) -> float:
    """The time from the last end of the product to the first begin of the exchange."""
    product, exchange = (blocks_of(panel, part) for part in ("product", "exchange"))
    return min(begin for begin, _ in exchange) - max(end for _, end in product)


def overlaps(rows: Sequence[Row]) -> list[Row]:
    """The rows in which a block begins before the one ahead of it ends."""
    return [row for row in rows if any(later[0] < former[1] for (_, former), (_, later) in pairwise(row))]


def _elements(panel: str, most: float) -> Iterator[str]:
    """Draw a thin bar for each block, one colour after the other, and the axis below."""
    rows = rows_of(panel)
    bottom = len(rows) * ROW
    scale = (WIDTH - LEFT - RIGHT) / most
    for tick in linear_ticks(most):
        if tick <= most:
            x = LEFT + scale * tick
            yield f'<path class="grid" d="M{x:.1f} 0V{bottom + 3:.1f}"/>'
            yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{compact(tick)}</text>'
    for part, key in PARTS.items():
        bars = [
            f"M{LEFT + scale * times[0]:.2f} {ROW * (index + 0.5):.1f}H{LEFT + scale * times[1]:.2f}"
            for index, row in enumerate(rows)
            for name, times in row
            if name == part
        ]
        words = f"{len(bars)} blocks of the {key.label}"
        yield f'<g class="{key.colour}"><path fill="none" stroke="currentColor" stroke-width="{ROW + 0.1:.1f}" '
        yield f'd="{"".join(bars)}"><title>{safe(words)}</title></path></g>'
    axis = "µs after the first block; a row for each SM"
    yield f'<text class="axis" x="{WIDTH / 2:g}" y="{bottom + 31:.1f}" text-anchor="middle">{axis}</text>'


def blocks_figure() -> str:
    """Return the file: a panel for each way, one below the other and on one scale."""
    line = traced_line()
    most = max(last_end(panel) for panel in PANELS)
    sheet = Sheet(WIDTH + 2 * MARGIN)
    sheet.write(TITLE, 15, "title")
    sheet.write(
        f"One run of rank 0 of {line['ranks']} on {line['gpu']}, {line['date']}, commit {line['commit']}. "
        f"{line['tokens']} tokens a rank, hidden {line['hidden']}, top-{line['topk']} of {line['experts']} experts, "
        f"{line['dtype']}. L2 cache cold."
    )
    sheet.add_legend(list(PARTS.values()))
    for panel, name in PANELS.items():
        drawing = Drawing(WIDTH, len(rows_of(panel)) * ROW + 36, "".join(_elements(panel, most)))
        sheet.add_row([(f"{name}: {compact(last_end(panel))} µs", drawing)], WIDTH, 1)
    sheet.write(
        f"A line for each block; lines touch. Beside the product the combine has {line['sms']} SMs. "
        "Which SM a block had was not stored: a block that waited for one is drawn after one that had ended. "
        "Times of one rank in one run are not the page's medians of the slower rank."
    )
    return sheet.file(TITLE)
