"""Draws exchanges: over tokens and SMs, the split of their time, timelines, and overlap.

All lines are from `displayed`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from raymoe.exchange.peer.trace import COUNTING, FINAL, LOCAL, PLACEMENT, POINTS, SENDERS
from raymoe.report.columns import BASELINE, EXCHANGES, Column, sends_dispatch_rows, shares_of_link, show
from raymoe.report.figure import Figure, Panel, curve_columns, how_and_where
from raymoe.report.measures import gbps, integer, link_of, measured_link_gbps, ranks_on, three_digits, us
from raymoe.report.results import Line
from raymoe.report.svg import (
    MOST_CURVES,
    Axis,
    Bar,
    BarChart,
    BarSegment,
    Chart,
    Curve,
    Key,
    Limit,
    Point,
    compact,
    duration,
)
from raymoe.report.tables import Group, grouped, overlap_times, timeline_of

MOST_BARS = 40
MOST_PANELS = 16

_TITLES = {"exchange": "Dispatch, then combine", "step": "Step"}


def exchange_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the lines of one workload: each operation over tokens, or bars where there is one number of tokens."""
    groups = grouped(lines)
    several = len({line["run"] for line in lines}) > 1
    styles: dict[str, int] = {}
    for group in groups:  # all groups, because a backend has the same colour in all figures
        for line in group.lines:
            if line["backend"] != BASELINE:
                styles.setdefault(group.label(line), len(styles))
    for group in groups:
        if len({line["tokens"] for line in group.lines}) > 1:
            yield _token_figure(_with_limit(group, groups), styles, several)
        else:
            yield _bar_figure(group, several)
    by_setting: dict[str, list[Group]] = {}
    for group in groups:
        by_setting.setdefault(group.setting, []).append(group)
    for of_setting in by_setting.values():
        yield from _split_figures(of_setting, several)


def _with_limit(group: Group, groups: Sequence[Group]) -> Group:
    """Add the lines of row_push to a combine: it sends the rows of dispatch back, so its limit is the same."""
    if group.op != "combine" or not all(sends_dispatch_rows(line) for line in group.lines):
        return group
    dispatches = (other for other in groups if (other.op, other.setting) == ("dispatch", group.setting))
    limit = [line for dispatch in dispatches for line in dispatch.lines if line["backend"] == BASELINE]
    return Group(group.op, group.setting, [*group.lines, *limit], group.named_keys)


def _stem(group: Group, what: str) -> str:
    """Name a figure's file: `dispatch`, `dispatch-routing-zipf`, `layer-step`."""
    workload = str(group.lines[0]["workload"])
    words = [*([workload] if workload != "exchange" else []), what, *re.findall(r"[A-Za-z0-9_.]+", group.setting)]
    return "-".join(words)


def _title(group: Group, over: str = "") -> str:
    return _TITLES.get(group.op, group.op.capitalize()) + over + (f", {group.setting}" if group.setting else "")


def _label(group: Group, line: Line, several: bool) -> str:
    return f"{line['run']}: {group.label(line)}" if several else group.label(line)


def _token_figure(group: Group, styles: Mapping[str, int], several: bool) -> Figure:
    """Draw time and rate over tokens, a curve for each backend."""
    by_label: dict[str, dict[int, Line]] = {}
    first = group.lines[0]["run"]
    for line in group.lines:
        by_label.setdefault(_label(group, line, several), {})[integer(line, "tokens")] = line
    times, rates = [], []
    for label, by_tokens in by_label.items():
        # A backend has one colour in all runs. The first run has solid lines.
        line = next(iter(by_tokens.values()))
        style = styles.get(group.label(line), -1), several and line["run"] != first
        times.append(Curve(label, [Point(count, us(line)) for count, line in sorted(by_tokens.items())], *style))
        # Nothing crosses a link with a single rank, and perhaps with a single token.
        crossing = [(count, gbps(line)) for count, line in sorted(by_tokens.items()) if has_rate(line)]
        if crossing:
            rates.append(Curve(label, [Point(count, rate) for count, rate in crossing], *style))
    x = Axis("tokens a rank", log=True, write=lambda value: f"{value:.0f}")
    charts = [Chart("Time", x, Axis("µs, slowest rank", log=True), times[:MOST_CURVES])]
    limit_curve = _limit_curve(group.lines)
    if rates:
        limits = _link_limits(group.lines)
        rates = [*rates[: MOST_CURVES - len(limit_curve)], *limit_curve]
        charts.append(Chart("Bandwidth", x, Axis("GB/s, busiest port", log=False), rates[:MOST_CURVES], limits))
    return Figure(
        _stem(group, group.op),
        _title(group, " over tokens"),
        how_and_where(group.lines),
        [Panel(chart) for chart in charts],
        curve_columns("tokens", str, **{"us": times, "GB/s": rates}),
        [*times[:MOST_CURVES], *(limit_curve if rates else [])],
    )


