"""Tables of measured times say what the raw lines in benchmarks/ say, and from which commit and machine they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import pytest

from raymoe.exchange.peer.trace import FORMER_NAMES
from tests.python_path import REPOSITORY
from tests.unit.docs.derived_tables import DERIVED, Derived
from tests.unit.docs.measured_figures import FIGURES
from tests.unit.docs.measured_tables import ARCHIVE, DOCS, TABLES, Table, keys_of
from tests.unit.docs.raw_lines import BENCHMARKS, Line, circumstances, date_of, in_history, lines_of

EVIDENCE = sorted((DOCS / "evidence").glob("*.md"))
NOT_MEASURED = {
    "| fault |": "test_operations_page.py holds these tables",
}
"""Heads of tables with numbers that are held elsewhere or are not ours, and why."""
HELD = [table for table in TABLES if table.page != ARCHIVE]


def problems(lines: list[Line], section: str, told_apart: bool = False) -> list[str]:
    """Say why lines may not stand in one table below this text."""
    found = []
    places = {circumstances(line) for line in lines}
    if len(places) > 1 and not told_apart:
        found.append(f"lines of {len(places)} commits or machines: {sorted(places)}")
    for place in places:
        if place.commit.endswith("-dirty"):
            found.append(f"{place.commit} is of a changed tree")
        elif not in_history(place.commit):
            found.append(f"{place.commit} is not in the history")
        if not any(place.commit.startswith(known) for known in re.findall(r"`([0-9a-f]{7,12})`", section)):
            found.append(f"the section does not name the commit {place.commit}")
        if place.machine not in section:
            found.append(f"the section does not name the machine {place.machine}")
    return found + [f"the section does not name the day {day}" for day in days(lines) if day not in section]


def tells_apart(table: Table) -> bool:
    """Whether a column says the commit or the machine, or each column's head has the commit of its lines."""
    head = table.cells()[0]
    if {"commit", "machine"} & set(head):
        return True
    return all(
        f"`{line['commit'][:7]}`" in name
        for name, column in table.columns.items()
        for row in table.rows()
        if row[name]
        for line in column.lines(table.row(row[table.first]))
    )


def days(lines: list[Line]) -> list[str]:
    return sorted({date_of(line) for line in lines})


def number(cell: str) -> tuple[float, float]:
    """The number of a cell, and half a unit of its last digit."""
    digits = re.match(r"\**([\d.]+)", cell)
    assert digits, cell
    decimals = len(digits[1].partition(".")[2])
    return float(digits[1]), 0.5 * 10**-decimals


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.page}: {table.first}")
def test_a_table_shows_the_raw_lines(table: Table) -> None:
    rows = table.rows()
    assert rows and set(rows[0]) == {table.first, *table.columns}
    wrong = []
    for row in rows:
        for name, column in table.columns.items():
            if not row[name]:
                continue
            keys = keys_of(column)
            for key, cell in zip(keys, row[name].split(" / "), strict=True):
                shown, half_a_digit = number(cell)
                measured = column.value(table.row(row[table.first]), key)
                if abs(shown - measured) > half_a_digit * 1.0001:
                    wrong.append((row[table.first], name, key, shown, measured))
    assert wrong == [], "`make tables` writes the cells again"


@pytest.mark.parametrize("table", DERIVED, ids=lambda table: f"{table.page}: {table.first}")
def test_a_derived_table_is_what_is_computed(table: Derived) -> None:
    assert table.shown() == table.rows(), "`make tables` writes the rows again"


@pytest.mark.parametrize("table", HELD, ids=lambda table: f"{table.page}: {table.first}")
def test_a_table_is_of_one_clean_commit_and_machine_which_its_section_names(table: Table) -> None:
    assert problems(table.lines(), table.section(), tells_apart(table)) == []


@pytest.mark.parametrize("table", [each for each in TABLES if each.page == ARCHIVE], ids=lambda table: table.first)
def test_a_table_of_the_archive_has_one_commit_which_its_section_names(table: Table) -> None:
    places = {circumstances(line) for line in table.lines()}
    assert len(places) == 1
    [place] = places
    assert f"`{place.commit}`" in table.section() and place.machine in table.section()
    assert all(day in table.section() for day in days(table.lines()))


LINE: Line = {"run": "x-20261123T033049Z-abcd", "commit": "c21f2902974b", "device": "NVIDIA H200", "ranks": 2}
SECTION = "two H200, 2026-11-23, commit `c21f2902974b`"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"commit": "c21f2902974b-dirty"}, "is of a changed tree"),
        ({"commit": "0123456789ab"}, "is not in the history"),
        ({"device": "NVIDIA H100 80GB HBM3"}, "of 2 commits or machines"),
        ({"ranks": 4}, "of 2 commits or machines"),
        ({"run": "x-20261124T033049Z-abcd"}, "does not name the day 2026-11-24"),
    ],
)
def test_a_table_of_other_lines_would_be_refused(changes: Mapping[str, object], why: str) -> None:
    found = problems([LINE, {**LINE, **changes}], SECTION)
    assert any(why in text for text in found) if why else found == []


