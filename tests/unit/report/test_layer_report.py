"""The parts of layers in tables and figures."""

from __future__ import annotations

import re
from typing import Any

from raymoe.report.layer_parts import layer_figures
from raymoe.report.layer_times import layer_parts
from raymoe.report.plots import figures, write_plots
from raymoe.report.results import Line, complete
from raymoe.report.tables import further_tables, render

PARTS = {
    "norm": 10.0,
    "router": 20.0,
    "dispatch": 200.0,
    "experts": 500.0,
    "combine": 250.0,
    "experts_backward": 1000.0,
    "dispatch_backward": 210.0,
}
ALONE = [part for part in PARTS if part != "experts_backward"]


def layer_lines(case: str = "tokens=4096", step: float = 2000.0, device: str = "NVIDIA H200") -> list[Line]:
    """The lines of a case on GPUs: the step cold and warm, parts in it, parts alone."""
    times = [("step", "cold", step), ("step", "warm", step / 2), *((op, "cold", us) for op, us in PARTS.items())]
    times += [(f"{op}_alone", "cold", PARTS[op] - 1) for op in ALONE]
    shared: dict[str, Any] = {"case": case, "workload": "layer", "backend": "fused", "ranks": 2, "tokens": 4096}
    shared |= {"samples": 50, "graph": True, "verified": True, "device": device}
    return [
        complete(shared | {"op": op, "l2": l2, "us_p50": us, "us_p99": us + 1}, run="r-1", generation=0, commit=None)
        for op, l2, us in times
    ]


def test_the_table_has_each_part_its_share_and_its_time_alone() -> None:
    text = render(layer_lines())
    table = text[text.index("parts of the layer") :].splitlines()
    rows = {row.split()[0]: row.split()[1:] for row in table[2:] if row.strip()}
    assert rows["experts"] == ["500.0", "501.0", "25%", "499.0"]
    assert rows["experts_backward"] == ["1,000.0", "1,001.0", "50%", "-"]
    assert rows["dispatch_backward"] == ["210.0", "211.0", "10%", "209.0"]
    assert rows["step"] == ["2,000.0", "2,001.0", "100%", "1,184.0"]


def test_cases_are_apart_and_steps_without_parts_have_no_table() -> None:
    lines = [*layer_lines("tokens=1"), *layer_lines("tokens=128", step=900.0)]
    assert [(found.case, found.step, found.total) for found in layer_parts(lines)] == [
        ("tokens=1", 2000.0, 2190.0),
        ("tokens=128", 900.0, 2190.0),
    ]
    alone = [line for line in lines if line["op"] == "step"]
    assert not layer_parts(alone) and "parts of the layer" not in render(alone)


def test_each_run_has_tables_of_its_own() -> None:
    lines = [line | {"run": run} for run in ("A", "B") for line in layer_lines()]
    title = "parts of the layer, medians, tokens=4096"
    assert [each for each, _ in further_tables(lines)] == [f"A: {title}", f"B: {title}"]
    assert [each for each, _ in further_tables(layer_lines())] == [title]


def test_the_figure_names_every_part_and_case(tmp_path: Any) -> None:
    lines = [*layer_lines("tokens=1"), *layer_lines("tokens=128", step=900.0)]
    (svg,) = (path for path in write_plots(tmp_path, lines) if path.stem == "layer-parts")
    drawn = svg.read_text()
    for text in (*PARTS, "tokens=1", "tokens=128"):
        assert f">{text}<" in drawn, text
    assert "NVIDIA H200" in drawn and "2 ms" in drawn and "900 µs" in drawn
    assert "experts_backward 1,000.0 µs, 50.0%" in drawn, "of the step of the first case"
    colours = dict(re.findall(r'<rect class="([^"]*)"[^>]*/>\s*<text[^>]*>(\w+)<', drawn))
    assert colours["c3"] == "experts" and colours["c3 faded"] == "experts_backward"
    again = svg.read_bytes()
    write_plots(tmp_path, lines)
    assert svg.read_bytes() == again


