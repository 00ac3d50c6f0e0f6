"""Tables and figures of workload pointwise: shares of the copy, and curves over rows, SMs and stages."""

from __future__ import annotations

from raymoe.report.bandwidth import bandwidth_curves
from raymoe.report.columns import columns_of, shares_of_copy
from raymoe.report.plots import figures, write_plots
from raymoe.report.tables import render
from tests.unit.report.lines import rows_case

OVER_ROWS = [line for tokens in (128, 1024, 4096) for line in rows_case(tokens=tokens)]
SWEPT = [line for sms in (32, 48, 132) for stages in (1, 2, 4) for line in rows_case(sms=sms, stages=stages)]


def test_a_share_is_that_of_the_faster_copy_in_the_case():
    lines = rows_case()
    shares = dict(zip((line["backend"] for line in lines), shares_of_copy(lines), strict=True))
    assert round(shares["raymoe"], 3) == round(3900 / 4080, 3)
    assert shares["copy"] is shares["own_copy"] is shares["quack"] is None
    headers = {column.header: column.cells for column in columns_of(lines)}
    assert headers["of copy"] == ["96%", "49%", "25%", "61%", "-", "-", "-"]
    assert headers["memory GB/s"][0] == "3,900.0" and headers["moved"][0] == "112 MiB"
    assert "skipped: Quack cannot be imported" in headers["leaves out"]


def test_systems_stand_side_by_side_over_rows():
    text = render(OVER_ROWS)
    title, head, _, *rows = text.split("Bandwidth of rms_norm over rows: ")[1].splitlines()
    assert title == "us (GB/s, of the copy)"
    assert head.split() == ["tokens", "raymoe", "in_turn", "eager", "compile", "copy", "own_copy"]
    assert [row.split()[0] for row in rows[:3]] == ["128", "1024", "4096"]
    assert "30.1 (3,900, 96%)" in rows[2] and "28.8 (4,080)" in rows[2]


def test_a_sweep_has_curves_over_sms_and_over_stages_and_the_copy_as_limit():
    over_sms, over_stages = bandwidth_curves(SWEPT)
    assert (over_sms.axis, list(over_sms.curves)) == ("sms", ["1 stage", "in_turn", "2 stages", "4 stages"])
    assert (over_stages.axis, list(over_stages.curves)) == ("stages", ["32 SMs", "48 SMs", "132 SMs"])
    assert list(over_stages.curves["48 SMs"]) == [1, 2, 4]
    assert over_sms.limit is not None and over_sms.limit["backend"] == "own_copy"
    text = render(SWEPT)
    assert "Bandwidth of rms_norm over SMs: us (GB/s, of the copy)" in text and "over stages" not in text


def test_a_single_case_has_no_curve():
    assert list(bandwidth_curves(rows_case())) == []
    assert "over rows" not in render(rows_case())


def test_operations_dtypes_and_sizes_have_figures_of_their_own():
    other = [line | {"op": "layer_norm"} for line in OVER_ROWS]
    half = [line | {"dtype": "float16", "case": f"{line['case']},dtype=float16"} for line in OVER_ROWS]
    small = [line | {"hidden": 1024, "case": f"{line['case']},hidden=1024"} for line in OVER_ROWS]
    titles = [found.title for found in bandwidth_curves([*OVER_ROWS, *other, *half, *small])]
    assert "Bandwidth of layer_norm over rows, hidden 7168, dtype bfloat16" in titles
    assert "Bandwidth of rms_norm over rows, hidden 1024, dtype bfloat16" in titles
    assert len(titles) == len(set(titles)) == 4


def test_runs_and_captured_lines_have_curves_of_their_own():
    eager = [line | {"graph": False, "case": f"{line['case']},graph=false"} for line in OVER_ROWS]
    captured = [line | {"graph": True, "case": f"{line['case']},graph=true"} for line in OVER_ROWS]
    (found,) = bandwidth_curves([*eager, *captured])
    assert {"eager: raymoe", "captured: raymoe"} <= set(found.curves)
    of_runs = [line | {"run": run} for run in ("A", "B") for line in SWEPT]
    over_sms, _ = bandwidth_curves(of_runs)
    assert {"A: 4 stages", "B: 4 stages", "A: in_turn"} <= set(over_sms.curves)


def test_plots_and_page_draw_each_set_of_curves(tmp_path):
    written = write_plots(tmp_path, [*OVER_ROWS, *SWEPT])
    assert [file.name for file in written] == [
        "bandwidth-rms_norm-tokens.svg",
        "bandwidth-rms_norm-sms.svg",
        "bandwidth-rms_norm-stages.svg",
    ]
    over_sms = (tmp_path / "plots" / "bandwidth-rms_norm-sms.svg").read_text()
    for words in ("SMs that the kernel may take", "4,080 GB/s, a copy of as many bytes", "GB/s, read and written"):
        assert words in over_sms
    drawn = [figure.title for figure in figures([*OVER_ROWS, *SWEPT], {})]
    assert drawn == [f"Bandwidth of rms_norm over {axis}" for axis in ("rows", "SMs", "stages")]
