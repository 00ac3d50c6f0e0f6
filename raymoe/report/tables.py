"""Makes the tables of a run: results, backends side by side, overlap with a product, linear fits, and timelines."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raymoe.exchange.peer.trace import FORMER_NAMES, POINTS
from raymoe.report.backends import sentences
from raymoe.report.bandwidth import bandwidth_tables
from raymoe.report.columns import (
    SETTINGS,
    WORD_IN_CASE,
    Column,
    byte_size,
    caption_of,
    columns_of,
    shares_of_link,
    show,
)
from raymoe.report.layer_parts import layer_sentences, layer_tables
from raymoe.report.measures import measured_link_gbps, us
from raymoe.report.product_curves import product_tables
from raymoe.report.results import Line, displayed

# Exchanges side by side: a small table for each operation, with a row for each number of tokens and a column for each
# backend.

_WITHIN_A_GROUP = ("op", "backend", "transport", "tokens", "sms", "l2", "graph")


@dataclass(frozen=True)
class Group:
    """Lines of one operation that differ only in the keys of `_WITHIN_A_GROUP`."""

    op: str
    setting: str
    """Settings that differ from other groups, as `wire float8_e4m3, routing zipf`; empty if there are none."""
    lines: list[Line]
    named_keys: frozenset[str]
    """Config keys that `setting`, the rows or the backend's name show already."""

    def label(self, line: Line) -> str:
        """Name the backend of a line, with the further settings that its case names.

        >>> group = Group("dispatch", "", [], frozenset({"backend", "tokens"}))
        >>> group.label({"backend": "fused", "case": "backend=fused,tokens=8,sms=24"})
        'fused sms=24'
        """
        words = [word for word in str(line["case"]).split(",") if "=" in word]
        further = (word for word in words if word.partition("=")[0] not in self.named_keys)
        return " ".join([str(line["backend"]), *further])


def groups_of(lines: Sequence[Line]) -> list[Group]:
    """Group the exchanges between GPUs among these lines. Empty if all have the same number of tokens."""
    lines = [line for line in lines if line["workload"] == "exchange" and line["l2"]]
    lines = [line for line in lines if line["us_p50"] and line["tokens"]]
    return grouped(lines) if len({line["tokens"] for line in lines}) > 1 else []


def grouped(lines: Sequence[Line]) -> list[Group]:
    """Group lines by operation, and by the settings that a group does not compare."""
    differing = [key for key in SETTINGS if key not in _WITHIN_A_GROUP and len({line[key] for line in lines}) > 1]
    named_keys = frozenset({"backend", "tokens", *(WORD_IN_CASE.get(key, key) for key in differing)})
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        setting = ", ".join(f"{SETTINGS[key]} {show(key, line[key])}" for key in differing)
        groups.setdefault((str(line["op"]), setting), []).append(line)
    return [Group(op, setting, group, named_keys) for (op, setting), group in groups.items()]


