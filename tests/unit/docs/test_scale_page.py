"""The numbers in docs/internals/many_ranks.md, which nobody measured, equal what the code computes."""

from __future__ import annotations

import re
from dataclasses import replace
from math import comb

import pytest

from raymoe.exchange.peer.workspace import Bounds, workspace_layout
from raymoe.exchange.spec import ExchangeSpec
from raymoe.workload.memory_needed import rail_buffers
from tests.python_path import REPOSITORY
from tests.unit.docs.derived_tables import BESIDE_PRODUCTS, json_lines
from tests.unit.docs.hidden_exchange import RANKS, exchange_us, hidden_us

PAGE = (REPOSITORY / "docs" / "internals" / "many_ranks.md").read_text()
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


def needs_a_node(nodes: int) -> float:
    """Return the probability that a token needs a given node."""
    return 1 - comb(256 - 256 // nodes, TOPK) / comb(256, TOPK)


def test_the_page_says_how_many_domains_a_token_needs():
    said = re.search(
        r"probability ([\d.]+) at two domains, ([\d.]+) at four and ([\d.]+) at eight", PAGE.replace("\n", " ")
    )
    assert said
    assert list(said.groups()) == [f"{needs_a_node(nodes):.3f}" for nodes in (2, 4, 8)]


def test_the_memory_on_several_nodes_is_computed():
    for nodes, heap, buffers in table("| nodes | heap, MiB |"):
        spec, domains = spec_of(8, 4096), int(nodes)
        inside = replace(spec, tokens=domains * spec.tokens)
        rail = rail_buffers(spec, 8 * domains, domains)
        want = [workspace_layout(Bounds.of(inside), 8).nbytes / MIB, rail / MIB if domains > 1 else 0]
        assert [heap, buffers] == pytest.approx(want, rel=SLACK, abs=0.6)


def test_the_memory_table_holds_the_computed_sizes():
    rows = table("| ranks | heap, MiB |")
    assert [int(ranks) for ranks, *_ in rows] == list(EXPERTS)
    for row in rows:
        ranks, tokens = int(row[0]), 4096
        spec = spec_of(ranks, tokens)
        capacity = tokens * TOPK * 5 // 4 + EXPERTS[ranks] // ranks * 15
        want = [
            workspace_layout(Bounds.of(spec), ranks).nbytes / MIB,
            spec.rows(ranks) * spec.row_bytes / MIB,
            spec_of(ranks, tokens, capacity).rows(ranks) * spec.row_bytes / MIB,
            100 * ranks_named(ranks) / ranks,
        ]
        assert row[1:] == pytest.approx(want, rel=SLACK, abs=0.6)


def test_the_table_of_sent_rows_holds_the_computed_traffic():
    for row in table("| ranks | rows sent a token |"):
        ranks, tokens = int(row[0]), 4096
        sent = ranks_named(ranks) * (ranks - 1) / ranks
        plain, small = spec_of(ranks, tokens), spec_of(ranks, tokens, wire="float8_e4m3")
        mb, fp8 = (tokens * sent * spec.wire_row_bytes / 1e6 for spec in (plain, small))
        routing = (
            workspace_layout(Bounds.of(plain), ranks).region("routing_entries").nbytes / 2 / ranks * (ranks - 1) / 1e6
        )
        want = [sent, mb, fp8, 100 * routing / mb]
        assert row[1:] == pytest.approx(want, rel=SLACK, abs=0.6)


def test_the_model_of_hidden_exchanges_gives_on_two_gpus_what_was_measured():
    lines = [line for line in json_lines(BESIDE_PRODUCTS) if "gain_us" in line]
    assert len(lines) == 8
    for line in lines:
        measured = line["gain_us"] if line["gain_in_parts_us"] is None else line["gain_in_parts_us"]
        assert hidden_us(line, 2) == pytest.approx(measured, abs=0.11)
        assert exchange_us(line, 2) == line["exchange_us"]
        assert hidden_us(line, 8) > exchange_us(line, 8) / 2  # as the page says
        assert all(hidden_us(line, ranks) < exchange_us(line, ranks) for ranks in RANKS)