def _limit_curve(lines: Sequence[Line]) -> list[Curve]:
    """Give the curve of what the links gave for as many bytes in the same run; nothing where that is not known."""
    by_tokens: dict[int, float] = {}
    for line in lines:
        if line["gbps_link"] and line["gbps_wire"]:
            tokens = integer(line, "tokens")
            by_tokens[tokens] = max(by_tokens.get(tokens, 0.0), float(str(line["gbps_link"])))
    points = [Point(tokens, rate) for tokens, rate in sorted(by_tokens.items())]
    return [Curve("plain copies of as many bytes", points, -1, dashed=True)] if points else []


def _link_limits(lines: Sequence[Line]) -> list[Limit]:
    limits = set()
    for device in {line["device"] for line in lines}:
        if link := link_of(device):
            limits.add(Limit(link[0], f"{link[0]:.0f} GB/s, {link[1]}"))
        unmeasured = all(not line["gbps_link"] for line in lines)
        if unmeasured and (most := measured_link_gbps(device)):
            limits.add(Limit(most, f"{most:.0f} GB/s, most measured"))
    return sorted(limits, key=lambda limit: limit.value)


def _bar_figure(group: Group, several: bool) -> Figure:
    lines = group.lines[:MOST_BARS]
    rows = []
    for index, line in enumerate(lines):
        time, least, most = us(line), _or(line["us_min"], us(line)), _or(line["us_p99"], us(line))
        grey = line["backend"] == BASELINE
        segment = BarSegment(0, time, "grey" if grey else f"c{index % 6}", f"median {time:,.1f} µs")
        rate = f", {three_digits(gbps(line))} GB/s{of_link(line)}" if has_rate(line) else ""
        rate += f", {compact(float(str(line['tokens_per_s'])))} tokens/s" if line["tokens_per_s"] else ""
        rows.append(Bar(_label(group, line, several), f"{duration(time)}{rate}", [segment], (least, most)))
    most = max(bar.whisker[1] if bar.whisker else 0 for bar in rows)
    columns = [
        Column("backend", [_label(group, line, several) for line in lines]),
        *(_times(lines, key, header) for key, header in _SPREAD.items()),
        Column("samples", [show("samples", line["samples"]) for line in lines], right=True),
    ]
    title = _title(group)
    return Figure(
        _stem(group, group.op),
        f"Time of {'a ' * (group.op == 'step')}{title[0].lower()}{title[1:]}",
        how_and_where(lines),
        [Panel(BarChart("Time", rows, most, unit="µs"))],
        columns,
        note="Bars: the median. Thin lines: from the fastest sample to the 99th percentile.",
    )


_SPREAD = {"us_min": "min us", "us_p50": "p50 us", "us_p99": "p99 us", "us_max": "max us"}


def _times(lines: Sequence[Line], key: str, header: str) -> Column:
    cells = ["-" if line[key] is None else f"{float(str(line[key])):,.1f}" for line in lines]
    return Column(header, cells, right=True)