@pytest.mark.parametrize("page", EVIDENCE, ids=lambda page: page.name)
def test_every_table_with_numbers_is_held_to_lines(page: Path) -> None:
    heads = [f"| {each.first} |" for each in [*TABLES, *DERIVED] if each.page == f"evidence/{page.name}"]
    loose = []
    for is_table, lines in groupby(page.read_text().splitlines(), key=lambda line: line.startswith("|")):
        block = list(lines)
        measured = is_table and any(re.match(r"\|.*\| *\**\d+(\.\d+)?( /| %| \||$)", line) for line in block[2:])
        if measured and not block[0].startswith((*heads, *NOT_MEASURED)):
            loose.append(block[0])
    assert loose == [], "name the lines of these tables in measured_tables.py or derived_tables.py"


def test_no_figure_of_two_gpus_is_of_a_changed_tree() -> None:
    for stem, (_, sources) in FIGURES.items():
        places = {circumstances(line) for source in sources for line in source.lines()}
        if "x4" not in stem:
            assert [place for place in places if place.commit.endswith("-dirty")] == [], stem


def test_a_figure_of_four_gpus_is_shown_by_the_archive_only() -> None:
    pages = [*DOCS.rglob("*.md"), REPOSITORY / "README.md"]
    wrong = [page.name for page in pages if page != DOCS / ARCHIVE and "x4.svg" in page.read_text()]
    assert wrong == []


# The .txt files.

WITHOUT_COMMIT = {
    "eager_rows_h100.txt", "exchange_h200x2.txt", "exchange_h200x4.txt", "few_rows_h200.txt", "layer_pieces_h200.txt",
    "links_h200x4.txt", "row_blocks_h200.txt", "row_counter_h100.txt", "row_order_h200.txt", "row_shapes_h200.txt",
    "tune_h200x4.txt",
}  # fmt: skip
"""Logs of sweeps over constants, each of many trees of one day. New files name their commit."""
GONE = {
    "router_h200.txt": {"e7c9d6c"},
    "row_shapes_h200.txt": {"b854d7d"},
    "row_times_h200.txt": {"24d5ee5", "b854d7d"},
}
"""Files of commits that are not in the history: a table of the archive, and sweeps over the shapes of blocks."""
TEXTS = [path for path in sorted(BENCHMARKS.glob("*.txt")) if path.name != "test_durations_cpu.txt"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_a_text_file_names_its_machine_its_day_and_its_commit(path: Path) -> None:
    text = path.read_text()
    head = text[:1500]
    assert re.search(r"H100|H200|\bcpus?\b", head), "no machine"
    assert re.search(r"20\d\d-\d\d-\d\d", text), "no day"
    assert "-dirty" not in text
    commits = set(re.findall(r"commits?\W+([0-9a-f]{7,12})\b", text))
    assert commits or path.name in WITHOUT_COMMIT, "no commit"
    assert [commit for commit in commits if commit not in GONE.get(path.name, ()) and not in_history(commit)] == []


def test_the_picture_of_a_step_is_true_to_the_trace() -> None:
    """Each bar of a role goes from its first block at one point to its last block at another."""
    traces = {
        line["op"]: {FORMER_NAMES.get(point, point): (first, last) for point, first, _, last in line["timeline"]}
        for line in lines_of("bench_trace_h200x2")
        if line["tokens"] == 4096 and line["timeline"]
    }
    text = (DOCS / "figures" / "step-timeline-h200x2.svg").read_text()
    starts = {"dispatch": 96.0, "combine": 566.0}
    units_a_us = 1.55
    bars = re.findall(
        r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" .*'
        r'data-op="(\w+)" data-from="([\w ]+)" data-to="([\w ]+)"><title>(.*?)</title>',
        text,
    )
    assert len(bars) == text.count("data-op") == 10
    for x, width, op, begin, end, title in bars:
        first, last = traces[op][begin][0], traces[op][end][1]
        assert float(x) == pytest.approx(starts[op] + units_a_us * first, abs=0.06)
        assert float(width) == pytest.approx(max(2.0, units_a_us * (last - first)), abs=0.06)
        assert title == f"{begin} {first} to {end} {last} µs"
    over = {op: f"{trace['all awaited'][1]:.0f} µs" for op, trace in traces.items() if op in starts}
    assert re.findall(r"more to \w+: (\d+ µs)", text) == [over["dispatch"], over["combine"]]
