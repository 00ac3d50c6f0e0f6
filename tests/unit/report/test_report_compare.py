"""Two runs side by side: which lines belong together, and which times changed beyond noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raymoe.report.compare import ChangeVerdict, Comparison, Pair, compare, comparison_columns
from raymoe.report.results import Line, decode, displayed
from tests.python_path import REPOSITORY
from tests.unit.report.lines import copy_case, exchange_case, gpu_exchange
from tests.unit.report.run_directories import CONFIG, make, report


def timed(p50: float | None, least: float | None, samples: int = 50, verified: bool | None = True) -> Line:
    return exchange_case("host", 1.0)[0] | {
        "us_p50": p50,
        "us_min": least,
        "us_p99": None if p50 is None else 2 * p50,
        "samples": samples,
        "verified": verified,
    }


@pytest.mark.parametrize(
    ("base", "other", "verdict"),
    [
        (timed(100, 95), timed(110, 101), ChangeVerdict.SLOWER),
        (
            timed(100, 95),
            timed(110, 100),
            ChangeVerdict.SAME,
        ),  # its fastest sample is no slower than half of the others
        (timed(100, 95), timed(94, 90), ChangeVerdict.FASTER),
        (timed(100, 94), timed(94, 90), ChangeVerdict.SAME),
        (timed(100, 99.9), timed(101.9, 101.8), ChangeVerdict.SAME),  # less than 2 %
        (timed(100, 99.9), timed(102, 101.8), ChangeVerdict.SLOWER),
        (timed(100, 50), timed(60, 40), ChangeVerdict.SAME),  # a wide spread hides a large change
        (timed(100, 95, samples=4), timed(200, 190), ChangeVerdict.UNKNOWN),
        (timed(100, None), timed(200, 190), ChangeVerdict.UNKNOWN),
        (timed(None, None), timed(200, 190), ChangeVerdict.UNKNOWN),
        (timed(100, 95), timed(90, 80, verified=False), ChangeVerdict.WRONG),
        (timed(100, 95, verified=False), timed(100, 95, verified=False), ChangeVerdict.SAME),
    ],
)
def test_a_change_is_told_from_noise(base, other, verdict):
    assert Pair(base, other).verdict == verdict
    mirrored = {
        ChangeVerdict.SLOWER: ChangeVerdict.FASTER,
        ChangeVerdict.FASTER: ChangeVerdict.SLOWER,
        ChangeVerdict.WRONG: ChangeVerdict.SAME,
    }
    if verdict is not ChangeVerdict.WRONG:
        assert Pair(other, base).verdict == mirrored.get(verdict, verdict), "the rule is the same both ways"


def lines_of(name: str) -> list[Line]:
    return displayed([decode(line) for line in (REPOSITORY / "benchmarks" / name).read_text().splitlines()])


def test_runs_of_the_same_kernels_two_hours_apart_are_within_noise():
    """48 operations on two H200, 2026-11-23: the medians differ by 1.3 % at most."""
    comparison = compare(lines_of("bench_exchange_h200x2.jsonl"), lines_of("bench_nccl_h200x2.jsonl"))
    assert len(comparison.pairs) == 48
    assert comparison.count(ChangeVerdict.SAME) == 48
    assert 0.01 < max(abs(pair.change or 0) for pair in comparison.pairs) < 0.014
    assert (
        comparison.summary() == "48 operations in both: 48 within noise; 112 only in the first; 176 only in the second"
    )


def changed(lines: list[Line], **keys: object) -> list[Line]:
    return [line | keys for line in lines]


def test_lines_are_paired_by_their_settings_then_by_the_name_of_the_case():
    base = exchange_case("host", 10.0) + exchange_case("collective", 20.0) + copy_case()
    assert [pair.differs for pair in compare(base, base[::-1]).pairs] == [""] * len(base)
    assert [pair.base for pair in compare(base, base[::-1]).pairs] == base, "in the order of the first run"

    renamed = compare(base, changed(base[:3], case="default"))
    assert len(renamed.pairs) == 3 and len(renamed.only_base) == len(base) - 3 and not renamed.only_other

    wider = compare(base[:3], changed(base[:3], hidden=2048, bytes_wire=2**21))
    assert [pair.differs for pair in wider.pairs] == ["hidden 1024 -> 2048, on wire 1.177 MiB -> 2 MiB"] * 3

    chosen = compare(gpu_exchange("fused", 8.0), changed(gpu_exchange("fused", 8.0), sms=48, graph=False))
    assert {pair.differs for pair in chosen.pairs} == {"SMs 132 -> 48, graph true -> false"}


def test_lines_whose_cases_contradict_are_not_paired():
    def masked(*values: float) -> list[Line]:
        lines = []
        for value in values:
            lines += [line | {"case": f"{line['case']},masked={value}"} for line in exchange_case("host", 100.0)]
        return lines

    found = compare(masked(0.0, 0.9), masked(0.0, 0.5))
    assert [pair.base["case"] for pair in found.pairs] == ["backend=host,masked=0.0"] * 3
    assert len(found.only_base) == len(found.only_other) == 3


def test_lines_that_nothing_distinguishes_are_not_paired_at_random():
    twice = exchange_case("host", 10.0) * 2
    assert len(compare(twice, twice).pairs) == 6, "as many on both sides: in their order"
    comparison = compare(twice, exchange_case("host", 10.0))
    assert (comparison.pairs, len(comparison.only_base), len(comparison.only_other)) == ([], 6, 3)
    assert compare([], []) == Comparison()


def test_the_columns_show_what_the_rule_looks_at():
    base = exchange_case("host", 100.0)
    slower = [line | {"us_p50": line["us_p50"] * 3, "us_min": line["us_p50"] * 2.5} for line in base]
    columns = {column.header: column.cells for column in comparison_columns(compare(base, slower), ("A", "B"))}
    assert columns["op"] == ["dispatch", "combine", "exchange"]
    assert columns["A p50 us"][0] == "40.0" and columns["A min"][0] == "20.0" and columns["A p99"][0] == "80.0"
    assert columns["B p50 us"][0] == "120.0" and columns["change"] == ["+200.0%"] * 3
    assert columns["verdict"] == ["** slower"] * 3
    assert "differs" not in columns


def test_report_compares_every_run_with_the_first(tmp_path: Path):
    fast = make(tmp_path / "fast", exchange_case("host", 10.0))
    slow = make(tmp_path / "slow", changed(exchange_case("host", 100.0), us_min=90.0))
    document = json.loads((slow / "environment.json").read_text()) | {"commit": "fedcba987654"}
    (slow / "environment.json").write_text(json.dumps(document))
    config = (slow / "config.yaml").read_text()
    (slow / "config.yaml").write_text(config.replace("tokens: 512", "tokens: 1024"))
    ended = report(fast, slow, fast)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert [line[:2] for line in lines[:3]] == ["A ", "B ", "C "]
    assert "B against A: 3 operations in both: 3 slower" in lines
    assert "C against A: 3 operations in both: 3 within noise" in lines
    assert sum("** slower" in line for line in lines) == 3
    facts = [line.split() for line in lines]
    assert ["commit", "0123456789ab", "fedcba987654"] in facts
    assert ["shape.tokens", "512", "1024"] in facts
    assert not any(line and line[0].startswith("world.") for line in facts), "equal settings are left out"
    assert CONFIG["shape"]["tokens"] == 512  # type: ignore[index]


def test_one_run_is_compared_with_nothing(tmp_path: Path):
    out = report(make(tmp_path / "run", exchange_case("host", 10.0))).out
    assert "against" not in out and not out.startswith("A ")