def has_rate(line: Line) -> bool:
    """Whether the line's GB/s are those of a transfer. Older runs also have some of a layer's whole step."""
    return bool(line["gbps_wire"]) and line["op"] in EXCHANGES


def of_link(line: Line) -> str:
    """Say which share of the links' limit a line reaches; nothing where the limit is not known."""
    [share] = shares_of_link([line])
    return "" if share is None else f", {share:.0%} of the links"


def _or(value: object, otherwise: float) -> float:
    return otherwise if value is None else float(str(value))


def _split_figures(groups: Sequence[Group], several: bool) -> Iterator[Figure]:
    """Split the time of an exchange into dispatch and combine, for the largest number of tokens."""
    by_label: dict[str, dict[str, Line]] = {}
    tokens = max((integer(line, "tokens") for group in groups for line in group.lines), default=0)
    for group in groups:
        for line in group.lines:
            if line["tokens"] == tokens and group.op in EXCHANGES:
                by_label.setdefault(_label(group, line, several), {})[group.op] = line
    whole = {label: by_op for label, by_op in by_label.items() if len(by_op) == len(EXCHANGES)}
    if not whole:
        return
    if len({by_op["dispatch"]["backend"] for by_op in whole.values()}) > 1:
        # Systems with as many SMs stand side by side. `auto` comes last.
        whole = dict(sorted(whole.items(), key=lambda bar: sms_in_case(bar[1]["dispatch"]) or math.inf))
    rows = []
    times: dict[str, tuple[float, float, float]] = {}
    for label, by_op in list(whole.items())[:MOST_BARS]:
        dispatch, combine, both = (us(by_op[op]) for op in EXCHANGES)
        times[label] = dispatch, combine, both
        ends = (0.0, dispatch, dispatch + combine, max(both, dispatch + combine))
        segments = [
            BarSegment(ends[i], ends[i + 1], key.colour, f"{key.label} {ends[i + 1] - ends[i]:,.1f} µs")
            for i, key in enumerate(_SPLIT)
            if ends[i + 1] > ends[i]
        ]
        rows.append(Bar(label, duration(both), segments, ticks=[both]))
    columns = [Column("backend", list(times))]
    for index, header in enumerate(("dispatch us", "combine us", "both us")):
        columns.append(Column(header, [f"{of_label[index]:,.1f}" for of_label in times.values()], right=True))
    most = max(max(dispatch + combine, both) for dispatch, combine, both in times.values())
    yield Figure(
        _stem(groups[0], "split"),
        f"Time split of an exchange, {tokens} tokens" + (f", {groups[0].setting}" if groups[0].setting else ""),
        how_and_where([line for by_op in whole.values() for line in by_op.values()]),
        [Panel(BarChart("Time split", rows, most, unit="µs"))],
        columns,
        _SPLIT,
        "Dispatch and combine are measured alone; the thin line is the time of one after the other in one step.",
    )


_SPLIT = (Key("dispatch", "c0"), Key("combine", "c1"), Key("between them", "grey"))


# Over the SMs that an exchange may take, where a matrix varies them.

LEAST_POINTS = 3
NEAR_BEST = 1.1
"""Up to this multiple of a curve's best time counts as near the best."""

_SMS_IN_CASE = re.compile(r"(?:^|,)sms=([1-9]\d{0,5})(?:,|$)")


def sms_in_case(line: Line) -> int | None:
    """Read from a case's name how many SMs it asks for. A name without a number gives None.

    >>> sms_in_case({"case": "layout=rank,sms=24"}), sms_in_case({"case": "layout=rank,sms=auto"})
    (24, None)
    """
    number = _SMS_IN_CASE.search(str(line["case"]))
    return int(number[1]) if number else None


