"""Numbers in sentences and in the pages of experiments are in the raw files too."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median

import pytest

from raymoe.report.measures import measured_link_gbps
from tests.python_path import REPOSITORY
from tests.unit.docs.blocks_figure import blocks_of, last_end, pause, rows_of, spread_of_ends
from tests.unit.docs.derived_tables import (
    DERIVED,
    FP8_FORWARD,
    WITH_8_BITS,
    host_steps,
    json_lines,
    product_time,
    ray_tensors_ms,
)
from tests.unit.docs.measured_tables import DOCS, by_one_clock
from tests.unit.docs.raw_lines import BENCHMARKS, Column

GIB = 1 << 30
BESIDE = "docs/evidence/experiments/beside_products.md"
_NUMBER = r"\d+(?:\.\d+)?"
_UNITS = "µs|us|ms|GB/s|TB/s|TFLOP/s|%|times as"
_QUANTITY = re.compile(rf"(?<![\w.])(?:{_NUMBER}(?:,| and| to| or)? )*{_NUMBER} ?(?:{_UNITS})(?!\w)")
EVIDENCE = [*sorted((DOCS / "evidence").glob("*.md")), REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md"]
SPEEDS = _QUANTITY.pattern.replace("|ms", "").replace("|%", "")
"""In pages that are no evidence, milliseconds and percentages are limits and rules."""


def _push(keys: dict[str, object], file: str = "bench_exchange_h200x2", run: str = "csun") -> float:
    return Column(file, run, {"l2": "cold", "tokens": 4096, **keys}).value({})


def _ratio(file: str, run: str) -> float:
    dispatch, push = (_push({"backend": name, "op": "dispatch"}, file, run) for name in ("fused", "row_push"))
    return dispatch / push


def _copied_gbps(transport: str) -> float:
    keys = {"case": "protocol=put,pattern=pairs", "transport": transport, "bytes": 256 << 20}
    return Column("p2p_h200x2", "awho", keys, "gbps_wire").value({})


def _mirror() -> float:
    lines = [json.loads(line) for line in (BENCHMARKS / "rail_one_gpu_h200.txt").read_text().splitlines()]
    return float(min(line["gbps"] for line in lines))


def _small_tensors() -> list[float]:
    """Milliseconds between two Ray actors, of sizes at which Ray's own work dominates."""
    sizes = (4 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
    return [ray_tensors_ms(way, size) for way in ("raymoe", "raymoe_in_pool", "ray_nccl") for size in sizes]


ROWS = (1, 8, 64, 128, 256, 512, 1024, 4096)
"""Of the table in docs/products.md."""


def _uniform(op: str, system: str, rows: int) -> float:
    return product_time("uniform", op, system, rows)


def _equal(op: str, rows: int) -> float:
    """What a product takes in times of grouped_mm, where every expert has as many rows."""
    return product_time("equal", op, "raymoe", rows) / product_time("equal", op, "grouped_mm", rows)


def _of_copy(rows: int) -> float:
    """The share in percent of a product's time in which its weights' bytes come at the speed of a copy."""
    return 100 * _uniform("up", "copy", rows) / _uniform("up", "raymoe", rows)


def _with_swiglu(swiglu: str, product: str) -> float:
    """What SwiGLU adds in percent, where it adds most."""
    return max(100 * (_uniform("up_swiglu", swiglu, rows) / _uniform("up", product, rows) - 1) for rows in ROWS)


def _in_8_bits(tokens: int, *parts: str) -> float:
    """The sum of parts of DeepSeek-V3's layer with 8-bit experts."""
    keys = {"tokens": tokens, "l2": "cold"}
    return sum(Column("layer_fp8_h100x2", WITH_8_BITS, {**keys, "op": part}).value({}) for part in parts)


_NOT_SHARED = ("norm", "router", "dispatch", "experts", "combine", "sum")


def _fp8_gain(way: str) -> float:
    """What 8 bits in the products of its forward pass alone would gain of a step."""
    return float(json_lines(FP8_FORWARD)[0]["gain"][way])


def _last(blocks: list[tuple[float, float]]) -> float:
    return max(end for _, end in blocks)


def _eight(rows: int, beside: str) -> float:
    return _uniform("up", "raymoe_fp8", rows) / _uniform("up", beside, rows)


@dataclass(frozen=True)
class Claim:
    """A sentence with measured numbers, `#` in their places, and what computes each."""

    page: str
    text: str
    values: tuple[Callable[[], float], ...]

    @property
    def pattern(self) -> str:
        return re.escape(self.text).replace(r"\#", rf"({_NUMBER})").replace(r"\ ", r"\s+")


def _microbatches(run: str, *parts: str) -> float:
    """The sum of parts of the layer that ran in microbatches, and whole."""
    return sum(Column("microbatches_h200x2", run, {"op": part, "l2": "cold"}).value({}) for part in parts)


TOKENS = (1, 16, 128, 1024, 4096)


def _beside_deepep(tokens: int, sms: str = "auto") -> float:
    """The time of a dispatch and its combine, beside that of DeepEP on as many SMs."""
    ours, theirs = (
        by_one_clock(op="exchange", backend=backend, tokens=tokens, **{"case sms": sms}).value({})
        for backend in ("fused", "deepep_v2")
    )
    return ours / theirs


def _option_cost(what: str, tokens: int, way: str) -> float:
    """The median over the rounds, in microseconds."""
    (line,) = [
        each for each in json_lines("option_costs_h200x2.jsonl") if (each["what"], each["tokens"]) == (what, tokens)
    ]
    return median(line["us"][way])


def _live_weights(key: str, run: int | None = None) -> float:
    """A number of the lines about loads and sleep; both have `bytes`."""
    lines = [line for line in json_lines("live_weights_h100x2.jsonl") if key in line]
    return float(lines[run or 0][key])


def _batch_invariant(tokens: int) -> float:
    return _option_cost("layer", tokens, "batch") / _option_cost("layer", tokens, "default")


def _step_of_megatron(host: str) -> float:
    """The median step of raymoe, beside that of Megatron's own dispatcher."""
    lines = host_steps("Megatron-Core")
    return float(lines["raymoe"]["us_p50"] / lines[f"Megatron {host}"]["us_p50"])


def _gradients(framework: str, host: str) -> float:
    """How far gradients differ from those of the framework's first dispatcher, in percent of their norm."""
    return 100 * float(host_steps(framework)[host]["gradient_difference"])


def _replays(key: str) -> list[int]:
    """Of each rank the sum over cases and steps."""
    cases = [line["ranks"] for line in json_lines("replays_h200x2.jsonl")]
    return [sum(sum(of_rank[key].values()) for of_rank in ranks) for ranks in zip(*cases, strict=True)]


CLAIMS = [
    Claim(
        "docs/reproducibility.md",
        "took # times as long at 4096 tokens, and # times as long at 128",
        (partial(_batch_invariant, 4096), partial(_batch_invariant, 128)),
    ),
    Claim(
        "docs/balance.md",
        "of 4096 tokens took # µs without slots and # with them, which misses the aim of 1.01 times; "
        "of 128 tokens # and #",
        tuple(
            partial(_option_cost, "exchange", tokens, f"{way} dispatch")
            for tokens in (4096, 128)
            for way in ("fixed", "table")
        ),
    ),
    Claim(
        "docs/frameworks.md",
        "Losses are # and #, gradients differ by # % of their norm",
        (
            lambda: host_steps("torchtitan")["torchtitan all-to-all"]["loss"],
            lambda: host_steps("torchtitan")["raymoe"]["loss"],
            partial(_gradients, "torchtitan", "raymoe"),
        ),
    ),
    Claim(
        "docs/frameworks.md",
        "raymoe loses # % to the all-gather, and wins # % over the all-to-all, less than the ranges. "
        "Losses are #, # and raymoe's #. "
        "Gradients of the all-to-all and of raymoe differ from the all-gather's by # and # % of their norm",
        (
            lambda: 100 * (_step_of_megatron("all-gather") - 1),
            lambda: 100 * (1 - _step_of_megatron("all-to-all")),
            lambda: host_steps("Megatron-Core")["Megatron all-gather"]["loss"],
            lambda: host_steps("Megatron-Core")["Megatron all-to-all"]["loss"],
            lambda: host_steps("Megatron-Core")["raymoe"]["loss"],
            partial(_gradients, "Megatron-Core", "Megatron all-to-all"),
            partial(_gradients, "Megatron-Core", "raymoe"),
        ),
    ),
    Claim(
        "docs/evidence/overlap.md",
        "All # replays of each rank gave the bits of the first replay of their rows: # differed",
        (lambda: min(_replays("replays")), lambda: max(_replays("wrong"))),
    ),
    Claim(
        "docs/evidence/overlap.md",
        "a step takes # µs, where the whole layer takes # with",
        (partial(_microbatches, "xrko", "step"), partial(_microbatches, "amis", "step")),
    ),
    Claim(
        "docs/evidence/overlap.md",
        "Dispatch and combine take # µs of the whole layer's step, the experts #.",
        (partial(_microbatches, "amis", "dispatch", "combine"), partial(_microbatches, "amis", "experts")),
    ),
    Claim(
        "docs/evidence/layer.md",
        "Of # µs the experts take #: they",
        (partial(_in_8_bits, 4096, "step"), partial(_in_8_bits, 4096, "experts")),
    ),
    Claim(
        "docs/evidence/layer.md",
        "a step takes # µs, and its other parts # one after the other. With 4096 these are # and #:",
        (
            partial(_in_8_bits, 128, "step"),
            partial(_in_8_bits, 128, *_NOT_SHARED),
            partial(_in_8_bits, 4096, "step"),
            partial(_in_8_bits, 4096, *_NOT_SHARED),
        ),
    ),
    Claim(
        "docs/evidence/layer.md",
        "Were quantising free, a step would be # times as fast",
        (partial(_fp8_gain, "free"),),
    ),
    Claim("docs/evidence/layer.md", "quantised, a step is # times as fast", (partial(_fp8_gain, "one_pass"),)),
    Claim(
        "docs/evidence/performance.md",
        "a dispatch takes # times as long as its row push, as fp8 # times",
        (
            lambda: _ratio("bench_exchange_h200x2", "csun"),
            lambda: _ratio("bench_exchange_fp8_h200x2", "oxzr"),
        ),
    ),
    Claim(
        "docs/evidence/links.md",
        "Of 256 MiB the copy engine puts # GB/s, TMA # with",
        (partial(_copied_gbps, "copy_engine"), partial(_copied_gbps, "tma")),
    ),
    Claim(
        "docs/evidence/comparison.md",
        "raymoe takes # to # times as long as DeepEP",
        (lambda: min(map(_beside_deepep, TOKENS)), lambda: max(map(_beside_deepep, TOKENS))),
    ),
    Claim(
        "docs/evidence/comparison.md",
        "with 1024 and 4096 tokens # and # times as long",
        (partial(_beside_deepep, 1024, "24"), partial(_beside_deepep, 4096, "24")),
    ),
    Claim(
        "README.md",
        "a dispatch takes # times as long as a bare push of its rows, as fp8 # times",
        (
            lambda: _ratio("bench_exchange_h200x2", "csun"),
            lambda: _ratio("bench_exchange_fp8_h200x2", "oxzr"),
        ),
    ),
    Claim("docs/evidence/comparison.md", "the share of # GB/s", (lambda: measured_link_gbps("NVIDIA H200") or 0.0,)),
    Claim(
        "docs/evidence/links.md",
        "a tensor takes # to # ms, whatever",
        (lambda: min(_small_tensors()), lambda: max(_small_tensors())),
    ),
    Claim(
        "docs/evidence/links.md",
        "A GiB takes raymoe # ms and Ray's NCCL transport #.",
        (lambda: ray_tensors_ms("raymoe", GIB), lambda: ray_tensors_ms("ray_nccl", GIB)),
    ),
    Claim(
        "docs/evidence/links.md",
        "maps memory and takes # ms, the first by Ray's NCCL transport # ms",
        (lambda: ray_tensors_ms("raymoe", 4096, "us_first"), lambda: ray_tensors_ms("ray_nccl", 4096, "us_first")),
    ),
    Claim(
        "docs/products.md",
        "From 8 to 64 rows memory bounds the product: a copy of as many bytes takes # to # %",
        (lambda: min(map(_of_copy, (8, 64))), lambda: max(map(_of_copy, (8, 64)))),
    ),
    Claim(
        "docs/products.md",
        "SwiGLU in the same kernel costs at most # % at any of these numbers of rows. "
        "8-bit results of it cost at most # %",
        (lambda: _with_swiglu("raymoe", "raymoe"), lambda: _with_swiglu("raymoe_fp8_quantised", "raymoe_fp8")),
    ),
    Claim(
        "docs/products.md",
        "of 1024 rows beside 63 of 4: #, grouped_mm #. All experts with 272 rows: # and #.",
        (
            lambda: product_time("hot", "up", "raymoe", 1024),
            lambda: product_time("hot", "up", "grouped_mm", 1024),
            lambda: product_time("equal", "up", "raymoe", 272),
            lambda: product_time("equal", "up", "grouped_mm", 272),
        ),
    ),
    Claim(
        "docs/products.md",
        "8 bits take # of the time at 8 rows and # at 64, where memory bounds. "
        "At 512, 1024 and 4096 rows they take #, # and # of `dense`; where every expert has 272 rows, #",
        (
            lambda: _eight(8, "raymoe"),
            lambda: _eight(64, "raymoe"),
            lambda: _eight(512, "dense"),
            lambda: _eight(1024, "dense"),
            lambda: _eight(4096, "dense"),
            lambda: product_time("equal", "up", "raymoe_fp8", 272) / product_time("equal", "up", "dense", 272),
        ),
    ),
    Claim(
        "docs/products.md",
        "take # to # of the time of grouped_mm, except `down` with 256, which takes #. "
        "Gradients of `x` take #, # and # of its time there",
        (
            lambda: min(_equal("down", 512), *(_equal("up", rows) for rows in (256, 512, 1024))),
            lambda: max(_equal(op, rows) for op in ("up", "down") for rows in (256, 512, 1024)),
            lambda: _equal("down", 256),
            lambda: _equal("dx", 256),
            lambda: _equal("dx", 512),
            lambda: _equal("dx", 1024),
        ),
    ),
    Claim("docs/evidence/domains.md", "its own rows back at # GB/s", (_mirror,)),
    Claim(
        "docs/weights.md",
        "ran at # GB/s, a plain copy at #. There # GB of weights slept in # s and woke in # s; "
        "pinning the host's memory took # s, once",
        (
            partial(_live_weights, "load_gbps"),
            partial(_live_weights, "copy_gbps"),
            lambda: _live_weights("bytes", 1) / 1e9,
            partial(_live_weights, "sleep_s"),
            partial(_live_weights, "wake_s"),
            partial(_live_weights, "pinning_s"),
        ),
    ),
    Claim(
        BESIDE,
        "blocks of the product end over # µs, the combine begins # µs after the last, and ends at # µs",
        (
            lambda: spread_of_ends("in_turn", "product"),
            lambda: pause("in_turn"),
            lambda: last_end("in_turn"),
        ),
    ),
    Claim(
        BESIDE,
        "has # SMs. Its blocks end by # µs. The # blocks of the product that found no SM begin as those end, "
        "the last of them ends at # µs",
        (
            lambda: len(blocks_of("beside", "exchange")),
            lambda: _last(blocks_of("beside", "exchange")),
            lambda: sum(row[0][0] == "exchange" for row in rows_of("beside")),
            lambda: last_end("beside"),
        ),
    ),
    Claim(
        BESIDE,
        "own rows ends # µs after the product, so nearly all of it is hidden. "
        "But the product, in pieces and on # SMs, ends at # µs instead of #",
        (
            lambda: last_end("told") - _last(blocks_of("told", "product")),
            lambda: len(blocks_of("told", "product")),
            lambda: _last(blocks_of("told", "product")),
            lambda: _last(blocks_of("in_turn", "product")),
        ),
    ),
]


def sentences(page: Path) -> str:
    """The page without tables, blocks of code and words between backticks."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text[:50])
def test_a_claim_says_what_the_raw_lines_say(claim: Claim) -> None:
    found = re.search(claim.pattern, sentences(REPOSITORY / claim.page))
    assert found, f"{claim.page} does not say this"
    for shown, value in zip(found.groups(), claim.values, strict=True):
        half_a_digit = 0.5 * 10 ** -len(shown.partition(".")[2])
        assert abs(float(shown) - value()) <= half_a_digit * 1.0001, (shown, value())


def loose(page: Path, quantity: str, text: str | None = None) -> list[str]:
    """The measured numbers of a page's sentences that no claim holds."""
    text = sentences(page) if text is None else text
    name = str(page.relative_to(REPOSITORY))
    held = [found.span() for claim in CLAIMS if claim.page == name for found in re.finditer(claim.pattern, text)]
    bare = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), text)
    return [
        found[0]
        for found in re.finditer(quantity, bare)
        if not any(begin <= found.start() < end for begin, end in held)
    ]


