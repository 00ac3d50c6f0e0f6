"""Makes report.html: one page of a run, or of several runs that are compared. It needs no network and has no script.

Everything from outside goes through `safe`. A Content-Security-Policy in the page forbids scripts and requests.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from raymoe import __version__
from raymoe.config import Job
from raymoe.errors import ConfigError, shown
from raymoe.report.backends import sentences
from raymoe.report.columns import EXCHANGES, Column, byte_size, caption_of, columns_of
from raymoe.report.compare import (
    RULE,
    ChangeVerdict,
    Comparison,
    compare,
    comparison_columns,
    environment_of,
    facts_differing,
    facts_of,
    flattened,
    letters,
)
from raymoe.report.directory import write_atomically
from raymoe.report.environment import busy
from raymoe.report.exchange_figures import has_rate, of_link
from raymoe.report.figure import Figure, figure_body, picture_html, style_sheet
from raymoe.report.history import environments
from raymoe.report.layer_parts import layer_sentences
from raymoe.report.measures import gbps, integer, ranks_on, three_digits, us
from raymoe.report.plots import figures
from raymoe.report.results import (
    CONFIG,
    ENVIRONMENT,
    MOST_MESSAGE,
    PAGE,
    RESTART,
    RESULTS,
    RESUME,
    SUMMARY,
    Line,
    Record,
    displayed,
    finished_cases,
    read_document,
    shortened,
)
from raymoe.report.svg import Bar, BarChart, BarSegment, compact, duration, safe
from raymoe.report.tables import by_workload, further_tables

MOST_TABLE = 350_000
"""Characters of a table. The rows that do not fit are in results.jsonl."""
MOST_FIGURES = 1_200_000
"""Characters of all figures and their tables."""
MOST_TABLES = 400_000
"""Characters of the tables after the results."""
MOST_KEYS = 300
OPEN_ROWS = 30
"""A table of up to so many rows is open from the start."""


def write_page(target: Path, records: Sequence[Record]) -> Path:
    """Write the page of these runs to a file, or into a directory as report.html. Return the file."""
    path = target / PAGE if target.is_dir() else target
    if path.name in (CONFIG, ENVIRONMENT, RESULTS, SUMMARY):
        raise ConfigError(f"the page would replace {shown(str(path))}, a file of a run; give it another name")
    write_atomically(path, page(records))
    return path


@dataclass(frozen=True)
class Shown:
    """A run on the page. Its lines are from `displayed`; among several runs they carry its letter as their run."""

    record: Record
    letter: str
    lines: list[Line]


def page(records: Sequence[Record]) -> str:
    """Make the HTML of one run, or of several runs of which the first is the base of the comparison."""
    several = len(records) > 1
    shown = []
    for record, letter in zip(records, letters(len(records)), strict=True):
        lines = displayed(record.lines)
        shown.append(Shown(record, letter, [line | {"run": letter} for line in lines] if several else lines))
    every = [line for run in shown for line in run.lines]
    sections = [("compared", "What changed", _compared(shown))] if several else []
    if every:
        sections.append(("figures", "Figures", _figures(every, records[0].config)))
        sections.append(("results", "All results", _results(every)))
    sections.append(("what", "What was run on what", "".join(_what(run, several) for run in shown)))
    sections.append(("cases", "Cases and generations", "".join(_cases(run, several) for run in shown)))
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{content}</section>' for name, title, content in sections)
    compared = [] if several else [*layer_sentences(every), *sentences(every)]
    verdicts = "".join(_verdict(run, several) for run in shown)
    verdicts += "".join(f"<p>{safe(sentence)}</p>" for sentence in compared) + _highlights(every, several)
    title = " and ".join(shortened(record.run) for record in records[:3])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="color-scheme" content="light dark"><title>{safe(title)}</title>'
        f"<style>{style_sheet('page.css')}{style_sheet('figure.css')}</style></head><body><main>{verdicts}<nav>{links}</nav>{body}</main>"
        f"<footer>Made by raymoe {safe(__version__)} from the files of the run. A time is the slowest rank's; p50 and "
        "p99 are percentiles of the samples. The page has no script and loads nothing.</footer></body></html>\n"
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


# How a run ended.

_STATUS = {"done": ("good", "✓ Done"), "failed": ("bad", "✕ Failed"), "stopped": ("warn", "■ Stopped")}


def _verdict(shown: Shown, several: bool) -> str:
    record = shown.record
    summary = record.summary or {}
    kind, words = _STATUS.get(str(summary.get("status")), ("", "… Not ended: the run goes on, or was killed"))
    wrong = sum(line["verified"] is False for line in shown.lines)
    if wrong:
        kind, words = "bad", f"{words}, with wrong results"
    message = str(summary.get("message") or "")
    reason = f'<p class="message">{safe(shortened(message, MOST_MESSAGE))}</p>' if message not in ("", "done") else ""
    name = shortened(record.config.get("name") or record.run)
    named = f"{shown.letter}: {name}" if several else name
    return (
        f'<header class="verdict {kind}"><p class="status">{words}</p><h1>{safe(named)}</h1>'
        f'<p class="muted">{safe(shortened(record.run))}</p>{reason}'
        f'<dl class="facts">{_pairs(_facts(shown, wrong))}</dl></header>'
    )


def _facts(shown: Shown, wrong: int) -> Iterator[tuple[str, object]]:
    record, lines = shown.record, shown.lines
    summary = record.summary or {}
    if "exit_code" in summary:
        yield "exit code", summary["exit_code"]
    finished = len(finished_cases(lines))
    cases = summary.get("cases")
    yield "cases finished", f"{finished} of {len(cases)}" if isinstance(cases, dict) else finished
    yield "verified", _verified(lines, wrong)
    if lines:
        yield "ran on", ranks_on(lines)
    if began := _began(record.run):
        yield "began", began
    if other_work := busy(read_document(record.path / ENVIRONMENT) or {}):
        yield "machine was busy", other_work
    if record.generations:
        yield "gang ready after", ", ".join(_seconds(generation.ready_s) for generation in record.generations[:8])
        beginnings = [generation.began for generation in record.generations]
        yield "restarts", beginnings.count(RESTART)
        if RESUME in beginnings:
            yield "resumes", beginnings.count(RESUME)
    commits = dict.fromkeys(str(line["commit"]) for line in lines if line["commit"] is not None)
    if commits:
        yield "commit", ", ".join(list(commits)[:4])


def _verified(lines: Sequence[Line], wrong: int) -> str:
    """Say what was compared with the oracle, and how far off it was."""
    right = sum(line["verified"] is True for line in lines)
    skipped = sum(line["skipped"] is not None for line in lines)
    unchecked = len(lines) - right - wrong - skipped
    errors = [float(str(line["max_error"])) for line in lines if line["max_error"] is not None]
    parts = [f"{right} of {len(lines)} results right"] if lines else ["no results"]
    parts += [f"{count} {word}" for count, word in ((wrong, "WRONG"), (unchecked, "not checked")) if count]
    parts += [f"{skipped} skipped"] if skipped else []
    parts += [f"largest error {max(errors):.1e}"] if errors else []
    return ", ".join(parts)


def _seconds(value: object) -> str:
    return "never" if value is None else f"{float(str(value)):,.1f} s"


_STAMP = re.compile(r"-(\d{8}T\d{6})Z-[a-z]{4}$")


def _began(run: str) -> str | None:
    """Read the time of a run from its name.

    >>> _began("quick-20261123T070640Z-rfma"), _began("quick-1"), _began("quick-20261399T070640Z-rfma")
    ('2026-11-23 07:06:40 UTC', None, None)
    """
    stamp = _STAMP.search(run)
    try:
        return f"{datetime.datetime.strptime(stamp[1], '%Y%m%dT%H%M%S'):%Y-%m-%d %H:%M:%S} UTC" if stamp else None
    except ValueError:
        return None


# The fastest of each operation.


def _highlights(lines: Sequence[Line], several: bool) -> str:
    cards = list(_cards([line for line in lines if line["us_p50"]], several))[:6]
    items = "".join(
        f'<li><span class="muted">{safe(what)}</span><b>{safe(value)}</b><span class="muted">{safe(which)}</span></li>'
        for what, value, which in cards
    )
    return f'<ul class="cards">{items}</ul>' if items else ""


def _cards(lines: Sequence[Line], several: bool) -> Iterator[tuple[str, str, str]]:
    """Give, of each operation, the fastest result: name, value and setting."""

    def by(line: Line, way: str) -> str:
        return f"{line['run']}: {line[way]}" if several else str(line[way])

    copies = [line for line in lines if line["op"] == "copy" and line["bytes"]]
    if copies:
        most, least = max(copies, key=gbps), min(copies, key=us)
        size = byte_size(most["bytes"])
        yield f"best copy of {size}", f"{three_digits(gbps(most))} GB/s", f"{by(most, 'transport')}, {most['pattern']}"
        yield f"fastest copy of {byte_size(least['bytes'])}", duration(us(least)), by(least, "transport")
    by_op: dict[object, list[Line]] = {}
    for line in lines:
        right = line["verified"] is not False
        timed_alone = right and line["beside"] is None and not line["leaves_out"] and line["l2"] in ("cold", None)
        if line["op"] in (*EXCHANGES, "step") and timed_alone:
            by_op.setdefault(line["op"], []).append(line)
    for op, of_op in by_op.items():
        tokens = max(integer(line, "tokens") if line["tokens"] else 0 for line in of_op)
        named = {"exchange": "dispatch and combine", "step": "step"}.get(str(op), str(op))
        compared = [line for line in of_op if (line["tokens"] or 0) == tokens]
        best = min(compared, key=us)
        rate = f", {three_digits(gbps(best))} GB/s{of_link(best)}" if has_rate(best) else ""
        rate += f", {compact(float(str(best['tokens_per_s'])))} tokens/s" if best["tokens_per_s"] else ""
        where = f"{named} of {tokens} tokens a rank" if tokens else named
        yield f"{'fastest ' * (len(compared) > 1)}{where}", duration(us(best)), f"{by(best, 'backend')}{rate}"


# Config and environment.


def _what(shown: Shown, several: bool) -> str:
    record = shown.record
    head = f"<h3>{shown.letter}</h3>" if several else ""
    defaults = _defaults(record.config)
    sections: dict[str, list[tuple[str, str, bool]]] = {}
    for key, value in list(flattened(record.config).items())[:MOST_KEYS]:
        section, dot, rest = key.partition(".")
        row = rest if dot else key, value, bool(defaults) and section not in _NAMES and defaults.get(key) != value
        sections.setdefault(section if dot else "job", []).append(row)
    blocks = [_block(name, rows) for name, rows in sections.items()]
    environment = environment_of(record.path)
    if environment:
        last = record.generations[-1].number if len(record.generations) > 1 else None
        title = "environment" if last is None else f"environment of generation {last}"
        blocks.append(_block(title, [(key, _bytes(key, value), False) for key, value in environment.items()]))
    note = '<p class="muted">Bold values differ from the defaults.</p>'
    ranks = _rank_table(record.path)
    return f'{head}<div class="keys">{"".join(blocks)}</div>{note}{ranks}'


_NAMES = ("name", "workload")
"""Keys that every job sets."""


def _block(name: str, rows: Iterable[tuple[str, str, bool]]) -> str:
    marked = {True: '<dd class="set">', False: "<dd>"}
    pairs = "".join(f"<dt>{safe(key)}</dt>{marked[said]}{safe(value)}</dd>" for key, value, said in rows)
    return f"<div><h3>{safe(name)}</h3><dl>{pairs}</dl></div>"


def _bytes(key: str, value: str) -> str:
    return byte_size(value) if key.endswith("_bytes") and value.isdecimal() and len(value) < 19 else value


def _defaults(config: Mapping[str, object]) -> dict[str, str]:
    """Give the default of each key of a job with this workload; empty if the config is not one of this version."""
    try:
        job = Job.model_validate({"name": "defaults", "workload": config.get("workload")})
    except ValidationError:
        return {}
    return flattened(job.resolved())


def _rank_table(path: Path) -> str:
    document = read_document(path / ENVIRONMENT) or {}
    rows = [row for row in _list(document.get("ranks")) if isinstance(row, dict)]
    keys = [
        key
        for key in ("rank", "domain", "pid", "node", "address", "gpu")
        if any(row.get(key) is not None for row in rows)
    ]
    if not keys:
        return ""
    columns = [Column(key, [shortened(row.get(key, "-")) for row in rows], right=key != "node") for key in keys]
    return _folded(f"{len(rows)} ranks: processes and places", _table(columns))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


# Figures and tables.


def _figures(lines: Sequence[Line], config: Mapping[str, object]) -> str:
    parts, size, left_out = [], 0, 0
    for figure in figures(lines, config):
        if size > MOST_FIGURES:
            left_out = 1
            break
        parts.append(_figure(figure))
        size += len(parts[-1])
    if not parts:
        return "<p>No result has a time to draw.</p>"
    more = "<p>Further figures are left out, because the page would become too large.</p>" * left_out
    return f'<div class="figures">{"".join(parts)}</div>{more}'


def _figure(figure: Figure) -> str:
    wide = ' class="wide"' if figure.wide else ""
    how = f'<span class="how">{safe(figure.how)}</span>'
    note = f'<p class="how">{safe(figure.note)}</p>' if figure.note else ""
    return (
        f"<figure{wide}><figcaption><h3>{safe(figure.title)}</h3>{how}</figcaption>"
        f"{figure_body(figure)}{note}{_folded('The numbers', _table(figure.columns))}</figure>"
    )


def _results(lines: Sequence[Line]) -> str:
    parts: list[str] = []
    for of_workload in by_workload(lines):
        if sum(map(len, parts)) > MOST_TABLE:
            break
        title = f"{len(of_workload)} results of {caption_of(of_workload)}"
        parts.append(_folded(title, _table(columns_of(of_workload)), opened=len(of_workload) <= OPEN_ROWS))
    size = 0
    for of_workload in by_workload(lines):
        for title, columns in further_tables(of_workload):
            if size > MOST_TABLES:
                return "".join(parts) + "<p>Further tables are left out; <code>raymoe report</code> prints them.</p>"
            parts.append(_folded(title, _table(columns)))
            size += len(parts[-1])
    return "".join(parts)


def _folded(title: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' * opened}><summary>{safe(shortened(title))}</summary>{content}</details>"


_KINDS = {"NO": "bad", "** slower": "bad", "** now wrong": "bad", "** faster": "good"}
"""Classes of cells that a reader looks for."""


def _table(columns: Sequence[Column]) -> str:
    right = [' class="r"' if column.right else "" for column in columns]
    heads = "".join(f"<th{side}>{safe(column.header)}</th>" for column, side in zip(columns, right, strict=True))
    rows, size, left_out = [], 0, 0
    for row in zip(*(column.cells for column in columns), strict=True):
        if size > MOST_TABLE:
            left_out += 1
            continue
        cells = zip(row, right, strict=True)
        rows.append("".join(f"<td{_class(cell, side)}>{safe(cell)}</td>" for cell, side in cells))
        size += len(rows[-1])
    more = f"<p>{left_out:,} further rows are in the files of the run.</p>" if left_out else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def _class(cell: str, side: str) -> str:
    return f' class="{_KINDS[cell]}"' if cell in _KINDS else side


def _pairs(rows: Iterable[tuple[str, object]]) -> str:
    return "".join(f"<div><dt>{safe(key)}</dt><dd>{safe(shortened(value))}</dd></div>" for key, value in rows)


def _cases(shown: Shown, several: bool) -> str:
    head = f"<h3>{shown.letter}</h3>" if several else ""
    summary = shown.record.summary or {}
    marks = summary.get("cases")
    cases = marks if isinstance(marks, dict) else dict.fromkeys((str(line["case"]) for line in shown.lines), "done")
    names = [
        Column("case", [shortened(case) for case in cases]),
        Column("state", [shortened(mark) for mark in cases.values()]),
    ]
    generations = shown.record.generations
    if len(generations) > 1:
        by_case = {str(line["case"]): line["generation"] for line in shown.lines}
        numbers = ["-" if by_case.get(case) is None else str(by_case[case]) for case in cases]
        names.append(Column("generation", numbers, right=True))
    parts = [_folded(f"{len(cases)} cases", _table(names), opened=len(cases) <= OPEN_ROWS)]
    if generations:
        columns = [
            Column("generation", [str(one.number) for one in generations], right=True),
            Column("began by", [shortened(one.began) for one in generations]),
            Column("ready after", [_seconds(one.ready_s) for one in generations], right=True),
            Column(
                "rank at fault",
                ["-" if one.culprit is None else str(one.culprit) for one in generations],
                right=True,
            ),
            Column("ended with", [shortened(one.cause or "-") for one in generations]),
            *_environment_columns(shown.record),
        ]
        parts.append(_folded(f"{len(generations)} generations", _table(columns), opened=len(generations) <= OPEN_ROWS))
    return head + "".join(parts)


MOST_ENVIRONMENT_COLUMNS = 12


def _environment_columns(record: Record) -> Iterator[Column]:
    """Give a column for each fact in which the environments of a run's generations differ."""
    known = {number: facts_of(document) for number, document in environments(record.path, record.generations).items()}
    keys = dict.fromkeys(key for facts in known.values() for key in facts)
    differing = [key for key in keys if len({facts.get(key) for facts in known.values()}) > 1]
    for key in differing[:MOST_ENVIRONMENT_COLUMNS]:
        yield Column(key, [known.get(one.number, {}).get(key, "-") for one in record.generations])