def sms_curves(lines: Sequence[Line], op: str) -> dict[str, dict[int, Line]]:
    """Give the lines of an operation by label and SMs: a curve for each setting with LEAST_POINTS numbers of SMs.

    >>> lines = [
    ...     {"op": "dispatch", "case": f"layout={layout},sms={sms}", "backend": "fused", "us_p50": 9.0}
    ...     for layout in ("rank", "expert") for sms in (8, 16, 24)
    ... ]
    >>> [(label, list(points)) for label, points in sms_curves(lines, "dispatch").items()]
    [('fused layout=rank', [8, 16, 24]), ('fused layout=expert', [8, 16, 24])]
    """
    swept: dict[tuple[str, ...], dict[int, Line]] = {}
    for line in lines:
        sms = sms_in_case(line)
        if line["op"] == op and line["us_p50"] and sms is not None:
            others = (word for word in str(line["case"]).split(",") if not word.startswith("sms="))
            swept.setdefault((f"run {line.get('run')}", *others), {})[sms] = line
    swept = {words: points for words, points in swept.items() if len(points) >= LEAST_POINTS}
    shared = set.intersection(*(set(words) for words in swept)) if swept else set()
    curves: dict[str, dict[int, Line]] = {}
    for words, points in swept.items():
        backend = str(next(iter(points.values()))["backend"])
        curves[" ".join([backend, *(word for word in words if word not in shared)])] = points
    return curves


def sms_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw time over SMs, with a ring at the fewest SMs whose time is within 10 % of a curve's best."""
    for op in EXCHANGES:
        swept = sms_curves(lines, op)
        if not swept:
            continue
        curves = [_sms_curve(label, points, index) for index, (label, points) in enumerate(swept.items())]
        of_op = [line for points in swept.values() for line in points.values()]
        limits = [
            Limit(least, f"{least:.0f} µs: the busiest port's bytes at the most measured on such links", below=True)
            for least in sorted({_least_us(line) for line in of_op} - {0.0})
        ]
        x = Axis("SMs that the exchange may take", log=True, write=lambda value: f"{value:.0f}")
        chart = Chart(f"{op.capitalize()} over SMs", x, Axis("µs, slowest rank"), curves[:MOST_CURVES], limits)
        tokens = "/".join(str(count) for count in sorted({integer(line, "tokens") for line in of_op}))
        yield Figure(
            f"{op}-sms",
            f"{chart.title}, {tokens} tokens a rank",
            how_and_where(of_op),
            [Panel(chart)],
            curve_columns("SMs", str, us=curves),
            curves[:MOST_CURVES],
        )


def _sms_curve(label: str, points: Mapping[int, Line], style: int) -> Curve:
    times = {sms: us(points[sms]) for sms in sorted(points)}
    best = min(times.values())
    near = min(sms for sms, time in times.items() if time <= NEAR_BEST * best)
    note = f"best {best:.0f} µs, within 10 % from {near} on"
    return Curve(label, [Point(sms, time, ring=sms == near) for sms, time in times.items()], style, note=note)


def _least_us(line: Line) -> float:
    """Give the time of the busiest port's bytes at the highest rate measured on such links; 0 if not known."""
    most = measured_link_gbps(line["device"])
    return round(gbps(line) * us(line) / most, 1) if most and line["gbps_wire"] else 0.0


# Timelines, and overlap with a product.

_BLOCKS = {"all": "c0", COUNTING: "c3", SENDERS: "c1", LOCAL: "c1", PLACEMENT: "c2", FINAL: "c2"}
_OTHERS = "grey"


