"""Numbers in sentences and in the pages of experiments are in the raw files too."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raymoe.report.measures import measured_link_gbps
from tests.python_path import REPOSITORY
from tests.unit.docs.measured_tables import DOCS
from tests.unit.docs.raw_lines import BENCHMARKS, Column

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


def _copy(transport: str, size: int, shown: str = "us_p50") -> float:
    keys = {"case": "protocol=put,pattern=pairs", "transport": transport, "bytes": size}
    return Column("p2p_h200x2", "awho", keys, shown).value({})


def _mirror() -> float:
    lines = [json.loads(line) for line in (BENCHMARKS / "rail_one_gpu_h200.txt").read_text().splitlines()]
    return float(min(line["gbps"] for line in lines))


@dataclass(frozen=True)
class Claim:
    """A sentence with measured numbers, `#` in their places, and what computes each."""

    page: str
    text: str
    values: tuple[Callable[[], float], ...]

    @property
    def pattern(self) -> str:
        return re.escape(self.text).replace(r"\#", rf"({_NUMBER})").replace(r"\ ", r"\s+")


CLAIMS = [
    Claim(
        "docs/evidence/performance.md",
        "a dispatch takes # times as long as its row push, as fp8 # times",
        (
            lambda: _ratio("bench_exchange_h200x2", "csun"),
            lambda: _ratio("bench_exchange_fp8_h200x2", "oxzr"),
        ),
    ),
    Claim("docs/evidence/links.md", "A put of 4 KiB by TMA takes # µs", (lambda: _copy("tma", 4096),)),
    Claim(
        "docs/evidence/links.md",
        "The stream memory operations of the copy engine take # µs",
        (lambda: _copy("copy_engine", 4096),),
    ),
    Claim(
        "docs/evidence/links.md",
        "Of 256 MiB the copy engine puts # GB/s, TMA # with",
        (lambda: _copy("copy_engine", 256 << 20, "gbps_wire"), lambda: _copy("tma", 256 << 20, "gbps_wire")),
    ),
    Claim("docs/evidence/comparison.md", "the share of # GB/s", (lambda: measured_link_gbps("NVIDIA H200") or 0.0,)),
    Claim("docs/evidence/comparison.md", "for `collective` # µs for its host", (lambda: 60.0,)),
    Claim("docs/evidence/domains.md", "its own rows back at # GB/s", (_mirror,)),
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
        beside = line.get("beside")  # a product; or times for each number of SMs
        inner = beside.values() if isinstance(beside, dict) else ()
        for times in (line, *(each for each in inner if isinstance(each, dict))):
            named = ((key, value) for key, value in times.items() if isinstance(value, int | float))
            yield from (value for key, value in named if "us_" in key or key.endswith("_us") or key == "mhz")
        yield from (number for _, *times in line.get("timeline") or () for number in times)


def shown_numbers(page: Path) -> Iterator[str]:
    for line in page.read_text().splitlines():
        if line.startswith("|"):
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
