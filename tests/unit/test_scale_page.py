"""The figures in docs/scaling.md that were not measured equal what the code computes."""

from __future__ import annotations

import re
from math import comb
from pathlib import Path

import pytest

from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Bounds, workspace_layout

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text().partition("## By ranks, on paper")[2]
HIDDEN, TOPK, MIB = 7168, 8, 2**20
EXPERTS = {4: 256, 8: 256, 16: 256, 72: 288}
SLACK = 0.01  # the words and padding of a layout may change by this much


def table(first: str) -> list[list[float]]:
    """Return the numbers in the rows of the table whose head begins with `first`."""
    rows = PAGE[PAGE.index(first) :].split("\n\n")[0].splitlines()[2:]
    return [[float(re.sub(r"[^0-9.]", "", cell)) for cell in row.strip("|").split("|")] for row in rows]


def spec_of(ranks: int, tokens: int, capacity: int | str = "worst", wire: str | None = None) -> ExchangeSpec:
    return ExchangeSpec(tokens, HIDDEN, EXPERTS[ranks], TOPK, capacity=capacity, wire=wire)


def ranks_named(ranks: int) -> float:
    """Return the mean number of ranks that a token goes to, if all sets of experts are equally likely."""
    experts, local = EXPERTS[ranks], EXPERTS[ranks] // ranks
    return ranks * (1 - comb(experts - local, TOPK) / comb(experts, TOPK))


def test_the_memory_table_holds_the_computed_sizes():
    rows = table("| ranks | tokens | heap |")
    assert [(int(ranks), int(tokens)) for ranks, tokens, *_ in rows] == [(r, t) for t in (4096, 128) for r in EXPERTS]
    for row in rows:
        ranks, tokens = int(row[0]), int(row[1])
        spec = spec_of(ranks, tokens)
        capacity = tokens * TOPK * 5 // 4 + EXPERTS[ranks] // ranks * 15
        want = [
            workspace_layout(Bounds.of(spec), ranks).nbytes / MIB,
            spec.rows(ranks) * spec.row_bytes / MIB,
            spec_of(ranks, tokens, capacity).rows(ranks) * spec.row_bytes / MIB,
            100 * ranks_named(ranks) / ranks,
        ]
        assert row[2:] == pytest.approx(want, rel=SLACK, abs=0.6)


def test_the_table_of_sent_rows_holds_the_computed_traffic():
    for row in table("| ranks | rows sent a token |"):
        ranks, tokens = int(row[0]), 4096
        sent = ranks_named(ranks) * (ranks - 1) / ranks
        plain, small = spec_of(ranks, tokens), spec_of(ranks, tokens, wire="float8_e4m3")
        mb, fp8 = (tokens * sent * spec.wire_row_bytes / 1e6 for spec in (plain, small))
        told = workspace_layout(Bounds.of(plain), ranks).region("told").nbytes / 2 / ranks * (ranks - 1) / 1e6
        want = [sent, mb, mb / 0.344, mb / 0.381, fp8, fp8 / 0.381, 100 * told / mb]
        assert row[1:] == pytest.approx(want, rel=SLACK, abs=0.6)
