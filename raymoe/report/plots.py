"""Lists the figures of result lines, for report.html, and writes them as SVG files into `plots/` of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from raymoe.report.bandwidth import bandwidth_figures
from raymoe.report.columns import EXCHANGES
from raymoe.report.copies import copy_figures, ways_of
from raymoe.report.directory import cannot_write, write_atomically
from raymoe.report.exchange_figures import exchange_figures, overlap_figures, sms_figures, timeline_figures
from raymoe.report.figure import Figure, figure_file
from raymoe.report.layer_parts import layer_figures
from raymoe.report.layer_times import layer_parts
from raymoe.report.loads import load_figures, rank_load_figures
from raymoe.report.losses import loss_figures
from raymoe.report.product_curves import product_figures
from raymoe.report.results import Line, displayed
from raymoe.report.slow_steps import slow_step_figures
from raymoe.report.tables import by_workload

FOLDER = "plots"
MOST_FIGURES = 64
"""Files. A damaged results.jsonl could name thousands of operations."""


def figures(lines: Sequence[Line], config: Mapping[str, object]) -> Iterator[Figure]:
    """Make all figures of these lines of `displayed`. `config` is that of the job."""
    timed = [line for line in lines if line["us_p50"]]
    copies = [line for line in timed if line["op"] == "copy" and line["bytes"]]
    steps = [line for line in timed if line["workload"] in ("exchange", "layer") and line["tokens"]]
    cold = [line for line in steps if line["op"] in (*EXCHANGES, "step") and line["l2"] in ("cold", None)]
    section = config.get("p2p")  # says put or get for copies whose case does not
    yield from copy_figures(ways_of(copies, str(section.get("protocol", "put")) if isinstance(section, dict) else ""))
    yield from layer_figures(lines)
    yield from loss_figures(lines)
    for of_workload in by_workload(_without_single_layers(cold)):
        yield from exchange_figures(of_workload)
    yield from sms_figures(cold)
    yield from timeline_figures(lines)
    yield from overlap_figures(timed)
    yield from bandwidth_figures(timed)
    yield from product_figures(timed)
    yield from load_figures(lines)
    yield from rank_load_figures(lines)
    yield from slow_step_figures(timed)


def _without_single_layers(lines: Sequence[Line]) -> list[Line]:
    """Leave out a single case of a layer whose parts are drawn already: each operation would have one bar."""
    parts = layer_parts(lines)
    layers = {(line["run"], line["case"]) for line in lines if line["workload"] == "layer"}
    if not parts or len(layers) > 1:
        return list(lines)
    return [line for line in lines if line["workload"] != "layer"]


def write_plots(directory: Path, lines: Sequence[Line], config: Mapping[str, object] | None = None) -> list[Path]:
    """Write the figures of these lines into `plots/` of a run's directory, and return the files."""
    lines = displayed(lines)
    runs = [str(line["run"]) for line in lines]
    folder = directory / FOLDER
    written: list[Path] = []
    for figure in islice(figures(lines, config or {}), MOST_FIGURES):
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        path = folder / f"{_file_name(figure.stem)}.svg"
        if path in written:
            path = path.with_stem(f"{path.stem}-{len(written)}")
        write_atomically(path, figure_file(figure, runs), linked_folder=False)
        written.append(path)
    return written


def _file_name(stem: str) -> str:
    """Make a stem fit for a file of `plots/`, whatever the result lines name.

    >>> _file_name("dispatch-wire-float8_e4m3"), _file_name("../../etc/passwd")
    ('dispatch-wire-float8_e4m3', '-..-etc-passwd')
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip(".")[:100] or "figure"
