"""Draws copies over the links of a machine: a matrix of all pairs of ranks, and curves over the size of a message.
`exchange_plots.py` draws exchanges.

Each figure is written as PNG and as SVG. The same lines give the same SVG, byte for byte. This code uses no pyplot and
restores matplotlib's settings, so a program that draws its own figures can call it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import NullLocator

from raymoe.errors import ConfigError
from raymoe.report.bandwidth_plots import bandwidth_figures
from raymoe.report.columns import byte_size
from raymoe.report.copies import LATENCY_BYTES, CopyWay, gbps, how_measured, integer, link_of, three_digits, us, ways_of
from raymoe.report.directory import cannot_write, write_atomically
from raymoe.report.drawing import COLOURS, MARKERS, STYLE, new_figure, nominal_limit, rendered, set_title
from raymoe.report.exchange_plots import exchange_figures, sms_figures, timeline_figures
from raymoe.report.layer_plots import layer_figures
from raymoe.report.results import Line, Record, displayed

FOLDER = "plots"
PANELS_IN_A_ROW = 3
MOST_FIGURES = 64
MOST_WAYS = 24
"""Curves or panels of a figure. A damaged file could name thousands."""

MOST_MATRIX_RANKS = 64


def write_plots(directory: Path, lines: Sequence[Line]) -> list[Path]:
    """Draw these lines into `plots/` of a run's directory, and return the files.

    There are figures of copies; of exchanges between GPUs: over tokens, over SMs, and where their time goes; of the
    bandwidth of operations over rows; and of the parts of layers.
    """
    lines = displayed(lines)
    copies = [line for line in lines if line["op"] == "copy" and line["us_p50"] and line["bytes"]]
    folder = directory / FOLDER
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        of_copies = copy_figures(ways_of(copies, _protocol(directory)))
        of_exchanges = chain(exchange_figures(lines), sms_figures(lines), timeline_figures(lines))
        drawn = chain(of_copies, of_exchanges, bandwidth_figures(lines), layer_figures(lines))
        for stem, figure in islice(drawn, MOST_FIGURES):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise cannot_write(folder, error) from error
            for kind in ("png", "svg"):
                written.append(folder / f"{_file_name(stem)}.{kind}")
                write_atomically(written[-1], rendered(figure, kind), linked_folder=False)
    return written


def _file_name(stem: str) -> str:
    """Make a stem fit for a file of `plots/`, whatever the result lines name.

    >>> _file_name("dispatch-wire-float8_e4m3"), _file_name("../../etc/passwd")
    ('dispatch-wire-float8_e4m3', '-..-etc-passwd')
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip(".")[:100] or "figure"


def copy_figures(ways: Mapping[CopyWay, Sequence[Line]]) -> Iterator[tuple[str, Figure]]:
    """Draw copies, each figure with its file's stem: curves for each pattern, then matrices for each size."""
    lines = [line for of_way in ways.values() for line in of_way]
    for pattern in sorted({str(line["pattern"]) for line in lines}):
        yield f"curves-{re.sub(r'[^a-z_]', '-', pattern)}", _curves(_only(ways, "pattern", pattern), pattern)
    pairs = {way: [line for line in of_way if _is_pair(line)] for way, of_way in ways.items()}
    for size in sorted({integer(line, "bytes") for of_way in pairs.values() for line in of_way}):
        yield f"matrix-{byte_size(size).replace(' ', '')}", _matrices(_only(pairs, "bytes", size), size)


def _is_pair(line: Line) -> bool:
    ends = [line["src"], line["dst"]]
    return all(end is not None and int(str(end)) < MOST_MATRIX_RANKS for end in ends)


def _only(ways: Mapping[CopyWay, Sequence[Line]], key: str, value: object) -> dict[CopyWay, list[Line]]:
    found = {way: [line for line in lines if line[key] == value] for way, lines in ways.items()}
    return dict(islice(((way, lines) for way, lines in found.items() if lines), MOST_WAYS))


def _matrices(ways: Mapping[CopyWay, Sequence[Line]], size: int) -> Figure:
    """Draw one panel for each way, on one colour scale, so that they can be compared."""
    lines = [line for of_way in ways.values() for line in of_way]
    ranks = 1 + max(integer(line, end) for line in lines for end in ("src", "dst"))
    most, link = max(map(gbps, lines)), link_of(lines[0]["device"])
    # Scale to the link's limit, so that small differences look small. Short messages stay far below it: scale to their
    # own highest value.
    scale = link[0] if link and most > link[0] / 2 else most
    columns = min(len(ways), PANELS_IN_A_ROW)
    rows = math.ceil(len(ways) / columns)
    side = 1.0 + 0.62 * ranks
    figure = new_figure(max(columns * side + 1.2, 6.4), rows * (side + 0.3) + 1.1)
    panels = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axes, (way, of_way) in zip(panels.flat, ways.items(), strict=False):
        image = _matrix(axes, of_way, ranks, scale)
        axes.set_title(way.label + _who_moves(way), fontsize=9.5)
    for axes in panels.flat[len(ways) :]:
        axes.set_visible(False)
    if image is not None:
        full = f", of {scale:.0f} by {link[1]}" if link and scale == link[0] else ""
        bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=30 * rows, pad=0.02)
        bar.set_label(f"GB/s from row to column{full}")
        bar.outline.set_visible(False)
    set_title(figure, f"{byte_size(size)} from rank to rank, one pair at a time", how_measured(lines), lines)
    return figure


