"""The figures in docs/scaling.md that were not measured equal what the code computes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import comb

import pytest

from raymoe.exchange.peer.workspace import Bounds, workspace_layout
from raymoe.exchange.spec import ExchangeSpec
from raymoe.workload.memory_needed import rail_buffers
from tests.python_path import REPOSITORY

PAGE = (REPOSITORY / "docs" / "scaling.md").read_text().partition("## By ranks, on paper")[2]
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


NETWORK, NVLINK, CHUNKS = 45e9, 344e9, 8
HYBRID_EP = {"bf16": (76.80, 57.69, 50.55), "fp8": (68.48, 55.35, 46.63)}
"""GB/s on 2, 4 and 8 nodes that DeepEP publishes for Hybrid-EP."""


def needs_a_node(nodes: int) -> float:
    """Return the probability that a token needs a given node."""
    return 1 - comb(256 - 256 // nodes, TOPK) / comb(256, TOPK)


def test_the_times_on_several_nodes_follow_from_the_constants():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [248] \| (bf16|fp8) \|", line)]
    assert [(row[0], row[1]) for row in rows] == [(n, kind) for kind in ("bf16", "fp8") for n in "248"]
    for place, (nodes_text, kind, *found) in enumerate(rows):
        nodes, tokens = int(nodes_text), 4096
        row_bytes = spec_of(8, tokens, wire="float8_e4m3" if kind == "fp8" else None).wire_row_bytes
        network = (nodes - 1) * tokens * row_bytes
        share, inside = needs_a_node(nodes), tokens * named_of_256(8 * nodes) * 7 / 8 * row_bytes
        every, needed, links = (1e6 * each for each in (network / NETWORK, network * share / NETWORK, inside / NVLINK))
        hybrid = tokens * nodes * share * row_bytes / HYBRID_EP[kind][place % 3] / 1e3
        want = [network / 1e6, every, needed, inside / 1e6, links, every + links]
        want += [every + links / CHUNKS, needed + links / CHUNKS, hybrid]
        assert [float(each) for each in found] == pytest.approx(want, rel=SLACK, abs=0.6)


def named_of_256(ranks: int) -> float:
    """Return the mean number of ranks that a token goes to, of 256 experts."""
    return ranks * (1 - comb(256 - 256 // ranks, TOPK) / comb(256, TOPK))


def test_the_memory_on_several_nodes_is_computed():
    for nodes, heap, buffers in table("| nodes | heap |"):
        spec, domains = spec_of(8, 4096), int(nodes)
        inside = replace(spec, tokens=domains * spec.tokens)
        rail = rail_buffers(spec, 8 * domains, domains)
        want = [workspace_layout(Bounds.of(inside), 8).nbytes / MIB, rail / MIB if domains > 1 else 0]
        assert [heap, buffers] == pytest.approx(want, rel=SLACK, abs=0.6)


def test_the_times_over_a_shaped_link_are_the_raw_lines():
    raw = (REPOSITORY / "benchmarks" / "rail_shaped_cpu.txt").read_text().splitlines()
    lines = [json.loads(line) for line in raw]
    want = [[line["topk"], round(line["rail_ms"]), round(line["flat_ms"])] for line in lines]
    assert table("| top-k | over the rail | flat |") == want


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
        routing = (
            workspace_layout(Bounds.of(plain), ranks).region("routing_entries").nbytes / 2 / ranks * (ranks - 1) / 1e6
        )
        want = [sent, mb, mb / 0.344, mb / 0.381, fp8, fp8 / 0.381, 100 * routing / mb]
        assert row[1:] == pytest.approx(want, rel=SLACK, abs=0.6)


def test_the_times_of_a_hop_are_the_raw_lines():
    raw = (REPOSITORY / "benchmarks" / "rail_one_gpu_h200.txt").read_text().splitlines()
    want = {}
    for line in map(json.loads, raw):
        for op in ("dispatch", "combine"):
            names = [f"inside: {op}", f"without network: {op}", f"network: {op}", op]
            names += [f"{op} in {chunks}" for chunks in (2, 4, 8)]
            times = [f"{line[name]:.0f}" if name in line else "" for name in names]
            want[f"{line['domains']}, {line['tokens']}, {op}"] = times
    page = PAGE.split("| domains, tokens, operation |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in page]
    assert {name: times for name, *times in rows} == want
