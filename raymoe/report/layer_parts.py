"""Shows the parts of a layer, out of the lines of workload layer: their times in the step and alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymoe.report.columns import Column
from raymoe.report.figure import Figure, Panel, how_and_where
from raymoe.report.layer_times import BACKWARD, STEP, LayerParts, layer_parts
from raymoe.report.results import Line
from raymoe.report.svg import Bar, BarChart, BarSegment, Key, compact, duration

MOST_CASES, MOST_PARTS = 12, 24
MOST_BARS = 24
"""Bars of a figure. More ranks have one bar together, for an average rank."""


def layer_tables(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """Make a table for each case with times of parts alone: each part in the step, its share, and its time alone.

    The table of all results has the parts of other cases, with their shares.
    """
    for case in layer_parts(lines):
        if not case.alone:
            continue
        names = [*case.parts, STEP]
        times = [*case.parts.values(), case.step]
        means = [*case.means.values(), case.step]
        alone = [*(case.alone.get(name) for name in case.parts), sum(case.alone.values())]
        yield (
            f"parts of the layer, medians, {case.case}",
            [
                Column("part", names),
                Column("us", [f"{time:,.1f}" for time in times], right=True),
                Column("p99 us", [case.tails[name] for name in names], right=True),
                Column("share", [f"{time / case.step:.0%}" if case.step else "-" for time in means], right=True),
                Column("alone us", ["-" if time is None else f"{time:,.1f}" for time in alone], right=True),
            ],
        )


MOST_SENTENCES, NAMED_PARTS = 4, 3


def layer_sentences(lines: Sequence[Line]) -> Iterator[str]:
    """Say of each case how long a step takes, how many tokens a second that is, and which parts take the most time.

    >>> from raymoe.report.results import complete
    >>> times = {"step": 10.0, "router": 2.0, "experts": 7.0}
    >>> lines = [{"case": "c", "workload": "layer", "op": op, "us_p50": us, "tokens": 8} for op, us in times.items()]
    >>> lines[0]["tokens_per_s"] = 1.6e6
    >>> list(layer_sentences([complete(line, run="a-b", generation=0, commit=None) for line in lines]))
    ['a step of 8 tokens a rank takes 10 us, 1.6 M tokens/s: experts 70%, router 20%']
    """
    cases = layer_parts(lines)
    steps = [next(line for line in case.lines if line["op"] == STEP) for case in cases]
    told_apart = len({step["tokens"] for step in steps}) == len(steps)
    for case, step in list(zip(cases, steps, strict=True))[:MOST_SENTENCES]:
        which = "" if told_apart else f"{case.case}: "
        tokens = "1 token" if step["tokens"] == 1 else f"{step['tokens']} tokens"
        rate = f", {compact(float(str(step['tokens_per_s'])))} tokens/s" if step["tokens_per_s"] else ""
        longest = sorted(case.means, key=lambda part: -case.means[part])[:NAMED_PARTS]
        shares = ", ".join(f"{part} {case.means[part] / case.step:.0%}" for part in longest if case.step)
        yield f"{which}a step of {tokens} a rank takes {_plain(case.step)}{rate}: {shares}"


def _plain(us: float) -> str:
    return duration(us).replace("µ", "u")  # a terminal may know ASCII only


def layer_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw one figure of all cases. Bars are shares of the step, so that short steps can be read too.

    A case has a bar for each rank, if all of them fit into one figure.
    """
    cases = layer_parts(lines)[:MOST_CASES]
    if not cases:
        return
    names = list(dict.fromkeys(name for case in cases for name in case.parts))[:MOST_PARTS]
    keys = [Key(name, _colour(name, names)) for name in names]
    several = len({case.lines[0]["run"] for case in cases}) > 1
    labels = [f"{case.lines[0]['run']}: {case.case}" if several else case.case for case in cases]
    ranks = [len(case.ranks.get(STEP, ())) for case in cases]
    apart = all(ranks) and sum(ranks) <= MOST_BARS
    rows = []
    columns = [Column("part", [*names, STEP])]
    for case, label in zip(cases, labels, strict=True):
        titles = _rank_titles(label, len(case.ranks[STEP]), alone=len(cases) == 1) if apart else []
        for rank, title in enumerate(titles):
            parts = {part: medians[rank] for part, medians in case.ranks.items()}
            rows.append(_bar(title, parts, case.step, keys))
        if not apart:
            rows.append(_bar(label, {**case.means, STEP: case.step}, case.step, keys))
        columns.append(_times(f"{label} us", [*(case.parts.get(name) for name in names), case.step]))
        for rank, title in enumerate(titles):
            columns.append(_times(f"{title} us", [_of_rank(case, name, rank) for name in (*names, STEP)]))
    of = "on each rank" if apart else "on an average rank" if all(ranks) else "on its slowest rank"
    waits = " Times of dispatch and combine include waits for other ranks." if apart else ""
    yield Figure(
        "layer-parts",
        "Where the time of a layer goes",
        how_and_where([line for case in cases for line in case.lines]),
        [Panel(BarChart("Parts of a layer", rows, _longest(rows), unit=f"time of each part {of} / time of the step"))],
        columns,
        keys,
        f"Bars: medians of each part {of}. The thin line: the end of the step.{waits}"
        + " Gradients are pale." * any(name.endswith(BACKWARD) for name in names),
    )


def _rank_titles(label: str, ranks: int, *, alone: bool) -> list[str]:
    return [f"rank {rank}" if alone else f"{label}, rank {rank}" for rank in range(ranks)]


def _bar(label: str, parts: dict[str, float], step: float, keys: Sequence[Key]) -> Bar:
    segments, end, whole = [], 0.0, step or 1.0
    for key in keys:
        time = parts.get(key.label, 0.0)
        begin, end = end, end + time / whole
        if time:
            segments.append(BarSegment(begin, end, key.colour, f"{key.label} {time:,.1f} µs, {time / whole:.1%}"))
    return Bar(label, duration(parts[STEP]), segments, ticks=[1.0])


def _longest(rows: Sequence[Bar]) -> float:
    return max(1.0, *(segment.end for row in rows for segment in row.segments))


def _times(header: str, times: Sequence[float | None]) -> Column:
    return Column(header, ["-" if time is None else f"{time:,.1f}" for time in times], right=True)


def _of_rank(case: LayerParts, name: str, rank: int) -> float | None:
    return case.ranks[name][rank] if name in case.ranks else None


def _colour(name: str, names: Sequence[str]) -> str:
    """Give a part and its gradients one colour; that of the gradients is pale."""
    forward = list(dict.fromkeys(other.removesuffix(BACKWARD) for other in names))
    colour = COLOURS[forward.index(name.removesuffix(BACKWARD)) % len(COLOURS)]
    return f"{colour} faded" if name.endswith(BACKWARD) else colour


COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "grey")
