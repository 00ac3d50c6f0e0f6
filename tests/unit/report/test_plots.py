"""Figures in plots/: which files are written, their text, and that equal lines give equal files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from raymoe import cli
from raymoe.errors import CannotWrite
from raymoe.report.columns import EXCHANGES
from raymoe.report.copies import CopyWay, ways_of
from raymoe.report.directory import RunDirectory
from raymoe.report.page import write_page
from raymoe.report.plots import write_plots
from raymoe.report.results import Line, Record
from raymoe.report.svg import width_of
from tests.unit.report.lines import complete_line, copy_case, exchange_case, gpu_exchange
from tests.unit.report.run_directories import EVERY_KIND, make

SIZES = (4096, 2**28)
Placed = tuple[float, float, str, str]


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
    directory.mkdir(exist_ok=True)
    files = write_plots(directory, lines)
    assert [file.parent for file in files] == [directory / "plots"] * len(files)
    assert sorted(file.name for file in (directory / "plots").iterdir()) == sorted(file.name for file in files)
    return [file.name for file in files]


def texts(path: Path) -> list[str]:
    """Return the texts that a picture shows."""
    return [
        str(text.text) for text in ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_pairs_have_curves_and_a_matrix_for_each_size(tmp_path):
    assert plot_names(tmp_path, copies() + copies("get")) == [
        "curves-pairs.svg",
        "matrix-4KiB.svg",
        "matrix-256MiB.svg",
    ]
    curves, small, large = (
        texts(tmp_path / "plots" / f"{stem}.svg") for stem in ("curves-pairs", "matrix-4KiB", "matrix-256MiB")
    )
    for words in ("tma push", "tma pull", "450 GB/s, NVLink 4 ×18", "µs a copy", "GB/s, one direction"):
        assert words in curves
    for words in ("from", "to", "tma push: the row's rank writes", "tma pull: the column's rank reads", "2.04"):
        assert words in small
    assert "2.01 µs" in small
    assert not [text for text in large if "µs" in text]
    assert "Full colour: 450 GB/s, NVLink 4 ×18." in large
    assert "256 MiB between all pairs, GB/s" in large and "run quick-1" in large


def test_all_to_all_has_curves_only(tmp_path):
    assert plot_names(tmp_path, copies(pattern="all_to_all")) == ["curves-all_to_all.svg"]
    text = (tmp_path / "plots" / "curves-all_to_all.svg").read_text()
    assert "Copies, every rank to every other at once" in text
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


def test_an_exchange_with_one_token_count_has_bars(tmp_path):
    stems = ["dispatch", "combine", "exchange", "split", "expert-load"]
    assert plot_names(tmp_path, exchange_case("host", 100.0)) == [f"{stem}.svg" for stem in stems]
    assert {"Time of dispatch", "host", "40 µs, 3.21 GB/s"} <= set(texts(tmp_path / "plots" / "dispatch.svg"))


def test_systems_with_as_many_sms_stand_side_by_side(tmp_path):
    lines = [
        line | {"case": f"backend={backend},sms={sms}"}
        for backend in ("fused", "deepep_v2")
        for sms in (24, "auto", 64)
        for line in exchange_case(backend, 100.0)
    ]
    plot_names(tmp_path, lines)
    labels = [text for text in texts(tmp_path / "plots" / "split.svg") if "sms=" in text]
    assert labels == [f"{backend} sms={sms}" for sms in (24, 64, "auto") for backend in ("fused", "deepep_v2")]


def test_lines_without_a_time_give_no_file(tmp_path):
    lines = [line | {"us_p50": None, "expert_load": None} for line in exchange_case("host", 100.0)]
    assert write_plots(tmp_path, lines) == []
    assert list(tmp_path.iterdir()) == []


def test_files_hold_what_the_page_shows(tmp_path):
    """A file for each figure of the page. Nothing in it leads outside, and its text is inside the picture."""
    run = make(tmp_path / "run")
    page = write_page(run, [Record.read(run)]).read_text()
    files = write_plots(run, EVERY_KIND)
    assert len(files) == page.count("<figcaption>") > 15
    for file in files:
        root = ElementTree.fromstring(file.read_text())
        (title,) = (each.text for each in root.findall("{http://www.w3.org/2000/svg}title"))
        assert f"<h3>{title}</h3>" in page
        assert {each.tag.rpartition("}")[2] for each in root.iter()} <= SHAPES
        assert not re.search(r"var\(|url\(|@import|href", file.read_text())
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for x, y, text, anchor in placed(root):
            size = width_of(text)
            left = x - {"start": 0, "middle": size / 2, "end": size}[anchor]
            assert left > -5 and left + size < width + 5 and 0 < y < height, (file.name, text)


SHAPES = {"svg", "title", "style", "g", "rect", "path", "circle", "text"}


def placed(node: ElementTree.Element, x: float = 0, y: float = 0, scale: float = 1) -> Iterator[Placed]:
    """Give the texts below a node: where they stand, and which of their ends is there."""
    for child in node:
        move = [float(number) for number in re.findall(r"-?[\d.]+", child.attrib.get("transform", "0 0"))]
        at, size = (x + scale * move[0], y + scale * move[1]), scale * move[2] if len(move) > 2 else scale
        if child.tag.endswith("}text"):
            left, top = (at[i] + size * float(child.attrib[key]) for i, key in enumerate("xy"))
            yield left, top, str(child.text), child.attrib.get("text-anchor", "start")
        yield from placed(child, *at, size)


def test_exchanges_have_a_plot_for_each_operation(tmp_path):
    lines = gpu_exchange("fused", 10.0) + gpu_exchange("collective", 30.0) + gpu_exchange("row_push", 8.0)
    assert plot_names(tmp_path, lines) == ["dispatch.svg", "combine.svg", "exchange.svg", "split.svg"]
    dispatch, combine, exchange = (
        texts(tmp_path / "plots" / f"{op}.svg") for op in ("dispatch", "combine", "exchange")
    )
    for words in ("fused", "collective", "450 GB/s, NVLink 4 ×18", "µs, slowest rank", "4096", "Dispatch over tokens"):
        assert words in dispatch
    assert "row_push" in dispatch and "row_push" in combine and "row_push" not in exchange
    assert "381 GB/s, most measured" in dispatch
    assert [text for text in dispatch if text.endswith("CUDA graph or eager; L2 cache cold.")]


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
    assert {f"{op}-sms.svg" for op in EXCHANGES} <= set(plot_names(tmp_path, sweep((8, 12, 24, 48))))
    for words in (
        "fused layout=rank: best 532 µs, within 10 % from 8 on",
        "fused layout=expert: best 532 µs, within 10 % from 24 on",
        "385 µs: the busiest port's bytes at the most measured on such links",
        "SMs that the exchange may take",
    ):
        assert words in texts(tmp_path / "plots" / "dispatch-sms.svg"), words
    assert (tmp_path / "plots" / "dispatch-sms.svg").read_text().count('class="ring"') == 2


def test_two_points_give_no_sweep_plot_and_an_unmeasured_link_no_limit(tmp_path):
    assert not [path for path in write_plots(tmp_path, sweep((8, 12))) if path.stem.endswith("-sms")]
    write_plots(tmp_path, sweep((8, 12, 24), device="NVIDIA A100-SXM4-80GB"))
    assert "measured on such links" not in (tmp_path / "plots" / "dispatch-sms.svg").read_text()


def test_different_settings_have_separate_plots(tmp_path):
    lines = gpu_exchange("fused", 10.0) + gpu_exchange("fused", 20.0, routing="zipf")
    assert "dispatch-routing-zipf.svg" in plot_names(tmp_path, lines)
    assert "routing zipf" in (tmp_path / "plots" / "dispatch-routing-zipf.svg").read_text()


def test_figures_of_one_name_have_files_of_their_own(tmp_path):
    other = [line | {"workload": "layer"} for line in gpu_exchange("fused", 10.0)]
    assert "layer-dispatch.svg" in plot_names(tmp_path, [*gpu_exchange("fused", 10.0), *other])
    twice = [line | {"pattern": pattern} for pattern in ("a b", "a-b") for line in copies(pattern="all_to_all")]
    assert plot_names(tmp_path / "twice", twice) == ["curves-a-b.svg", "curves-a-b-1.svg"]


def test_a_plot_that_cannot_be_written_raises_with_its_name(tmp_path):
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(CannotWrite, match="plots"):
        write_plots(tmp_path, copies())
    (tmp_path / "plots").unlink()
    (tmp_path / "plots" / "curves-pairs.svg").mkdir(parents=True)
    with pytest.raises(CannotWrite, match=r"curves-pairs\.svg"):
        write_plots(tmp_path, copies())
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["curves-pairs.svg"]


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
    assert capsys.readouterr().out.endswith(f"3 files in {tmp_path / 'run' / 'plots'}\n")
    assert "tma pull" in texts(tmp_path / "run" / "plots" / "curves-pairs.svg")


def test_report_says_when_there_is_nothing_to_draw(tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", "exchange") as directory:
        directory.write_config({"name": "exchange", "workload": "exchange"})
        directory.add_case([line | {"us_p50": None, "expert_load": None} for line in exchange_case("host", 100.0)])
    assert cli.main(["report", str(tmp_path / "run"), "--plots"]) == 0
    assert "nothing to draw" in capsys.readouterr().out