@pytest.mark.parametrize("page", EVIDENCE, ids=lambda page: page.name)
def test_every_measured_number_in_a_sentence_is_claimed(page: Path) -> None:
    assert loose(page, _QUANTITY.pattern) == [], "take these out, or add a Claim that computes them"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_pages_for_users_quote_no_time(page: Path) -> None:
    """They link to the evidence."""
    assert loose(page, SPEEDS) == []


@pytest.mark.parametrize(
    "text", ["takes 1.26 times as long", "in 17 µs", "172 and 94.3 us", "reaches 345.5 GB/s", "19 %"]
)
def test_a_number_without_a_claim_would_be_found(text: str) -> None:
    assert loose(DOCS / "evidence" / "performance.md", _QUANTITY.pattern, f"A dispatch {text} there.") != []


# Pages of experiments: a number of three digits or more in a table is, rounded, in a raw file that the page names.

EXPERIMENTS = sorted((DOCS / "evidence" / "experiments").glob("*.md"))
UNKEPT = {
    "products.md": (
        {"2561", "2733", "3033", "2678", "1486", "1431", "1589", "1471", "782"}
        | {"2815", "3199", "3375", "1848", "1249", "1758", "1741", "970"}
        | {"1696"},  # a sum on paper
        "no raw lines of DeepGEMM are kept",
    ),
    "backends.md": ({"6598", "3600", "7379"}, "no raw lines of *before* are kept"),
    "router_logits.md": ({"16.9", "41.3", "827", "28.3", "29.5", "121"}, "sums of two lines"),
}
"""Numbers that no raw file has as they are, and the words of the page that say so."""


