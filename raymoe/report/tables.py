"""The tables at the end of a run: results, exchanges side by side, beside a product, over tokens, and time lines."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymoe.device.trace import POINTS
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
from raymoe.report.copies import gave, us
from raymoe.report.results import Line, Record

# Exchanges side by side: for each operation a small table, tokens downwards, backends across.

_ACROSS = ("op", "backend", "transport", "tokens", "sms", "l2", "graph")


@dataclass(frozen=True)
class Group:
    """Lines of one operation that differ in tokens, in backend and in what goes with that, and in the L2 cache."""

    op: str
    setting: str
    """What sets the group apart from others, as `wire float8_e4m3, routing zipf`; empty where nothing does."""
    lines: list[Line]
    told: frozenset[str]

    def label(self, line: Line) -> str:
        """The backend of a line, and whatever else the name of its case tells of it.

        >>> group = Group("dispatch", "", [], frozenset({"backend", "tokens"}))
        >>> group.label({"backend": "fused", "case": "backend=fused,tokens=8,sms=24"})
        'fused sms=24'
        """
        words = [word for word in str(line["case"]).split(",") if "=" in word]
        return " ".join([str(line["backend"]), *(word for word in words if word.partition("=")[0] not in self.told)])


def groups_of(lines: Sequence[Line]) -> list[Group]:
    """The exchanges between GPUs among these lines; none where there is one count of tokens only."""
    lines = [line for line in lines if line["workload"] == "exchange" and line["us_p50"] and line["l2"]]
    if len({line["tokens"] for line in lines}) < 2:
        return []
    differing = [key for key in SETTINGS if key not in _ACROSS and len({line[key] for line in lines}) > 1]
    told = frozenset({"backend", "tokens", *(WORD_IN_CASE.get(key, key) for key in differing)})
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        setting = ", ".join(f"{SETTINGS[key]} {show(key, line[key])}" for key in differing)
        found.setdefault((str(line["op"]), setting), []).append(line)
    return [Group(op, setting, group, told) for (op, setting), group in found.items()]


def tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Title and columns of each table; none where there is one backend only.

    A cell is `us (GB/s, share)`: the median time of the slowest rank, what passed the busiest port in it, and what
    share that is of the most that such links were seen to give, where that is known.
    """
    if len({line["backend"] for line in lines}) < 2:
        return
    for group in groups_of(lines):
        setting = f", {group.setting}" if group.setting else ""
        for l2 in dict.fromkeys(str(line["l2"]) for line in group.lines):
            limits = {most for line in group.lines if (most := gave(line["device"]))}
            share = f", of {limits.pop():.0f}" if len(limits) == 1 else ""
            yield f"{group.op}, {l2} L2{setting}: us (GB/s{share})", _columns(group, l2)


def _columns(group: Group, l2: str) -> list[Column]:
    tokens = sorted({int(str(line["tokens"])) for line in group.lines})
    cells: dict[str, dict[int, str]] = {}
    wire: dict[int, str] = {}
    for line in group.lines:
        if line["l2"] == l2:
            count = int(str(line["tokens"]))
            cells.setdefault(group.label(line), {})[count] = _cell(line)
            wire.setdefault(count, byte_size(line["bytes_wire"]))
    return [
        Column("tokens", [str(count) for count in tokens], right=True),
        Column("on wire", [wire.get(count, "-") for count in tokens], right=True),
        *(Column(label, [row.get(count, "-") for count in tokens], right=True) for label, row in cells.items()),
    ]


def _cell(line: Line) -> str:
    us = float(str(line["us_p50"]))
    [share] = shares_of_link([line])
    of = "" if share is None else f", {share:.0%}"
    rate = "" if line["gbps_wire"] is None else f" ({float(str(line['gbps_wire'])):.0f}{of})"
    return f"{us:,.1f}{rate}"


# Exchanges beside a matrix product: what each costs the other, and what the two save by running at once.

PRODUCT = "product"


@dataclass(frozen=True)
class Pair:
    """One case's times, in microseconds: an operation and a product, each alone, each beside the other, and both."""

    case: str
    alone: float
    product: float
    beside: float
    product_beside: float
    both: float

    @property
    def saved(self) -> float:
        """Of the time that the two take one after the other, the share that running them at once saves.

        >>> Pair("sms=24", alone=500.0, product=500.0, beside=550.0, product_beside=600.0, both=600.0).saved
        0.4
        """
        return 1 - self.both / (self.alone + self.product)


def pairs_of(lines: Sequence[Line], op: str) -> list[Pair]:
    """The cases that ran this operation beside a product, in their order."""
    wanted = {
        "alone": (op, None),
        "product": (PRODUCT, None),
        "beside": (op, PRODUCT),
        "product_beside": (PRODUCT, op),
        "both": (f"{op}+{PRODUCT}", None),
    }
    of_case: dict[tuple[object, object], dict[tuple[object, object], float]] = {}
    for line in lines:
        if line["workload"] == "overlap" and line["us_p50"]:
            of_case.setdefault((line["run"], line["case"]), {})[line["op"], line["beside"]] = us(line)
    return [
        Pair(str(case), **{name: times[key] for name, key in wanted.items()})
        for (_, case), times in of_case.items()
        if all(key in times for key in wanted.values())
    ]


