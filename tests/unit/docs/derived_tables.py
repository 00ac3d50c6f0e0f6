"""Tables of the evidence that no line holds as it is: computed from lines, or read from a .txt file of benchmarks/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tests.unit.docs.measured_tables import DOCS
from tests.unit.docs.raw_lines import BENCHMARKS, Column, date_of

Cells = Sequence[Sequence[str]]
BESIDE = "bench_overlap_h200x2"


@dataclass(frozen=True)
class Derived:
    """A table whose head begins with `first`, and what computes its rows."""

    page: str
    first: str
    rows: Callable[[], Cells]

    def shown(self) -> Cells:
        text = (DOCS / self.page).read_text()
        assert text.count(f"| {self.first} |") == 1, f"{self.page} has no single table of {self.first}"
        lines = text[text.index(f"| {self.first} |") :].split("\n\n")[0].splitlines()[2:]
        return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def text_of(name: str) -> str:
    return (BENCHMARKS / name).read_text()


def json_lines(name: str) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in text_of(name).splitlines() if line.startswith("{")]


def lines_over_tokens() -> Cells:
    """Straight lines through the p50 of 2048 to 8192 tokens, by least squares."""
    rows = []
    for name, backend, op in (
        ("dispatch", "fused", "dispatch"),
        ("combine", "fused", "combine"),
        ("`row_push`", "row_push", "dispatch"),
    ):
        column = Column("bench_exchange_h200x2", "csun", {"backend": backend, "op": op, "l2": "cold"})
        tokens = numpy.array([2048, 4096, 8192])
        us = numpy.array([column.value({"tokens": int(count)}) for count in tokens])
        slope, start = numpy.polyfit(tokens / 1024, us, 1)
        distance = max(abs(us - (start + slope * tokens / 1024)) / us)
        rows.append([name, f"{start:.1f}", f"{slope:.1f}", f"{100 * distance:.1f} %"])
    return rows


def one_after_the_other() -> Cells:
    """What a product and an operation take alone, and the share that they save side by side."""
    rows = []
    for sms in ("32", "48", "64", "auto"):
        cells = [sms]
        for op in ("dispatch", "combine"):
            alone, product, both = (_beside(name, sms) for name in (op, "product", f"{op}+product"))
            saved = round(100 * (1 - both / (alone + product)))
            cells += [f"{alone + product:.0f}", f"{saved} %"]
        rows.append(cells)
    return rows


def _beside(op: str, sms: str) -> float:
    keys = {"backend": "fused", "case form": "whole", "op": op, "beside": None, "case sms": sms}
    return Column(BESIDE, "wiii", keys).value({})


def over_a_slow_link() -> Cells:
    lines = json_lines("rail_shaped_cpu.txt")
    return [[f"{line['topk']}", f"{line['rail_ms']:.0f}", f"{line['flat_ms']:.0f}"] for line in lines]


def hops() -> Cells:
    rows = []
    for line in json_lines("rail_one_gpu_h200.txt"):
        if line["tokens"] != 4096:
            continue
        for op in ("dispatch", "combine"):
            names = [f"inside: {op}", f"without network: {op}", f"network: {op}", op]
            names += [f"{op} in {chunks}" for chunks in (2, 4, 8)]
            times = [f"{line[name]:.0f}" if name in line else "" for name in names]
            rows.append([f"{line['domains']}, {line['tokens']}, {op}", *times])
    return rows


def beside_transformers() -> Cells:
    keys = ("layer", "layer_products", "block", "block_products")
    lines = [
        line
        for name in ("layer_beside_transformers_h200.txt", "layer_beside_transformers_h200x2.txt")
        for line in json_lines(name)
    ]
    return [[f"{line['ranks']}", f"{line['tokens']}", *(f"{line[key]:.0f}" for key in keys)] for line in lines]


MODELS = {
    "deepseek_v3": "DeepSeek-V3, top-8 of 256",
    "qwen3": "Qwen3, top-8 of 128",
    "mixtral": "Mixtral, top-2 of 8",
    "gpt_oss": "gpt-oss, top-4 of 128",
}


def routers() -> Cells:
    lines = re.findall(r"^router (\w+) (\d+): ([\d.]+) us, torch.compile ([\d.]+) us", text_of("router_h200.txt"), re.M)
    rows = []
    for model, name in MODELS.items():
        ours, compiled = zip(*((us, other) for known, _, us, other in lines if known == model), strict=True)
        rows.append([name, *(f"{float(us):.1f}" for us in (*ours, *compiled))])
    return rows


def eager_calls() -> Cells:
    names = ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "swiglu with weights", "pointwise", "router")
    rows = []
    for name in names:
        line = re.search(rf"^{name}  +((?:[\d.]+ *){{10}})$", text_of("eager_rows_h100.txt"), re.M)
        assert line, name
        shown, _, weights = name.partition(" with ")
        cells = line[1].split()
        first = f"`{shown}`" if shown != "router" else shown
        rows.append([first + (f" with {weights}" if weights else ""), *cells[:3], *cells[6:9]])
    return rows


def eager_runs() -> Cells:
    """Three runs of two H200, and two of two H100, of calls of 128 tokens in a row."""
    rows = []
    for file, run, name in (
        ("eager_h200x2", "pwsz", "H200, `{}`"),
        ("eager_h200x2", "mato", "H200, `{}`, a minute later"),
        ("eager_h200x2", "lyah", "H200, `{}`"),
        ("eager_h100x2", "nfll", "H100, `{}`"),
        ("eager_h100x2", "zomd", "H100, `{}`, each rank bound to a half of the CPUs"),
    ):
        keys = {"backend": "fused", "tokens": 128, "l2": "warm"}
        calls = [Column(file, run, {**keys, "op": op}, shown="host_us_p50").value({}) for op in ("dispatch", "combine")]
        both = Column(file, run, {**keys, "op": "exchange"})
        line = both.lines({})[0]
        rows.append([date_of(line), name.format(line["commit"][:7]), *(f"{us:.1f}" for us in (*calls, both.value({})))])
    return rows


BESIDE_PRODUCTS = "beside_products_h200x2.jsonl"
FORMATS = {"bfloat16": "bf16", "float8_e4m3": "8 bits"}
ONES = {"deepseek_v3": "DeepSeek-V3", "narrow": "4096 wide"}


def beside_products() -> Cells:
    """What a product and an exchange of other rows take one after the other, and at least beside each other."""
    rows = []
    for line in json_lines(BESIDE_PRODUCTS):
        if "gain_us" not in line:
            continue
        name = f"{ONES[line['shape']]}, {FORMATS[line['dtype']]}, {line['op'].replace('+', ' + ')}"
        both = line["beside"][str(line["best_sms"])]["both_us"]
        gains = [line[key] for key in ("gain_us", "gain_in_parts_us", "gain_in_pieces_us", "bar_us")]
        times = [f"{line[key]:.0f}" for key in ("exchange_us", "product_us", "sum_us")]
        shown = ["" if each is None else f"{each:.0f}" for each in gains]
        rows.append([name, *times, f"{both:.0f}", str(line["best_sms"]), *shown])
    return rows


def combine_beside_down() -> Cells:
    """DeepSeek-V3's combine beside its down product, by the SMs of the combine."""
    rows = []
    for line in json_lines(BESIDE_PRODUCTS):
        if line["shape"] != "deepseek_v3" or line["op"] != "combine+down":
            continue
        for sms, times in line["beside"].items():
            keys = ("exchange_us", "product_us", "both_us", "exchange_ends_us", "kept_off_us")
            keys += ("parts_1024_us", "parts_512_us", "pieces_2_us", "pieces_4_us", "mhz")
            rows.append([f"{FORMATS[line['dtype']]}, {sms}", *(f"{times[key]:.0f}" for key in keys)])
    return rows


DERIVED = [
    Derived("evidence/scaling.md", "two H200, µs", lines_over_tokens),
    Derived("evidence/overlap.md", "`sms`", one_after_the_other),
    Derived("evidence/domains.md", "top-k", over_a_slow_link),
    Derived("evidence/domains.md", "domains, tokens, operation", hops),
    Derived("evidence/layer.md", "H200, ranks", beside_transformers),
    Derived("evidence/archive.md", "router, µs", routers),
    Derived("evidence/rows.md", "host µs of a call", eager_calls),
    Derived("evidence/experiments/backends.md", "date", eager_runs),
    Derived("evidence/experiments/beside_products.md", "two H200, µs", beside_products),
    Derived("evidence/experiments/beside_products.md", "combine + down, SMs", combine_beside_down),
]