def side_by_side(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make the tables that compare backends, each with its title; none if there is only one backend.

    A cell is `us (GB/s, share)`: the median time of the slowest rank, the rate at the busiest port, and a share. The
    share is that of the links, as far as their limit is known (`shares_of_link`).
    """
    if len({line["backend"] for line in lines}) < 2:
        return
    for group in groups_of(lines):
        setting = f", {group.setting}" if group.setting else ""
        limits = {measured_link_gbps(line["device"]) for line in group.lines if not line["gbps_link"]} - {None}
        measured = any(line["gbps_link"] for line in group.lines)
        share = ", of the links" if measured else f", of {limits.pop():.0f}" if len(limits) == 1 else ""
        by_l2: dict[str, list[Line]] = {}
        for line in group.lines:
            by_l2.setdefault(str(line["l2"]), []).append(line)
        for l2, lines_of_l2 in by_l2.items():
            title = f"{group.op}, {l2} L2{setting}: us, p50 / p99 (GB/s{share}){mean_of_runs(lines_of_l2)}"
            yield title, _backend_columns(group, lines_of_l2)


def mean_of_runs(lines: Sequence[Line]) -> str:
    """Say where a sample is the mean of several runs, as in graphs of few tokens; nothing where none is.

    >>> mean_of_runs([{"tokens": 16, "runs": 20}, {"tokens": 128, "runs": 20}, {"tokens": 4096, "runs": 1}])
    '; up to 128 tokens a sample is the mean of 20 runs'
    """
    many = [line for line in lines if int(str(line.get("runs") or 1)) > 1]
    if not many:
        return ""
    tokens, runs = (max(int(str(line[key] or 0)) for line in many) for key in ("tokens", "runs"))
    return f"; up to {tokens} tokens a sample is the mean of {runs} runs"


MOST_BACKENDS = 64
"""Columns of a table side by side. A hostile file could name thousands of backends and thousands of token counts."""


def _backend_columns(group: Group, lines: Sequence[Line]) -> list[Column]:
    tokens = sorted({int(str(line["tokens"])) for line in lines})
    cells: dict[str, dict[int, str]] = {}
    wire: dict[int, str] = {}
    for line in lines:
        count = int(str(line["tokens"]))
        label = group.label(line)
        if label in cells or len(cells) < MOST_BACKENDS:
            cells.setdefault(label, {})[count] = _cell(line)
        wire.setdefault(count, byte_size(line["bytes_wire"]))
    return [
        Column("tokens", [str(count) for count in tokens], right=True),
        Column("on wire", [wire.get(count, "-") for count in tokens], right=True),
        *(Column(label, [row.get(count, "-") for count in tokens], right=True) for label, row in cells.items()),
    ]


def _cell(line: Line) -> str:
    tail = "" if line["us_p99"] is None else f" / {float(str(line['us_p99'])):,.1f}"
    [share] = shares_of_link([line])
    of = "" if share is None else f", {share:.0%}"
    rate = "" if line["gbps_wire"] is None else f" ({float(str(line['gbps_wire'])):.0f}{of})"
    return f"{us(line):,.1f}{tail}{rate}"


# Exchanges beside a matrix product: how much each slows the other, and how much time running both at once saves.

PRODUCT = "product"


@dataclass(frozen=True)
class OverlapTimes:
    """Microseconds of an operation and a product in one case: each alone, each beside the other, and both."""

    case: str
    alone: float
    product: float
    beside: float
    product_beside: float
    both: float
    """Until the last of the two ends."""

    @property
    def saved(self) -> float:
        """The share of the time one after the other that running both at once saves.

        >>> OverlapTimes("sms=24", alone=500.0, product=500.0, beside=550.0, product_beside=600.0, both=600.0).saved
        0.4
        """
        return 1 - self.both / (self.alone + self.product)


def overlap_times(lines: Sequence[Line], op: str) -> list[OverlapTimes]:
    """Give the times of each case that ran this operation beside a product."""
    wanted = {
        "alone": (op, None),
        "product": (PRODUCT, None),
        "beside": (op, PRODUCT),
        "product_beside": (PRODUCT, op),
        "both": (f"{op}+{PRODUCT}", None),
    }
    by_case: dict[tuple[object, object], dict[tuple[object, object], float]] = {}
    for line in lines:
        if line["workload"] == "overlap" and line["us_p50"]:
            by_case.setdefault((line["run"], line["case"]), {})[line["op"], line["beside"]] = us(line)
    return [
        OverlapTimes(str(case), **{name: times[key] for name, key in wanted.items()})
        for (_, case), times in by_case.items()
        if all(key in times for key in wanted.values())
    ]


def overlaps(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each operation. Its title names the case in which both together take the least time."""
    for op in ("dispatch", "combine"):
        cases = overlap_times(lines, op)
        if not cases:
            continue
        best = min(cases, key=lambda case: case.both)
        yield (
            f"{op} beside a product, us: alone, beside, slower by; both finish first with {best.case}",
            [
                Column("case", [case.case for case in cases]),
                *_slowdown_columns(op, [(case.alone, case.beside) for case in cases]),
                *_slowdown_columns(PRODUCT, [(case.product, case.product_beside) for case in cases]),
                Column("both", [f"{case.both:,.1f}" for case in cases], right=True),
                Column("saved", [f"{case.saved:.0%}" for case in cases], right=True),
            ],
        )


def _slowdown_columns(name: str, times: Sequence[tuple[float, float]]) -> Iterator[Column]:
    yield Column(name, [f"{alone:,.1f}" for alone, _ in times], right=True)
    yield Column("beside", [f"{beside:,.1f}" for _, beside in times], right=True)
    yield Column("slower", [f"{beside / alone - 1:+.0%}" for alone, beside in times], right=True)


# Time against tokens: a straight line through the points of many tokens, and their distance from it.

FROM_TOKENS = 2048
"""With fewer tokens, fixed costs are a large part of the time, and `fused` may use other kernels (`is_ll`)."""

LEAST_POINTS = 3
LINEAR = 0.03
"""Time is called linear in tokens if no point is further from the line than this share of its time."""


@dataclass(frozen=True)
class Fit:
    """`us = us_at_zero + us_per_token * tokens` by least squares, and the largest distance of a point from it."""

    us_at_zero: float
    us_per_token: float
    furthest_us: float
    furthest: float
    """The same distance as a share of the time measured at that point."""

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> Fit:
        """Fit a line to (tokens, us).

        >>> fit = Fit.of([(1024, 112.4), (2048, 214.8), (4096, 419.6)])
        >>> round(fit.us_at_zero, 1), round(fit.us_per_token, 3), round(abs(fit.furthest_us), 6), fit.linear
        (10.0, 0.1, 0.0, True)
        >>> Fit.of([(1024, 100.0), (2048, 300.0), (4096, 400.0)]).linear
        False
        """
        mean_tokens = sum(tokens for tokens, _ in points) / len(points)
        mean_us = sum(us for _, us in points) / len(points)
        spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
        slope = sum((tokens - mean_tokens) * (us - mean_us) for tokens, us in points) / spread
        at_zero = mean_us - slope * mean_tokens
        distances = [(us - at_zero - slope * tokens, us) for tokens, us in points]
        furthest, measured_us = max(distances, key=lambda pair: abs(pair[0]) / pair[1])
        return cls(at_zero, slope, furthest, abs(furthest) / measured_us)

    @property
    def linear(self) -> bool:
        return self.furthest <= LINEAR


def fits(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table of the fits to the cold times of each operation and backend, from FROM_TOKENS on.

    A fit needs LEAST_POINTS different numbers of tokens. Without fits there is no table.
    """
    many = [line for line in lines if line["l2"] == "cold" and int(str(line["tokens"] or 0)) >= FROM_TOKENS]
    rows = [(group, label, fit) for group in groups_of(many) for label, fit in _fits_of(group)]
    if not rows:
        return
    yield (
        f"time against tokens from {FROM_TOKENS} on, cold L2: a straight line, and the largest distance from it",
        [
            Column("op", [", ".join(filter(None, (group.op, group.setting))) for group, _, _ in rows]),
            Column("backend", [label for _, label, _ in rows]),
            Column("us at 0", [f"{fit.us_at_zero:.1f}" for *_, fit in rows], right=True),
            Column("us per 1024", [f"{1024 * fit.us_per_token:.2f}" for *_, fit in rows], right=True),
            Column("off by us", [f"{fit.furthest_us:+.1f}" for *_, fit in rows], right=True),
            Column("off by", [f"{fit.furthest:.1%}" for *_, fit in rows], right=True),
            Column("linear", ["yes" if fit.linear else "NO" for *_, fit in rows], right=True),
        ],
    )


def _fits_of(group: Group) -> Iterator[tuple[str, Fit]]:
    points: dict[str, dict[int, float]] = {}
    for line in group.lines:
        points.setdefault(group.label(line), {})[int(str(line["tokens"]))] = float(str(line["us_p50"]))
    for label, by_tokens in points.items():
        if len(by_tokens) >= LEAST_POINTS:
            yield label, Fit.of(sorted(by_tokens.items()))


# Timelines: when the blocks of a traced operation reached each point of its kernel.


@dataclass(frozen=True)
class PointTimes:
    """Microseconds after the start at which the first, the median and the last block reached a point."""

    point: str
    first: float
    median: float
    last: float


def timeline_of(line: Line) -> list[PointTimes]:
    """Give the points of a line's timeline in the order of time; empty if the line has none."""
    recorded: Any = line["timeline"]
    return [PointTimes(FORMER_NAMES.get(name, name), *times) for name, *times in recorded or ()]


def timelines(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each line with a timeline. Its title also has the operation's time from the timed steps, launch
    included."""
    runs = {line["run"] for line in lines}
    for line in lines:
        points = timeline_of(line)
        if not points:
            continue
        known = POINTS.get(str(line["op"]), {})
        meanings = [known.get(times.point) for times in points]
        which = f"{line['case']}, run {line['run']}" if len(runs) > 1 else str(line["case"])
        clock = f"{us(line):.1f}" if line["us_p50"] else "not known"
        yield (
            f"where the time of {line['op']} goes, {which}: us after the start ({clock} by the clock)",
            [
                Column("point", [times.point for times in points]),
                Column("first block", [f"{times.first:.1f}" for times in points], right=True),
                Column("median", [f"{times.median:.1f}" for times in points], right=True),
                Column("last block", [f"{times.last:.1f}" for times in points], right=True),
                Column("blocks", [point.blocks if point else "-" for point in meanings]),
                Column("meaning", [point.meaning if point else "-" for point in meanings]),
            ],
        )


# The text of the tables: drawn by rich on a terminal, plain ASCII with one line a row elsewhere.


def render(lines: Sequence[Line], *, terminal: bool = False, width: int = 100) -> str:
    """Make the text of all tables, a part for each workload. It ends with a line end, or is empty without lines.

    After the results of a workload come, where the lines have them: backends side by side, linear fits, overlap with a
    product, timelines, bandwidth of memory, products of experts, and the parts of layers.
    """
    parts = []
    one_run = len({line["run"] for line in lines}) == 1
    for of_workload in by_workload(displayed(lines)):
        columns = columns_of(of_workload)
        above = [caption_of(of_workload), *(_sentences(of_workload) if one_run else [])]
        caption = "\n".join(textwrap.fill(text, max(width, 40), **_INDENTED) for text in above)
        # rich folds or cuts rows that do not fit. A plain row may pass the edge, but is complete.
        fit = sum(size + 2 for size in _widths(columns)) <= width
        parts.append(f"{caption}\n{_drawn(columns, width) if terminal and fit else plain_table(columns)}")
        parts += [f"{title}\n{plain_table(its_columns)}" for title, its_columns in further_tables(of_workload)]
    return "\n".join(parts)


def _sentences(lines: Sequence[Line]) -> list[str]:
    return [*layer_sentences(lines), *sentences(lines)]


_INDENTED: dict[str, Any] = {"subsequent_indent": "  ", "break_on_hyphens": False}


def by_workload(lines: Sequence[Line]) -> list[list[Line]]:
    """Group lines by workload."""
    workloads: dict[object, list[Line]] = {}
    for line in lines:
        workloads.setdefault(line["workload"], []).append(line)
    return list(workloads.values())


def further_tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make the tables that follow the results of a workload, each with its title. Those of several runs are apart."""
    runs = dict.fromkeys(line["run"] for line in lines)
    for run in runs:
        for title, columns in _further_of([line for line in lines if line["run"] == run]):
            yield (f"{run}: {title}" if len(runs) > 1 else title), columns
    yield from timelines(lines)
    yield from bandwidth_tables(lines)
    yield from product_tables(lines)


def _further_of(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    yield from side_by_side(lines)
    yield from fits(lines)
    yield from overlaps(lines)
    yield from layer_tables(lines)


MOST_WIDTH = 120
"""Characters to which a column's cells are padded. A longer cell is whole; the rest of its row moves to the right."""


def _widths(columns: Sequence[Column]) -> list[int]:
    return [max(map(len, (column.header, *column.cells))) for column in columns]


def plain_table(columns: Sequence[Column]) -> str:
    """Write one line a row, never wrapped or cut, so that a log can be searched by line."""
    widths = [min(width, MOST_WIDTH) for width in _widths(columns)]
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
