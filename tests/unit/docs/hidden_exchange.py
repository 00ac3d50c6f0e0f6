"""A model of the exchange beside the products on more GPUs, out of what two and four took: no run was made of it.

A rank has the same products and rows on any number of ranks, and sends more. A link takes the bytes at the rate of four
H200. The cost of the exchange's SMs to the product grows with the rows that the exchange reads and writes. The columns
that are combined after the product take their share of a longer combine.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import Any

from raymoe.exchange.spec import ExchangeSpec
from tests.unit.docs.raw_lines import Column

MEASURED, RANKS = 2, (4, 8, 16)
RATES = {"bfloat16": ("bench_exchange_h200x4", "unnt"), "float8_e4m3": ("bench_exchange_fp8_h200x4", "rzwe")}
"""The runs of four H200 that give GB/s: the file and the end of the run's name."""

Line = Mapping[str, Any]


def ranks_named(ranks: int, experts: int, topk: int) -> float:
    """Return the mean number of ranks that a token goes to, if all sets of experts are equally likely.

    >>> round(ranks_named(2, 256, 8), 3), round(ranks_named(8, 256, 8), 3)
    (1.993, 5.295)
    """
    return ranks * (1 - comb(experts - experts // ranks, topk) / comb(experts, topk))


def rows_moved(line: Line, ranks: int) -> float:
    """Return the rows that an exchange reads and writes for a token: at the experts, on both sides, at the source."""
    return float(line["topk"] + 2 * ranks_named(ranks, line["experts"], line["topk"]) + 1)


def exchange_us(line: Line, ranks: int) -> float:
    """Return the time of the exchange alone: that of two GPUs, or of its bytes on a link where these take longer."""
    op = line["op"].partition("+")[0]
    spec = ExchangeSpec(line["tokens"], line["hidden"], line["experts"], line["topk"], wire=wire_of(line["dtype"]))
    row_bytes = spec.wire_row_bytes if op == "dispatch" else spec.row_bytes
    sent = ranks_named(ranks, line["experts"], line["topk"]) * (ranks - 1) / ranks
    file, run = RATES[line["dtype"]]
    keys = {"backend": "fused", "op": op, "tokens": 4096, "l2": "cold"}
    rate = Column(file, run, keys, shown="gbps_wire").value({})
    return max(line["exchange_us"], line["tokens"] * sent * row_bytes / rate / 1e3)


def wire_of(dtype: str) -> dict[str, str] | None:
    """Return the wire of a layer: with 8-bit experts rows are dispatched as 8 bits, and sums are of 16."""
    return None if dtype == "bfloat16" else {"dispatch": dtype, "combine": "bfloat16"}


def hidden_us(line: Line, ranks: int) -> float:
    """Return what both take less beside each other than one after the other; on two GPUs what was measured.

    >>> both = {"both_us": 1070.0, "parts_100_us": 1100.0}
    >>> line = {"op": "combine+down", "dtype": "bfloat16", "tokens": 4096, "hidden": 400, "experts": 256, "topk": 8}
    >>> line |= {"exchange_us": 200.0, "product_us": 1000.0, "sum_us": 1190.0, "best_sms": 8, "beside": {"8": both}}
    >>> hidden_us(line, 2)
    90.0
    """
    longer = exchange_us(line, ranks) - line["exchange_us"]
    both = line["beside"][str(line["best_sms"])]["both_us"]
    cost = (both - line["product_us"]) * rows_moved(line, ranks) / rows_moved(line, MEASURED)
    beside = [
        max(line["product_us"] + cost, share * line["product_us"] + (1 - share) * exchange_us(line, ranks))
        + after
        + share * longer
        for share, after in left_for_later(line)
    ]
    return float(line["sum_us"] + longer - min(beside))


def left_for_later(line: Line) -> list[tuple[float, float]]:
    """Return the shares of columns that may be combined after the product, and how much longer both take with these.

    A dispatch leaves none: it is that of other tokens.
    """
    both = line["beside"][str(line["best_sms"])]["both_us"]
    names = {name for times in line["beside"].values() for name in times if name.startswith("parts_")}
    return [
        (int(name.split("_")[1]) / line["hidden"], min(times[name] for times in line["beside"].values()) - both)
        for name in sorted(names)
    ] or [(0.0, 0.0)]