def cpu_lines(ranks: int = 2, case: str = "default") -> list[Line]:
    """A case without parts alone. Rank 1 is slow in its experts, and the other ranks wait for it in combine."""
    experts = [60.0, *[80.0] * (ranks - 1)]
    by_op = {"step": [100.0] * ranks, "experts": experts, "combine": [100 - us for us in experts]}
    shared: dict[str, Any] = {"case": case, "workload": "layer", "backend": "host", "ranks": ranks, "tokens": 512}
    shared |= {"samples": 50, "graph": False, "verified": True, "device": "cpu"}
    lines = []
    for op, medians in by_op.items():
        known = {"us_p50": max(medians), "us_p99": 120.0, "us_by_rank": [[us, us + 1] for us in medians]}
        known |= {"tokens_per_s": 1e6 * ranks} if op == "step" else {}
        lines.append(complete(shared | {"op": op} | known, run="r-1", generation=0, commit=None))
    return lines


def test_shares_are_those_of_an_average_rank_so_that_waits_do_not_count_twice() -> None:
    rows = {row.split()[0]: row.split()[1:] for row in render(cpu_lines()).splitlines() if row.strip()}
    assert rows["experts"][-1] == "70%" and rows["combine"][-1] == "30%" and rows["step"][-1] == "-"
    assert "parts of the layer" not in render(cpu_lines()), "the first table has these numbers already"


def test_a_sentence_says_how_long_a_step_is_and_what_takes_the_time() -> None:
    sentence = "a step of 512 tokens a rank takes 100 us, 2 M tokens/s: experts 70%, combine 30%"
    assert sentence in render(cpu_lines()).splitlines()
    two = render([*cpu_lines(case="shared=1"), *cpu_lines(case="shared=2")])
    assert f"shared=2: {sentence}" in two.splitlines()
    one = [line | {"tokens": 1} for line in cpu_lines(case="tokens=1")]
    both = render([*one, *cpu_lines(case="tokens=512")]).splitlines()
    assert sentence in both and sentence.replace("512 tokens", "1 token") in both


def test_an_older_line_of_a_step_shows_no_bandwidth() -> None:
    """The time of a whole layer is no time of a transfer."""
    lines = [line | {"gbps_wire": 77.7} if line["op"] == "step" else line for line in cpu_lines()]
    (figure,) = figures([line for line in lines if line["op"] == "step"], {})
    assert "GB/s" not in figure.panels[0].picture.rows[0].value
    over_tokens = [*lines, *(line | {"case": "tokens=1", "tokens": 1} for line in lines)]
    (step,) = (figure for figure in figures(over_tokens, {}) if figure.stem == "layer-step")
    assert [panel.picture.title for panel in step.panels] == ["Time"]


def test_each_rank_has_a_bar_and_many_ranks_have_one_together() -> None:
    (figure,) = layer_figures(cpu_lines(3))
    rows = figure.panels[0].picture.rows
    assert [row.label for row in rows] == ["rank 0", "rank 1", "rank 2"]
    assert [segment.end for segment in rows[0].segments] == [0.6, 1.0]
    assert [segment.end for segment in rows[1].segments] == [0.8, 1.0]
    (figure,) = layer_figures(cpu_lines(40))
    (row,) = figure.panels[0].picture.rows
    assert [round(segment.end, 4) for segment in row.segments] == [0.795, 1.0] and "average rank" in figure.note


def test_a_single_case_has_its_parts_and_no_figure_of_one_bar() -> None:
    assert [figure.stem for figure in figures(cpu_lines(), {})] == ["layer-parts"]
    several = [*cpu_lines(case="tokens=1"), *cpu_lines(case="tokens=2")]
    assert {figure.stem for figure in figures(several, {})} == {"layer-parts", "layer-step", "layer-combine"}
    without_parts = [line for line in cpu_lines() if line["op"] == "step"]
    (figure,) = figures(without_parts, {})
    assert figure.stem == "layer-step" and figure.panels[0].picture.rows[0].value == "100 µs, 2 M tokens/s"
