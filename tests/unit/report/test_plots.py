"""Plots of copies and exchanges: which files are written, their text, and that equal lines give equal files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raymoe import cli
from raymoe.errors import CannotWrite
from raymoe.report.copies import CopyWay, ways_of
from raymoe.report.directory import RunDirectory
from raymoe.report.plots import write_plots
from raymoe.report.results import Line
from tests.unit.report.lines import complete_line, copy_case, exchange_case, gpu_exchange

SIZES = (4096, 2**28)


def copies(protocol: str = "put", transport: str = "tma", pattern: str = "pairs", **keys: object) -> list[Line]:
    pairs = [(0, 1), (1, 0)] if pattern == "pairs" else [(None, None)]
    setting = {"workload": "p2p", "op": "copy", "ranks": 2, "device": "NVIDIA H200", "graph": True, "samples": 50}
    return [
        complete_line(
            {
                **setting,
                "case": f"protocol={protocol}",
                "transport": transport,
                "pattern": pattern,
                "src": source,
                "dst": destination,
                "bytes": size,
                "us_p50": 2.0 + size / 380e3,
                "gbps_wire": size / (2.0 + size / 380e3) / 1e3,
                **keys,
            }
        )
        for size in SIZES
        for source, destination in pairs
    ]


def plot_names(directory, lines) -> list[str]:
    files = write_plots(directory, lines)
    assert [file.parent for file in files] == [directory / "plots"] * len(files)
    assert sorted(file.name for file in (directory / "plots").iterdir()) == sorted(file.name for file in files)
    return [file.name for file in files if file.suffix == ".svg"]


def test_pairs_have_curves_and_a_matrix_for_each_size(tmp_path):
    assert plot_names(tmp_path, copies() + copies("get")) == [
        "curves-pairs.svg",
        "matrix-4KiB.svg",
        "matrix-256MiB.svg",
    ]
    curves, small, large = (
        (tmp_path / "plots" / f"{stem}.svg").read_text() for stem in ("curves-pairs", "matrix-4KiB", "matrix-256MiB")
    )
    for words in ("tma push", "tma pull", "450 GB/s, NVLink 4 ×18", "time of a copy, µs", "GB/s, one direction"):
        assert f"<!-- {words} -->" in curves
    for words in ("source rank", "destination rank", "the row's rank writes", "the column's rank reads", "2.04"):
        assert f"<!-- {words}" in small or f"{words} -->" in small or words in small
    assert "2.01 µs" in small
    assert "µs" not in large
    assert "<!-- GB/s from row to column, of 450 by NVLink 4 ×18 -->" in large
    png = (tmp_path / "plots" / "matrix-4KiB.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_all_to_all_has_curves_only(tmp_path):
    assert plot_names(tmp_path, copies(pattern="all_to_all")) == ["curves-all_to_all.svg"]
    text = (tmp_path / "plots" / "curves-all_to_all.svg").read_text()
    assert "every rank to every other at once" in text
    assert "busiest port" in text


def test_a_device_with_an_unknown_link_has_no_limit_line(tmp_path):
    assert "curves-pairs.svg" in plot_names(tmp_path, copy_case())
    assert "NVLink" not in (tmp_path / "plots" / "curves-pairs.svg").read_text()


def test_the_same_lines_give_the_same_svg(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_plots(tmp_path / name, copies())
    for path in (tmp_path / "one" / "plots").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "two" / "plots" / path.name).read_bytes()
        assert "<dc:date>" not in path.read_text()


def test_an_exchange_with_one_token_count_gives_no_file(tmp_path):
    assert write_plots(tmp_path, exchange_case("host", 100.0)) == []
    assert list(tmp_path.iterdir()) == []


def test_exchanges_have_a_plot_for_each_operation(tmp_path):
    lines = gpu_exchange("fused", 10.0) + gpu_exchange("collective", 30.0) + gpu_exchange("row_push", 8.0)
    assert plot_names(tmp_path, lines) == ["dispatch.svg", "combine.svg", "exchange.svg"]
    dispatch, combine = ((tmp_path / "plots" / f"{op}.svg").read_text() for op in ("dispatch", "combine"))
    for words in ("fused", "collective", "450 GB/s, NVLink 4 ×18", "time of the slowest rank, µs", "4096", "Dispatch"):
        assert f"<!-- {words} -->" in dispatch
    exchange = (tmp_path / "plots" / "exchange.svg").read_text()
    assert all("<!-- row_push -->" in text for text in (dispatch, combine)) and "row_push" not in exchange
    assert "<!-- 381 GB/s, the most measured on such links -->" in dispatch
    assert "CUDA graph or eager, L2 cache cold" in dispatch


def test_row_push_is_not_drawn_for_a_combine_of_larger_rows(tmp_path):
    lines = [
        line | {"wire": "float8_e4m3/bfloat16"} for line in gpu_exchange("fused", 10.0) + gpu_exchange("row_push", 8.0)
    ]
    write_plots(tmp_path, lines)
    assert "row_push" in (tmp_path / "plots" / "dispatch.svg").read_text()
    assert "row_push" not in (tmp_path / "plots" / "combine.svg").read_text()


def sweep(sms: tuple[int, ...], device: str = "NVIDIA H200") -> list[Line]:
    return [
        line | {"case": f"{line['case']},layout={layout},sms={count}", "layout": layout, "device": device}
        for layout, least in (("rank", 12), ("expert", 48))
        for count in sms
        for line in gpu_exchange("fused", 20.0 * max(1.0, least / count), (4096,))
    ]


def test_a_sweep_over_sms_has_a_plot_that_names_the_first_near_best_count(tmp_path):
    stems = ["dispatch-sms", "combine-sms", "exchange-sms"]
    assert plot_names(tmp_path, sweep((8, 12, 24, 48))) == [f"{stem}.svg" for stem in stems]
    text = (tmp_path / "plots" / "dispatch-sms.svg").read_text()
    for words in (
        "fused layout=rank: best 532 µs, within 10 % from 8 on",
        "fused layout=expert: best 532 µs, within 10 % from 24 on",
        "385 µs: the busiest port&#x27;s bytes at the most measured on such links",
        "SMs that the exchange may take",
    ):
        assert words in text or words.replace("&#x27;", "'") in text, words


def test_two_points_give_no_sweep_plot_and_an_unmeasured_link_no_limit(tmp_path):
    assert write_plots(tmp_path, sweep((8, 12))) == []
    write_plots(tmp_path, sweep((8, 12, 24), device="NVIDIA A100-SXM4-80GB"))
    assert "measured on such links" not in (tmp_path / "plots" / "dispatch-sms.svg").read_text()


def test_different_settings_have_separate_plots(tmp_path):
    lines = gpu_exchange("fused", 10.0) + gpu_exchange("fused", 20.0, routing="zipf")
    assert "dispatch-routing-zipf.svg" in plot_names(tmp_path, lines)
    assert "routing zipf" in (tmp_path / "plots" / "dispatch-routing-zipf.svg").read_text()


def test_one_token_count_of_gpu_ranks_gives_no_plot(tmp_path):
    assert write_plots(tmp_path, gpu_exchange("fused", 10.0, tokens=(128,))) == []


def test_a_plot_that_cannot_be_written_raises_with_its_name(tmp_path):
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(CannotWrite, match="plots"):
        write_plots(tmp_path, copies())
    (tmp_path / "plots").unlink()
    (tmp_path / "plots" / "curves-pairs.png").mkdir(parents=True)
    with pytest.raises(CannotWrite, match=r"curves-pairs\.png"):
        write_plots(tmp_path, copies())
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["curves-pairs.png"]


def test_ways_of_copying_are_labelled_by_what_differs():
    assert list(ways_of(copies() + copies("get") + copies(transport="collective"))) == [
        CopyWay("tma", "put"),
        CopyWay("tma", "get"),
        CopyWay("collective", "put"),
    ]
    assert list(ways_of(copies(case="default"), protocol="get")) == [CopyWay("tma", "get")]
    both = ways_of(copies(graph=True) + copies(graph=False))
    assert [way.label for way in both] == ["tma push (graph)", "tma push (eager)"]
    sweep = ways_of(copies(case="world.ranks=2,protocol=put") + copies(case="world.ranks=4,protocol=put"))
    assert [way.label for way in sweep] == ["tma push (world.ranks 2)", "tma push (world.ranks 4)"]


def test_sms_are_in_a_label_only_if_nothing_else_differs():
    assert [way.label for way in ways_of(copies(sms=8) + copies(sms=16))] == ["tma push (8 SMs)", "tma push (16 SMs)"]
    chosen = [line | {"sms": 8 if line["bytes"] == 4096 else 16} for line in copies(transport="auto")]
    assert [way.label for way in ways_of(chosen)] == ["auto push"]


def test_report_draws_plots_only_when_asked(tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", "p2p") as directory:
        directory.write_config({"name": "p2p", "workload": "p2p", "p2p": {"protocol": "get"}})
        directory.add_case(copies(case="default"))
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "plots").exists()
    assert cli.main(["report", str(tmp_path / "run"), "--plots"]) == 0
    assert capsys.readouterr().out.endswith(f"6 files in {tmp_path / 'run' / 'plots'}\n")
    assert "<!-- tma pull -->" in (tmp_path / "run" / "plots" / "curves-pairs.svg").read_text()


def test_report_says_when_there_is_nothing_to_draw(tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", "exchange") as directory:
        directory.write_config({"name": "exchange", "workload": "exchange"})
        directory.add_case(exchange_case("host", 100.0))
    assert cli.main(["report", str(tmp_path / "run"), "--plots"]) == 0
    assert "nothing to draw" in capsys.readouterr().out


def test_drawing_does_not_change_matplotlibs_settings(tmp_path):
    program = (
        "import sys, pathlib, matplotlib\n"
        "from tests.unit.report.test_plots import copies\n"
        "from raymoe.report.plots import STYLE, write_plots\n"
        "before = {name: matplotlib.rcParams[name] for name in STYLE}\n"
        f"write_plots(pathlib.Path({str(tmp_path)!r}), copies(pattern='all_to_all'))\n"
        "assert before == {name: matplotlib.rcParams[name] for name in STYLE}\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
