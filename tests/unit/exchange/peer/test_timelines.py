"""Timelines of operations: the times that kernels store, and how results, tables and figures show them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from raymoe.config import load_job
from raymoe.exchange.peer.trace import FORMER_NAMES, NAMES, POINTS, TRACE_POINTS
from raymoe.report.plots import write_plots
from raymoe.report.results import LATER_KEYS, complete, decode, encode
from raymoe.report.tables import render
from tests.emulator.build import KERNELS, compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, small, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.config.configs_on_disk import problems, write
from tests.unit.exchange.exchange_cases import Case
from tests.unit.exchange.peer.timeline_judge import judge_timeline
from tests.unit.report.lines import gpu_exchange, traced_exchange


def test_points_have_the_same_names_as_in_the_kernels():
    text = (KERNELS / "include" / "raymoe" / "base" / "trace.cuh").read_text()
    numbers = {name.lower().replace("_", " "): int(at) for name, at in re.findall(r" AT_(\w+) = (\d+);", text)}
    assert numbers == {name: at for at, name in enumerate(NAMES)}
    assert f"TRACE_POINTS = {TRACE_POINTS};" in text
    for known in POINTS.values():
        assert set(known) <= set(NAMES)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("kind", ["fused", "ll"])
@pytest.mark.parametrize("wire", ["bfloat16", "float8_e4m3"])
def test_blocks_of_the_kernels_reach_the_points_in_a_valid_order(kind, wire):
    ops = ("dispatch", "combine")
    case = Case(2, spec_for(kind, wire={"dispatch": wire}, hidden=272), "auto", ("uniform",) * 2, seed=3)
    with Emulator(2) as emulator:
        spaces = workspaces(emulator, case.spec, stamped=False, traced=True)
        steps = Steps(emulator, case, [backend(kind, space, case.spec, small) for space in spaces])
        earlier: list[Any] = []
        steps.enqueue(0)
        for rank, space in enumerate(spaces):
            emulator.call(rank, lambda space=space: earlier.extend(space.timeline(op) for op in ops))
        steps.enqueue(1)
        emulator.run(seed=3)
        steps.judge()
        assert len(earlier) == 4
        for space in spaces:
            for op in ops:
                times = space.timeline(op)
                judge_timeline(op, times, slack_us=0.6)  # the machine's clock ticks every 512 ns
                assert set(times) <= set(POINTS[op]), "the report has no text for a point"


TRACE_MEANS_NOTHING = [
    ("workload: p2p\n", "means nothing with workload p2p, it belongs to exchange"),
    ("workload: exchange\nworld: {device: cpu}\n", "means nothing with world.device cpu, it belongs to auto, cuda"),
    (
        "workload: exchange\nexchange: {backend: staged}\n",
        "means nothing with exchange.backend staged, it belongs to auto, fused",
    ),
    (
        "workload: exchange\nmatrix: {exchange.backend: [staged, row_push]}\n",
        "means nothing with exchange.backend staged, row_push, it belongs to auto, fused",
    ),
]


@pytest.mark.parametrize(("text", "expected"), TRACE_MEANS_NOTHING)
def test_a_trace_of_kernels_without_timelines_is_refused(tmp_path, text, expected):
    (found,) = problems(tmp_path, text, "steps.trace=true")
    assert found.startswith("--set ") and expected in found


def test_only_backends_with_timelines_are_traced_in_a_matrix(tmp_path):
    text = "workload: exchange\nworld: {device: cuda}\nmatrix: {exchange.backend: [fused, row_push, staged]}\n"
    job = load_job(write(tmp_path, text), ["steps.trace=true"])
    assert [case.job.steps.trace for case in job.cases()] == [True, False, False]
    assert job.resolved()["steps"]["trace"] is True


def test_jobs_without_a_trace_leave_the_key_out(tmp_path):
    for text in ("workload: p2p\n", "workload: layer\n", "workload: exchange\nexchange: {backend: staged}\n"):
        assert "trace" not in load_job(write(tmp_path, text)).resolved()["steps"]


def test_lines_with_and_without_a_timeline_are_read_back():
    line = traced_exchange()[0]
    assert line["timeline"][0] == ["start", 0.0, 0.4, 1.1]
    assert decode(encode(line)) == line
    earlier = {key: value for key, value in line.items() if key not in LATER_KEYS}
    assert decode(json.dumps(earlier))["timeline"] is None
    assert complete({"case": "c"}, run="r", generation=0, commit=None)["timeline"] is None


def test_the_report_has_a_table_for_each_operation_of_a_case():
    parts = [part for part in render(traced_exchange()).split("\n\n") if part.startswith("where the time of ")]
    assert [part.splitlines()[0] for part in parts] == [
        f"where the time of {op} goes, backend=fused,tokens={tokens}: us after the start ({us} by the clock)"
        for tokens, us in ((1, "8.1"), (4096, "520.0"))
        for op in ("dispatch", "combine")
    ]
    head, _, *rows = parts[2].splitlines()[1:]
    assert head.split() == ["point", "first", "block", "median", "last", "block", "blocks", "meaning"]
    assert rows[0].split() == ["start", "0.0", "0.4", "1.1", "all", "begin"]
    cells = [re.split(" {2,}", row) for row in rows]
    assert ["first push", "2.4", "8.1", "13.8", "senders", "first row sent"] in cells
    assert "routing entries are numbered and written to all ranks" in next(row for row in rows if "published" in row)
    assert rows[-1].split()[:5] == ["all", "awaited", "503.9", "503.9", "503.9"]
    combine = parts[3].splitlines()
    assert any(row.startswith("first push") and "local reduction" in row and "first sum" in row for row in combine)
    assert "where the time" not in render(gpu_exchange("fused", 8.0)), "lines without a timeline"


def test_a_point_of_an_older_run_has_its_name_of_today():
    line = traced_exchange((8,))[0]
    told = [["told" if name == "entries published" else name, *times] for name, *times in line["timeline"]]
    assert told != line["timeline"]
    assert render([line | {"timeline": told}]) == render([line])
    assert set(FORMER_NAMES.values()) <= set(NAMES) and not set(FORMER_NAMES) & set(NAMES)


def test_two_runs_of_a_case_have_two_tables_and_an_unknown_point_is_shown():
    ours, theirs = traced_exchange((8,))[0], traced_exchange((8,))[0] | {"run": "other-2"}
    theirs["timeline"] = [*theirs["timeline"], ["weighed", 9.0, 9.1, 9.2]]
    text = render([ours, theirs])
    assert "tokens=8, run quick-1: us" in text and "tokens=8, run other-2: us" in text
    assert text.rstrip().splitlines()[-1].split() == ["weighed", "9.0", "9.1", "9.2", "-", "-"]


def test_each_operation_has_a_plot_with_a_panel_for_each_case(tmp_path):
    lines = [line for line in traced_exchange((1, 4096)) if line["timeline"]]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files = write_plots(tmp_path / name, lines)
    stems = ("dispatch-timeline", "combine-timeline")
    assert {f"{stem}.svg" for stem in stems} <= {file.name for file in files}
    for stem in stems:
        first, second = ((tmp_path / name / "plots" / f"{stem}.svg").read_bytes() for name in ("one", "two"))
        assert first == second
    dispatch, combine = ((tmp_path / "one" / "plots" / f"{stem}.svg").read_text() for stem in stems)
    for words in ("1 token: 7.40 µs", "4096 tokens: 504 µs", "first push", "all awaited", "senders", "counting blocks"):
        assert f">{words}<" in dispatch, words
    assert "µs after the start" in dispatch and ">placement<" in dispatch
    assert ">local reduction<" in combine and ">entries published<" not in combine


def test_an_unknown_point_is_drawn_too(tmp_path):
    line = traced_exchange((8,))[0]
    line["timeline"] = [*line["timeline"], ["weighed", 9.0, 9.1, 9.2]]
    write_plots(tmp_path, [line])
    assert ">weighed<" in (tmp_path / "plots" / "dispatch-timeline.svg").read_text()