def raw_numbers(page: Path) -> list[float]:
    names = re.findall(r"benchmarks/([\w*]+\.(?:txt|jsonl))", page.read_text())
    files = [path for name in names for path in BENCHMARKS.glob(name)]
    return sorted(number for path in set(files) for number in _numbers(path))


def _numbers(path: Path) -> Iterator[float]:
    if path.suffix == ".txt":
        yield from map(float, re.findall(_NUMBER, path.read_text()))
        return
    for line in map(json.loads, path.read_text().splitlines()):
        shown = [value for key, value in line.items() if "us_" in key or key.endswith("_gbps")]
        yield from (value for value in shown if isinstance(value, int | float))
        if isinstance(line.get("us"), dict):  # of each way the times of all rounds, in tests/perf/few_sms.py
            yield from (us for times in line["us"].values() for us in times)
        beside = line.get("beside")  # a product; or times for each number of SMs
        inner = beside.values() if isinstance(beside, dict) else ()
        for times in (line, *(each for each in inner if isinstance(each, dict))):
            named = ((key, value) for key, value in times.items() if isinstance(value, int | float))
            yield from (value for key, value in named if "us_" in key or key.endswith("_us") or key == "mhz")
        yield from (number for _, *times in line.get("timeline") or () for number in times)


def shown_numbers(page: Path) -> Iterator[str]:
    """Yield the numbers of tables, but of those that are computed: `test_a_derived_table_is_what_is_computed`."""
    computed = tuple(f"| {table.first} |" for table in DERIVED if DOCS / table.page == page)
    for is_table, block in groupby(page.read_text().splitlines(), key=lambda line: line.startswith("|")):
        lines = list(block)
        for line in lines if is_table and not (computed and lines[0].startswith(computed)) else ():
            _, _, cells = line[1:].partition("|")
            for number in re.findall(rf"(?<![\w.`×-]){_NUMBER}(?![\w`])", cells):
                if len(number.replace(".", "")) >= 3:
                    yield number


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.name)
def test_numbers_of_experiments_are_in_their_raw_files(page: Path) -> None:
    raw = raw_numbers(page)
    unkept, words = UNKEPT.get(page.name, (set(), ""))
    assert words in page.read_text().replace("\n", " ").replace("No raw", "no raw")
    wrong = []
    for text in set(shown_numbers(page)) - unkept:
        slack = 0.5001 * 10 ** -len(text.partition(".")[2])
        place = bisect_left(raw, float(text) - slack)
        if place == len(raw) or raw[place] > float(text) + slack:
            wrong.append(text)
    assert wrong == []
