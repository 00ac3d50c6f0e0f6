"""Draws the measured figures of docs/figures/ out of the raw lines in benchmarks/. `make figures` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from raymoe.report.figure import figure_file
from raymoe.report.plots import figures
from raymoe.report.results import Line, decode, displayed
from tests.python_path import REPOSITORY
from tests.unit.docs.blocks_figure import blocks_figure
from tests.unit.docs.systems_figure import over_sms_figure, systems_figure

FOLDER = REPOSITORY / "docs" / "figures"
BY_HAND = {"step-timeline-h200x2.svg", "how-it-works.svg", "rows-by-expert.svg"}
"""test_measured_pages.py compares the bars of the time line with the lines. The others show nothing measured."""


@dataclass(frozen=True)
class Source:
    """Lines of benchmarks/`file`.jsonl: of the run whose name ends so, and of these backends, or of all."""

    file: str
    run: str
    backends: tuple[str, ...] = ()

    def lines(self) -> Iterator[Line]:
        for text in (REPOSITORY / "benchmarks" / f"{self.file}.jsonl").read_text().splitlines():
            line = decode(text)
            if str(line["run"]).endswith(self.run) and (not self.backends or line["backend"] in self.backends):
                yield line


TWO = (
    Source("bench_exchange_h200x2", "csun"),
    Source("bench_nccl_h200x2", "uiez", ("allgather", "collective")),
)
FOUR = (
    Source("bench_exchange_h200x4", "unnt", ("fused", "row_push")),
    Source("bench_exchange_h200x4", "wkiy", ("staged",)),
    Source("bench_exchange_h200x4", "gxgs", ("nvshmem",)),
    Source("bench_exchange_h200x4", "nkmd", ("nvshmem",)),
)
"""The newest lines of each system that docs/evidence/comparison.md names."""

FIGURES = {
    "dispatch-h200x2": ("dispatch", TWO),
    "combine-h200x2": ("combine", TWO),
    "dispatch-h200x4": ("dispatch", FOUR),
    "combine-h200x4": ("combine", FOUR),
    "dispatch-timeline-h200x2": ("dispatch-timeline", (Source("bench_trace_h200x2", "ziqr"),)),
    "combine-timeline-h200x2": ("combine-timeline", (Source("bench_trace_h200x2", "ziqr"),)),
    "layer-parts-h200": ("layer-parts", (Source("layer_h200", "nbla"),)),
    "products-up-h100": (
        "products-up",
        (Source("bench_products_h100", "nysv", ("raymoe", "grouped_mm", "dense", "copy", "raymoe_fp8")),),
    ),
    "rms_norm-sms-h100": ("bandwidth-rms_norm-sms", (Source("norm_sms_h100", "mast"),)),
    "rms_norm-stages-h100": ("bandwidth-rms_norm-stages", (Source("norm_sms_h100", "mast"),)),
}
"""By the name of the file: the figure of a report, and the lines that it shows."""

NARROW: Mapping[str, Callable[[], str]] = {
    "systems-sms-h200x2": systems_figure,
    "sms-h200x2": over_sms_figure,
    "combine-down-blocks-h200x2": blocks_figure,
}
"""Figures that no report has, in one column for telephones, and what draws each."""


def quoted(lines: list[Line]) -> list[Line]:
    """Return points of DeepGEMM out of the table of another day, as lines beside raymoe's of as many rows."""
    page = (REPOSITORY / "docs/evidence/experiments/products.md").read_text()
    cells = re.search(r"^\| 64 × 512, 7168 → 4096 \|.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    (own,) = (line for line in lines if (line["backend"], line["op"], line["rows"]) == ("raymoe", "up", 512))
    assert cells
    work = 2 * 64 * 512 * 7168 * 4096
    names = zip(("DeepGEMM, quoted", "DeepGEMM in 8 bits, quoted"), cells.groups(), strict=True)
    return [{**own, "backend": name, "us_p50": float(us), "tflops": work / float(us) / 1e6} for name, us in names]


def measured_figure(name: str) -> str:
    """Return the file of this name as its raw lines give it."""
    if name in NARROW:
        return NARROW[name]()
    stem, sources = FIGURES[name]
    lines = [line for source in sources for line in displayed(list(source.lines()))]
    if name == "products-up-h100":
        lines += quoted(lines)
    runs = [str(line["run"]) for line in lines]
    as_one_run = [line | {"run": runs[0]} for line in lines]  # else each run would have its own curves
    (figure,) = (figure for figure in figures(as_one_run, {}) if figure.stem == stem)
    return figure_file(figure, runs)


if __name__ == "__main__":
    for name in (*FIGURES, *NARROW):
        (FOLDER / f"{name}.svg").write_text(measured_figure(name))
