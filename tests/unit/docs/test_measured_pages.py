"""The tables of measured times in the pages say what the raw lines in benchmarks/*.jsonl say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import pytest

from raymoe.exchange.peer.trace import FORMER_NAMES
from tests.python_path import REPOSITORY

ROOT = REPOSITORY
DOCS = ROOT / "docs"
Line = Mapping[str, Any]


@cache
def lines_of(name: str) -> list[Line]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / f"{name}.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Column:
    """Which raw lines a column shows: the file, the ends of the runs' names, and keys with their values."""

    file: str
    run: str | tuple[str, ...]
    keys: Mapping[str, object]
    shown: str = "us_p50"
    scale: float = 1.0

    def value(self, row: Mapping[str, object], key: str | None = None) -> float:
        """The number of a cell, by default of the key that the column shows first."""
        wanted = {**self.keys, **row}
        found = [line for line in lines_of(self.file) if line["run"].endswith(self.run) and holds(line, wanted)]
        assert found, (self, row)
        return self.scale * median(shown(line, key or self.shown) for line in found)


def shown(line: Line, name: str) -> float:
    """A key of a line, or when the last block came to a point of its timeline."""
    kind, _, point = name.partition(" ")
    if kind != "timeline":
        return float(line[name])
    return float(next(last for found, _, _, last in line["timeline"] if found == point))


def holds(line: Line, wanted: Mapping[str, object]) -> bool:
    """Whether a line has the keys; a key that begins with `case ` is a word of the case's name."""
    words = line["case"].split(",")
    return all(f"{key[5:]}={value}" in words if key.startswith("case ") else line.get(key) == value
               for key, value in wanted.items())  # fmt: skip


WITH_P99 = ("performance.md", "comparison.md", "scaling.md", "layer.md", "overlap.md")
P50_ALONE = ("calls, tokens",)


@dataclass(frozen=True)
class Table:
    """A table of a page: its head begins with `first`; `row` makes keys of a row's first cell."""

    page: str
    first: str
    columns: Mapping[str, Column]
    row: Callable[[str], Mapping[str, object]]
    unchecked: frozenset[str] = field(default=frozenset())
    """Columns that a line of the file does not hold."""

    @property
    def has_p99(self) -> bool:
        """Whether its times are p50 / p99. Others have few samples, of which the slowest is the p99."""
        return self.page in WITH_P99 and self.first not in P50_ALONE

    def rows(self) -> list[dict[str, str]]:
        text = (DOCS / self.page).read_text()
        block = text[text.index(f"| {self.first} |") :].split("\n\n")[0]
        cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def tokens(cell: str) -> Mapping[str, object]:
    return {"tokens": int(cell)}


def sms(cell: str) -> Mapping[str, object]:
    return {"case sms": cell}


def backend(cell: str) -> Mapping[str, object]:
    return {"backend": cell.split("`")[1]}


def backend_and_tokens(cell: str) -> Mapping[str, object]:
    name, count = cell.split(", ")
    return backend(name) | tokens(count)


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(cell: str) -> Mapping[str, object]:
    number, unit = cell.split()
    return {"bytes": int(number) * UNITS[unit]}


def exchange(file: str, run: str, backend: str, op: str, l2: str = "cold") -> Column:
    return Column(file, run, {"backend": backend, "op": op, "l2": l2})


def copies(pattern: str, protocol: str, transport: str) -> Column:
    return Column("p2p_h200x4", "yapr", {"case": f"protocol={protocol},pattern={pattern}", "transport": transport})


def links(first: str, pattern: str) -> Table:
    columns = {
        "copy engine put": copies(pattern, "put", "copy_engine"),
        "TMA put": copies(pattern, "put", "tma"),
        "NCCL": copies(pattern, "put", "collective"),
        "copy engine get": copies(pattern, "get", "copy_engine"),
        "TMA get": copies(pattern, "get", "tma"),
    }
    return Table("links.md", first, columns, size, frozenset({"auto put"}))


def overlap(first: str, file: str, run: str) -> Table:
    def beside(op: str) -> Column:
        return Column(file, run, {"backend": "fused", "case form": "whole", "op": op, "beside": None})

    columns = {
        "dispatch": beside("dispatch"),
        "product": beside("product"),
        "both": beside("dispatch+product"),
        "combine": beside("combine"),
        "both, combine": beside("combine+product"),
    }
    return Table("overlap.md", first, columns, sms, frozenset({"saved", "saved, combine"}))


def systems(first: str, file: str, run: str) -> Table:
    columns = {
        "dispatch `fused`": exchange(file, run, "fused", "dispatch"),
        "`staged`": exchange(file, run, "staged", "dispatch"),
        "`nvshmem`": exchange(file, run, "nvshmem", "dispatch"),
        "`row_push`": exchange(file, run, "row_push", "dispatch"),
        "combine `fused`": exchange(file, run, "fused", "combine"),
        "combine `staged`": exchange(file, run, "staged", "combine"),
        "combine `nvshmem`": exchange(file, run, "nvshmem", "combine"),
    }
    return Table("comparison.md", first, columns, tokens)