def timeline_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw, for each traced operation, a bar for each point of its kernel: from the first block to the last."""
    for op, known in POINTS.items():
        traced = [line for line in lines if line["op"] == op and timeline_of(line)][:MOST_PANELS]
        if not traced:
            continue
        order = list(known)
        panels, cells = [], []
        for line, title in zip(traced, _panel_titles(traced), strict=True):
            times = timeline_of(line)
            times.sort(key=lambda time: order.index(time.point) if time.point in known else len(order))
            end = max(time.last for time in times)
            rows = []
            for time in times:
                blocks = known[time.point].blocks if time.point in known else "others"
                words = f"{time.first:.1f} to {time.last:.1f} µs, median {time.median:.1f}"
                segment = BarSegment(time.first, time.last, _BLOCKS.get(blocks, _OTHERS), words)
                rows.append(Bar(time.point, f"{time.last:.1f} µs", [segment], ticks=[time.median]))
                numbers = (f"{value:.1f}" for value in (time.first, time.median, time.last))
                cells.append((str(line["case"]), time.point, *numbers, blocks))
            chart = BarChart(title, rows, end, unit="µs after the start", tight=True)
            panels.append(Panel(chart, f"{title}: {three_digits(end)} µs"))
        headers = ("case", "point", "first us", "median us", "last us", "blocks")
        columns = [
            Column(header, list(column), right=header.endswith("us"))
            for header, column in zip(headers, zip(*cells, strict=True), strict=True)
        ]
        names = dict.fromkeys(point.blocks for point in known.values())
        yield Figure(
            f"{op}-timeline",
            f"Where the time of {op} goes",
            f"{ranks_on(traced)}. Medians of eager runs of the slowest rank; L2 cache cold.",
            panels,
            columns,
            [Key(_KEYS.get(name, name), _BLOCKS.get(name, _OTHERS)) for name in names],
            "Bars: from the first block to the last. Thin lines: the median block. Numbers: the last block.",
        )


_KEYS = {"all": "all blocks", "last": "the last block out"}


def _panel_titles(lines: Sequence[Line]) -> list[str]:
    """Title each panel with its tokens and with the settings that the cases do not share.

    >>> _panel_titles([{"case": f"backend=fused,tokens={count}", "tokens": count, "run": "r"} for count in (1, 8)])
    ['1 token', '8 tokens']
    >>> cases = [{"case": f"layout={layout},tokens=8", "tokens": 8, "run": "r"} for layout in ("rank", "expert")]
    >>> _panel_titles(cases)
    ['8 tokens, layout=rank', '8 tokens, layout=expert']
    """
    cases = [str(line["case"]).split(",") for line in lines]
    shared = set.intersection(*map(set, cases))
    several = len({line["run"] for line in lines}) > 1
    titles = []
    for line, words in zip(lines, cases, strict=True):
        tokens = "1 token" if line["tokens"] == 1 else f"{line['tokens']} tokens"
        differing = [word for word in words if word not in shared and not word.startswith("tokens=")]
        titles.append(f"{line['run']}: " * several + ", ".join([tokens, *differing]))
    return titles


def overlap_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw an operation and a product: one after the other, and both at once."""
    for op in ("dispatch", "combine"):
        cases = overlap_times(lines, op)[:MOST_BARS]
        if not cases:
            continue
        rows = []
        for case in cases:
            after = [
                BarSegment(0, case.alone, "c0", f"{op} alone {case.alone:,.1f} µs"),
                BarSegment(case.alone, case.alone + case.product, "c1", f"product alone {case.product:,.1f} µs"),
            ]
            rows.append(Bar(f"{case.case}, one after the other", duration(case.alone + case.product), after))
            at_once = [BarSegment(0, case.both, "c2", f"both {case.both:,.1f} µs")]
            saved = f"{duration(case.both)}, {case.saved:.0%} saved"
            rows.append(Bar(f"{case.case}, both at once", saved, at_once))
        columns = [Column("case", [case.case for case in cases])]
        for header, name in _OVERLAP.items():
            columns.append(Column(header, [f"{getattr(case, name):,.1f}" for case in cases], right=True))
        columns.append(Column("saved", [f"{case.saved:.0%}" for case in cases], right=True))
        most = max(max(case.both, case.alone + case.product) for case in cases)
        yield Figure(
            f"{op}-overlap",
            f"{op.capitalize()} beside a matrix product",
            how_and_where([line for line in lines if line["workload"] == "overlap"]),
            [Panel(BarChart("Overlap", rows, most, unit="µs"))],
            columns,
            [Key(op, "c0"), Key("product", "c1"), Key("both at once", "c2")],
        )


_OVERLAP = {
    "alone us": "alone",
    "product us": "product",
    "beside the product us": "beside",
    "product beside us": "product_beside",
    "both us": "both",
}