def _who_moves(way: CopyWay) -> str:
    if way.transport == "collective":
        return "\nthe row's rank sends, the column's receives"
    return {"put": "\nthe row's rank writes", "get": "\nthe column's rank reads"}.get(way.protocol, "")


def _matrix(axes: Axes, lines: Sequence[Line], ranks: int, scale: float) -> AxesImage:
    grid = [[math.nan] * ranks for _ in range(ranks)]
    for line in lines:
        row, column = integer(line, "src"), integer(line, "dst")
        grid[row][column] = gbps(line)
        short = integer(line, "bytes") <= LATENCY_BYTES
        text = three_digits(gbps(line)) + (f"\n{three_digits(us(line))} µs" if short else "")
        colour = "white" if gbps(line) < 0.55 * scale else "black"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#EEEEEE")
    image = axes.imshow(grid, cmap=colours, vmin=0, vmax=scale)
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.set_xlabel("destination rank")
    axes.set_ylabel("source rank")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _curves(ways: Mapping[CopyWay, Sequence[Line]], pattern: str) -> Figure:
    """Draw bandwidth over all sizes, and the time of a copy over the small ones."""
    lines = [line for of_way in ways.values() for line in of_way]
    sizes = sorted({integer(line, "bytes") for line in lines})
    short = [size for size in sizes if size <= LATENCY_BYTES]
    columns = 2 if short else 1
    figure = new_figure(5.3 * columns + 0.4, 4.7 + 0.2 * math.ceil(len(ways) / 3))
    bandwidth = figure.add_subplot(1, columns, 1)
    _draw(bandwidth, ways, sizes, quantity=gbps)
    bandwidth.set_ylim(bottom=0)
    bandwidth.set_ylabel("GB/s, one direction" if pattern == "pairs" else "GB/s, one direction of the busiest port")
    for full, name in {link for line in lines if (link := link_of(line["device"]))}:
        nominal_limit(bandwidth, full, name)
    if short:
        latency = figure.add_subplot(1, columns, 2)
        _draw(latency, ways, short, quantity=us)
        latency.set_ylabel("time of a copy, µs")
        times = [us(line) for line in lines if integer(line, "bytes") <= LATENCY_BYTES]
        if max(times) > 20 * min(times):
            latency.set_yscale("log")
            latency.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            latency.set_ylim(0, 1.12 * max(times))
    figure.legend(*bandwidth.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    title = {"pairs": "Copies, one pair at a time", "all_to_all": "Copies, every rank to every other at once"}
    several = len({(line["src"], line["dst"]) for line in lines}) > 1
    spread = "\nlines: the median pair; bands: from the slowest pair to the fastest" * several
    set_title(figure, title.get(pattern, pattern), how_measured(lines) + spread, lines)
    return figure


def _draw(axes: Axes, ways: Mapping[CopyWay, Sequence[Line]], sizes: Sequence[int], quantity: Any) -> None:
    """Draw a line for each way over the sizes: the median of its pairs, and behind it a band over their range."""
    colours: dict[object, int] = {}
    for way, lines in ways.items():
        # Push and pull of a transport have the same colour. Pull is dashed, with hollow marks.
        index = colours.setdefault((way.transport, way.details), len(colours))
        colour, pull = COLOURS[index % len(COLOURS)], way.protocol == "get"
        values: dict[int, list[float]] = {size: [] for size in sizes}
        for line in lines:
            if (size := integer(line, "bytes")) in values:
                values[size].append(quantity(line))
        measured = [size for size in sizes if values[size]]
        axes.plot(
            measured,
            [median(values[size]) for size in measured],
            color=colour,
            linestyle=(0, (4, 2)) if pull else "solid",
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            markerfacecolor="white" if pull else colour,
            label=way.label,
        )
        low, high = ([end(values[size]) for size in measured] for end in (min, max))
        axes.fill_between(measured, low, high, color=colour, alpha=0.18, linewidth=0)
    step = 1 + (len(sizes) - 1) // 11
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::step], [byte_size(size) for size in sizes[::step]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=40)
    axes.set_xlabel("size of a message")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _protocol(directory: Path) -> str:
    """Read the protocol from the run's config; empty without a config."""
    try:
        section = Record.read(directory).config.get("p2p")
    except ConfigError:
        return ""
    return str(section.get("protocol", "put")) if isinstance(section, dict) else ""