def nccl(op: str, calls: Mapping[str, str]) -> Table:
    file, run = "bench_nccl_h200x2", "uiez"
    backends = {f"`{name}`": exchange(file, run, name, op) for name in ("fused", "allgather", "collective")}
    bare = {name: exchange(file, run, "nccl_bare", call) for name, call in calls.items()}
    return Table("comparison.md", f"{op}, tokens", backends | bare, tokens)


def by_sms(first: str, file: str, run: str) -> Table:
    def column(layout: str, op: str) -> Column:
        return Column(file, run, {"layout": layout, "op": op, "l2": "cold"})

    columns = {
        "dispatch, layout `rank`": column("rank", "dispatch"),
        "dispatch, layout `expert`": column("expert", "dispatch"),
        "combine": column("expert", "combine"),
    }
    return Table("scaling.md", first, columns, sms)


def zipf(first: str, file: str, run: str) -> Table:
    columns = {
        "dispatch": exchange(file, run, "fused", "dispatch"),
        "`row_push`": exchange(file, run, "row_push", "dispatch"),
        "combine": exchange(file, run, "fused", "combine"),
    }
    return Table("scaling.md", first, columns, tokens)


def performance(first: str, plain: tuple[str, str], fp8: tuple[str, str]) -> Table:
    columns = {
        "dispatch": exchange(*plain, "fused", "dispatch"),
        "row push": exchange(*plain, "row_push", "dispatch"),
        "combine": exchange(*plain, "fused", "combine"),
        "dispatch as fp8": exchange(*fp8, "fused", "dispatch"),
        "row push as fp8": exchange(*fp8, "row_push", "dispatch"),
    }
    return Table("performance.md", first, columns, tokens)


def cpu_ranks() -> Table:
    ops = {"dispatch": "dispatch", "combine": "combine", "both": "exchange"}
    columns = {name: Column("host_exchange", "ooza", {"op": op}, scale=1e-3) for name, op in ops.items()}
    return Table("performance.md", "backend, ms", columns, backend)


def eager() -> Table:
    def host(op: str, l2: str) -> Column:
        return Column("eager_h200x2", "pwsz", {"op": op, "l2": l2}, shown="host_us_p50")

    columns = {
        "dispatch, host, in a row": host("dispatch", "warm"),
        "combine, in a row": host("combine", "warm"),
        "dispatch, host, alone": host("dispatch", "cold"),
        "combine, alone": host("combine", "cold"),
        "both": Column("eager_h200x2", "pwsz", {"op": "exchange", "l2": "warm"}),
    }
    return Table("performance.md", "calls, tokens", columns, backend_and_tokens)


def operation_and_rows(cell: str) -> Mapping[str, object]:
    name, count = cell.split(", ")
    return {"op": name.strip("`")} | tokens(count)


SYSTEMS_OF_ROWS = ("raymoe", "in_turn", "eager", "compile", "copy", "own_copy")


def systems_of_rows() -> Table:
    columns = {f"`{name}`": Column("norm_h200", ("dmai", "ojcv"), {"backend": name}) for name in SYSTEMS_OF_ROWS}
    return Table("kernels.md", "operation, rows", columns, operation_and_rows)


def beside_liger() -> Table:
    names = ("raymoe", "compile", "liger", "copy", "own_copy")
    columns = {f"`{name}`": Column("norm_h200", "eqlc", {"backend": name}) for name in names}
    return Table("kernels.md", "beside Liger", columns, operation_and_rows)


def many_rows() -> Table:
    columns = {f"`{name}`": Column("norm_h200", "gcbb", {"backend": name}) for name in (*SYSTEMS_OF_ROWS, "liger")}
    return Table("kernels.md", "65536 rows", columns, part)


def stages_of_rows(op: str) -> Table:
    def column(backend: str, stages: int | str) -> Column:
        return Column("norm_sms_h100", "mast", {"backend": backend, "op": op, "case stages": stages})

    columns = {f"{count} stage{'s' * (count > 1)}": column("raymoe", count) for count in (1, 2, 3, 4, 8)}
    others = {"auto": column("raymoe", "auto"), "`in_turn`": column("in_turn", 8)}
    return Table("kernels.md", f"SMs, `{op}`", columns | others, sms)


POINTS = {
    "first row out": "first push",
    "entries published": "told",
    "counts here": "counts",
    "last row out": "last push",
    "last row placed": "placed",
    "over": "all awaited",
}
"""By column: the point of a dispatch, by its name in the raw lines, when its last block comes there."""


def timeline(first: str, file: str, run: str) -> Table:
    keys = {"op": "dispatch", "l2": "cold"}
    points = {name: Column(file, run, keys, shown=f"timeline {point}") for name, point in POINTS.items()}
    return Table("experiments/timeline.md", first, points | {"by the clock": Column(file, run, keys)}, tokens)


def part(cell: str) -> Mapping[str, object]:
    return {"op": cell.strip("`")}