def overlaps(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """A table for each operation; its title names the case in which both are done first."""
    for op in ("dispatch", "combine"):
        pairs = pairs_of(lines, op)
        if not pairs:
            continue
        best = min(pairs, key=lambda pair: pair.both)
        yield (
            f"{op} beside a product, us: alone, beside, slower by; both are done first with {best.case}",
            [
                Column("case", [pair.case for pair in pairs]),
                *_slowed(op, [(pair.alone, pair.beside) for pair in pairs]),
                *_slowed(PRODUCT, [(pair.product, pair.product_beside) for pair in pairs]),
                Column("both", [f"{pair.both:,.1f}" for pair in pairs], right=True),
                Column("saved", [f"{pair.saved:.0%}" for pair in pairs], right=True),
            ],
        )


def _slowed(name: str, times: Sequence[tuple[float, float]]) -> Iterator[Column]:
    yield Column(name, [f"{alone:,.1f}" for alone, _ in times], right=True)
    yield Column("beside", [f"{beside:,.1f}" for _, beside in times], right=True)
    yield Column("slower", [f"{beside / alone - 1:+.0%}" for alone, beside in times], right=True)


# Time against tokens where there are many: a straight line through what was measured, and how far from it that is.

FROM_TOKENS = 2048
"""Below, what does not depend on tokens is a large part of the time, and rows travel in another way (`is_ll`)."""

LEAST_POINTS = 3
LINEAR = 0.03
"""Of the time: where nothing is further from the line, time is called linear in tokens."""


@dataclass(frozen=True)
class Fit:
    """`us = at_none + each * tokens`, by least squares, and the point that is furthest from it."""

    at_none: float
    each: float
    furthest_us: float
    furthest: float
    """Of the time that was measured there, a share."""

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> Fit:
        """
        >>> fit = Fit.of([(1024, 112.4), (2048, 214.8), (4096, 419.6)])
        >>> round(fit.at_none, 1), round(fit.each, 3), round(abs(fit.furthest_us), 6), fit.linear
        (10.0, 0.1, 0.0, True)
        >>> Fit.of([(1024, 100.0), (2048, 300.0), (4096, 400.0)]).linear
        False
        """
        mean_tokens = sum(tokens for tokens, _ in points) / len(points)
        mean_us = sum(us for _, us in points) / len(points)
        spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
        each = sum((tokens - mean_tokens) * (us - mean_us) for tokens, us in points) / spread
        at_none = mean_us - each * mean_tokens
        off = [(us - at_none - each * tokens, us) for tokens, us in points]
        furthest, there = max(off, key=lambda pair: abs(pair[0]) / pair[1])
        return cls(at_none, each, furthest, abs(furthest) / there)

    @property
    def linear(self) -> bool:
        return self.furthest <= LINEAR


def fits(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """A table of the lines through the cold times of each operation and backend from FROM_TOKENS on; none where no
    backend was measured at three counts of tokens or more."""
    many = [line for line in lines if line["l2"] == "cold" and int(str(line["tokens"] or 0)) >= FROM_TOKENS]
    rows = [(group, label, fit) for group in groups_of(many) for label, fit in _fits_of(group)]
    if not rows:
        return
    yield (
        f"time against tokens from {FROM_TOKENS} on, cold L2: a straight line, and the largest distance from it",
        [
            Column("op", [", ".join(filter(None, (group.op, group.setting))) for group, _, _ in rows]),
            Column("backend", [label for _, label, _ in rows]),
            Column("us at 0", [f"{fit.at_none:.1f}" for *_, fit in rows], right=True),
            Column("us per 1024", [f"{1024 * fit.each:.2f}" for *_, fit in rows], right=True),
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


# Where the time of a traced operation goes: when blocks came to which point of its kernel.


@dataclass(frozen=True)
class Reached:
    """A point, and the microseconds after the start at which the first, the median and the last block came to it."""

    point: str
    first: float
    median: float
    last: float


def reached(line: Line) -> list[Reached]:
    """In the order of time; empty where a line has no timeline."""
    told: Any = line["timeline"]
    return [Reached(*each) for each in told or ()]


def timelines(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """A table for each line with a timeline. Its title also says how long the operation takes by the clock of its
    steps, launch included."""
    runs = {line["run"] for line in lines}
    for line in lines:
        points = reached(line)
        if not points:
            continue
        known = POINTS.get(str(line["op"]), {})
        which = f"{line['case']}, run {line['run']}" if len(runs) > 1 else str(line["case"])
        yield (
            f"where the time of {line['op']} goes, {which}: us after the start ({us(line):.1f} by the clock)",
            [
                Column("point", [each.point for each in points]),
                Column("first block", [f"{each.first:.1f}" for each in points], right=True),
                Column("median", [f"{each.median:.1f}" for each in points], right=True),
                Column("last block", [f"{each.last:.1f}" for each in points], right=True),
                Column("blocks", [known[each.point].who if each.point in known else "-" for each in points]),
                Column("meaning", [known[each.point].what if each.point in known else "-" for each in points]),
            ],
        )


# The table at the end of a run: drawn by rich on a terminal, plain ASCII of one line a row elsewhere.


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


# `raymoe report RUN...`: how each run ended, and one table of all their results.


def overview(paths: Sequence[Path], *, terminal: bool = False, width: int = 100) -> str:
    """The text to print. ConfigError when a path is no run directory."""
    records = [Record.read(path) for path in paths]
    heads = "".join(f"{_headline(record)}\n" for record in records)
    lines = [line for record in records for line in record.lines]
    return heads + ("\n" + render(lines, terminal=terminal, width=width) if lines else "")


def _headline(record: Record) -> str:
    cases = len({line["case"] for line in record.lines})
    done = f"{cases} finished case{'' if cases == 1 else 's'}"
    if record.summary is None:
        return f"{record.run}: not ended (running, or killed), {done}"
    message = f": {record.summary['message']}" if record.summary.get("message") else ""
    return f"{record.run}: {record.summary.get('status')}, exit code {record.summary.get('exit_code')}, {done}{message}"