# Comparison of runs.

MOST_CHANGES = 60


def _compared(shown: Sequence[Shown]) -> str:
    base, *others = shown
    parts = [f'<p class="how">{safe(RULE)}</p>']
    for other in others:
        comparison = compare(base.lines, other.lines)
        parts.append(f"<h3>{other.letter} against {base.letter}: {safe(comparison.summary())}</h3>")
        if comparison.pairs:
            parts.append(_changes(comparison))
            columns = comparison_columns(comparison, (base.letter, other.letter))
            title = f"{len(comparison.pairs)} operations in both runs"
            parts.append(_folded(title, _table(columns), opened=len(comparison.pairs) <= OPEN_ROWS))
        differing = list(facts_differing(base.record, other.record))
        if differing:
            keys, before, after = (list(column) for column in zip(*differing, strict=True))
            columns = [Column("key", keys), Column(base.letter, before), Column(other.letter, after)]
            title = f"{len(differing)} settings and facts differ"
            parts.append(_folded(title, _table(columns), opened=len(differing) <= OPEN_ROWS))
    return "".join(parts)


_COLOURS = {ChangeVerdict.SLOWER: "slower", ChangeVerdict.WRONG: "slower", ChangeVerdict.FASTER: "faster"}


def _changes(comparison: Comparison) -> str:
    """Draw the changes beyond noise, the largest first; without any, the largest of the others."""
    changes = [(pair, pair.change) for pair in comparison.pairs if pair.change is not None]
    changes.sort(key=lambda change: (change[0].verdict not in _COLOURS, -abs(change[1])))
    if not changes:
        return ""
    rows = []
    for pair, change in changes[:MOST_CHANGES]:
        line = pair.base
        which = (
            line["case"],
            line["op"],
            line["l2"] and f"{line['l2']} L2",
            line["beside"] and f"beside {line['beside']}",
            line["src"] is not None and f"{line['src']} to {line['dst']}, {byte_size(line['bytes'])}",
        )
        label = ", ".join(str(word) for word in which if word)
        segment = BarSegment(0, change, _COLOURS.get(pair.verdict, "grey"))
        rows.append(Bar(label, f"{change:+.1%}", [segment], ticks=[0.0]))
    most = max(0.1, min(1.0, max(abs(change) for _, change in changes[:MOST_CHANGES])))
    picture = picture_html(BarChart("Changes", rows, most, least=-most))
    left_out = len(changes) - len(rows)
    more = f" The other {left_out:,} are in the table." if left_out else ""
    note = f"Change of the median time: green is faster, red slower, grey within noise.{more}"
    return f'<figure class="changes">{picture}<p class="how">{note}</p></figure>'