def layer_parts(first: str, file: str, run: str, counts: tuple[int, ...]) -> Table:
    columns = {str(count): Column(file, run, {"tokens": count, "l2": "cold"}) for count in counts}
    return Table("layer.md", first, columns, part)


def layer_by_sms() -> Table:
    ops = ("step", "dispatch", "shared", "combine")
    columns = {f"`{op}`": Column("layer_sms_h200", "kwaz", {"op": op, "l2": "cold"}) for op in ops}
    return Table("layer.md", "SMs of the exchange", columns, sms)


TABLES = [
    performance("tokens, 4× H200", ("bench_exchange_h200x4", "unnt"), ("bench_exchange_fp8_h200x4", "rzwe")),
    performance("tokens, 2× H200", ("bench_exchange_h200x2", "csun"), ("bench_exchange_fp8_h200x2", "oxzr")),
    cpu_ranks(),
    eager(),
    links("one pair at a time", "pairs"),
    links("all four, each to three", "all_to_all"),
    overlap("`sms` on four", "bench_overlap_h200x4", "lxyp"),
    overlap("`sms` on two", "bench_overlap_h200x2", "wiii"),
    systems("tokens, 2× H200", "bench_exchange_h200x2", "csun"),
    systems("tokens, 4× H200", "bench_exchange_h200x4", "gxgs"),
    by_sms("SMs, 4× H200", "bench_sms_h200x4", "wtwj"),
    by_sms("SMs, 2× H200", "bench_sms_h200x2", "juoe"),
    zipf("tokens, zipf, 4× H200", "bench_zipf_h200x4", "trfp"),
    zipf("tokens, zipf, 2× H200", "bench_zipf_h200x2", "ypox"),
    systems_of_rows(),
    beside_liger(),
    many_rows(),
    stages_of_rows("rms_norm"),
    stages_of_rows("rms_norm_fp8"),
    stages_of_rows("rms_norm_backward"),
    timeline("tokens, 4× H200", "bench_trace_h200x4", "cpvz"),
    timeline("tokens, 2× H200", "bench_trace_h200x2", "ziqr"),
    layer_parts("forward, tokens", "layer_h200", "mees", (1, 128, 4096)),
    layer_parts("with gradients, tokens", "layer_h200", "nbla", (128, 4096)),
    layer_parts("forward on two, tokens", "layer_h200x2", "asnu", (1, 128, 4096)),
    layer_parts("with gradients on two, tokens", "layer_h200x2", "dygh", (128, 4096)),
    layer_parts("alone on two H100, tokens", "layer_h100x2", "qaeu", (128, 4096)),
    layer_by_sms(),
    nccl("dispatch", {"NCCL all-gather": "all_gather", "NCCL all-to-all": "all_to_all"}),
    nccl("combine", {"NCCL, all sums": "all_to_all_sums", "NCCL, wanted sums": "all_to_all"}),
]


def number(cell: str) -> tuple[float, float]:
    """The number of a cell, and half a unit of its last digit."""
    found = re.match(r"\**([\d.]+)", cell)
    assert found, cell
    decimals = len(found[1].partition(".")[2])
    return float(found[1]), 0.5 * 10**-decimals


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.page}: {table.first}")
def test_a_table_shows_the_raw_lines(table: Table) -> None:
    rows = table.rows()
    assert rows and set(rows[0]) == {table.first, *table.columns, *table.unchecked}
    wrong = []
    for row in rows:
        for name, column in table.columns.items():
            if not row[name]:
                continue
            keys = (column.shown, "us_p99") if table.has_p99 else (column.shown,)
            for key, cell in zip(keys, row[name].split(" / "), strict=True):
                shown, half_a_digit = number(cell)
                measured = column.value(table.row(row[table.first]), key)
                if abs(shown - measured) > half_a_digit * 1.0001:
                    wrong.append((row[table.first], name, key, shown, measured))
    assert wrong == []


def test_the_page_of_kernels_says_how_long_the_tail_is() -> None:
    tails = [
        column.value(table.row(row[table.first]), "us_p99") / column.value(table.row(row[table.first]))
        for table in TABLES
        if table.page == "kernels.md"
        for row in table.rows()
        for name, column in table.columns.items()
        if row[name]
    ]
    said = re.search(r"their p99 is at most ([\d.]+) × that", (DOCS / "kernels.md").read_text())
    assert said and float(said[1]) == round(max(tails), 2)


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


@pytest.mark.parametrize("machine, first", [("four H200", "tokens, 4× H200"), ("two H200", "tokens, 2× H200")])
def test_the_readme_quotes_the_performance_page(machine: str, first: str) -> None:
    page = {row[first]: row for row in next(table for table in TABLES if table.first == first).rows()}
    quoted = re.findall(rf"^\| {machine}, (\d+) tokens \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(quoted) == 2
    for count, cells in quoted:
        row = page[count]
        assert cells.split(" | ") == [row["dispatch"], row["dispatch as fp8"], row["combine"], row["row push"]]
