"""Takes the pictures of docs/report.md: pages of measured lines of benchmarks/, in Chromium. `make figures` takes them.

Chromium's versions draw letters differently, so a test compares the pages' words with the lines, and not the pixels.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from raymoe.config import load_job
from raymoe.report.directory import RunDirectory
from raymoe.report.page import page
from raymoe.report.results import Record, Summary
from tests.unit.docs.measured_figures import FOLDER, Source
from tests.unit.report.chromium import open_page


@dataclass(frozen=True)
class Picture:
    """A page of a config's measured lines, as wide and as high as a window."""

    config: str
    settings: tuple[str, ...]
    source: Source
    size: tuple[int, int]
    dark: bool = False


PICTURES = {
    "report-desktop": Picture(
        "bench_exchange",
        ("matrix.exchange.backend=[fused, staged, nvshmem, row_push]",),
        Source("bench_exchange_h200x2", "csun"),
        (1280, 1180),
    ),
    "report-phone-dark": Picture(
        "layer_deepseek_v3",
        ("matrix.shape.tokens=[1, 128, 4096]",),
        Source("layer_h200x2", "asnu"),
        (500, 1180),
        dark=True,
    ),
}
"""By the name of the file. A window of Chromium is at least 500 pixels wide."""


def html_of(picture: Picture, folder: Path) -> str:
    """Make the page of the lines in the directory of a run that ended well."""
    lines = list(picture.source.lines())
    with RunDirectory.create(folder / "run", picture.config, str(lines[0]["run"])) as directory:
        directory.write_config(load_job(picture.config, list(picture.settings)).resolved())
        for case in dict.fromkeys(line["case"] for line in lines):
            directory.add_case([line for line in lines if line["case"] == case])
        finished = directory.finished()
        directory.write_summary(Summary.of(0, "done", finished, finished))
    return page([Record.read(folder / "run")])


def take(name: str) -> None:
    """Write the picture into docs/figures/."""
    picture = PICTURES[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = folder / "report.html"
        path.write_text(html_of(picture, folder))
        width, height = picture.size
        open_page(path, folder, width, dark=picture.dark, height=height)
        shade = "dark" if picture.dark else "light"
        shutil.copy(folder / f"shot-{width}-{shade}.png", FOLDER / f"{name}.png")


if __name__ == "__main__":
    for name in PICTURES:
        take(name)
