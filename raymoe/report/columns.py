"""Chooses the columns of a table of result lines, and fills its cells."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from raymoe.report.layer_times import shares_of_step
from raymoe.report.measures import measured_link_gbps
from raymoe.report.results import Line


@dataclass(frozen=True)
class Column:
    header: str
    cells: list[str]
    right: bool = False


def byte_size(value: object) -> str:
    """Write a number of bytes with a unit and up to four digits.

    >>> byte_size(512), byte_size(4096), byte_size(3 * 2**19), byte_size(268435456)
    ('512 B', '4 KiB', '1.5 MiB', '256 MiB')
    """
    if value is None:
        return "-"
    size = float(str(value))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def _yes_no(value: object) -> str:
    return "yes" if value else "NO"


def _fixed(digits: int) -> Callable[[object], str]:
    return lambda value: f"{float(str(value)):,.{digits}f}"


def _rate(value: object) -> str:
    """Write a rate with two decimals, or below 1 with three digits.

    >>> _rate(381.4), _rate(0.0032), _rate(0.0)
    ('381.40', '0.0032', '0.00')
    """
    number = float(str(value))
    return f"{number:.3g}" if 0 < number < 1 else f"{number:,.2f}"


# Settings of a line, with their headers. A setting that is the same in every line goes to the caption. One that the
# name of the case has already gets no column.
SETTINGS = {
    "op": "op",
    "backend": "backend",
    "transport": "transport",
    "pattern": "pattern",
    "src": "src",
    "dst": "dst",
    "bytes": "size",
    "ranks": "ranks",
    "domains": "domains",
    "chunks": "chunks",
    "tokens": "tokens",
    "rows": "rows",
    "hidden": "hidden",
    "ffn": "ffn",
    "experts": "experts",
    "topk": "top-k",
    "dtype": "dtype",
    "wire": "wire",
    "routing": "routing",
    "seed": "seed",
    "layout": "layout",
    "alignment": "alignment",
    "padding": "padding",
    "sms": "SMs",
    "stages": "stages",
    "beside": "beside",
    "l2": "L2",
    "graph": "graph",
    "device": "device",
}
NUMERIC = {"src", "dst", "bytes", "ranks", "domains", "tokens", "hidden", "experts", "topk", "seed", "alignment"}
NUMERIC |= {"sms", "stages", "chunks", "rows", "ffn"}
EXCHANGES = ("dispatch", "combine", "exchange")
BASELINE = "row_push"
"""This backend only pushes rows. Its GB/s are the limit for the other backends."""

# Config keys (last part) that differ from the key of the result line.
WORD_IN_CASE = {"routing": "kind", "wire": "dispatch"}

# The table leaves out us_min, us_max and samples, to fit 100 columns.
MEASURES: dict[str, tuple[str, Callable[[object], str]]] = {
    "us_p50": ("p50 us", _fixed(1)),
    "us_p99": ("p99 us", _fixed(1)),
    "host_us_p50": ("host us", _fixed(1)),
    "bytes_wire": ("on wire", byte_size),
    "gbps_wire": ("GB/s", _rate),
    "bytes_net": ("on network", byte_size),
    "bytes_memory": ("moved", byte_size),
    "gbps_memory": ("memory GB/s", _fixed(1)),
    "bytes_weights": ("weights", byte_size),
    "tflops": ("TFLOP/s", _fixed(1)),
    "tokens_per_s": ("tokens/s", _fixed(0)),
    "expert_load_imbalance": ("imbalance", _fixed(2)),
    "bytes_peak": ("peak", byte_size),
    "bytes_kept": ("kept", byte_size),
    "max_error": ("max error", lambda value: f"{float(str(value)):.1e}"),
    "verified": ("verified", _yes_no),
}


CAPTIONED = {"expert_load_imbalance": "imbalance", "max_error": "max error"}
"""Measures in the caption if all lines that have them share one value. A matrix over the routing varies the imbalance,
and all parts of a step have its error."""


def show(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return byte_size(value) if key == "bytes" else str(value)


def setting_columns(lines: Sequence[Line]) -> list[Column]:
    """Make the columns that distinguish these lines: run and case if they differ, the operation, differing settings."""
    columns = []
    for key in ("run", "case"):
        if len({line[key] for line in lines}) > 1:
            columns.append(Column(key, [str(line[key]) for line in lines]))
    for key, header in SETTINGS.items():
        if key == "op" or (_varies(lines, key) and not _named_by_case(lines, key)):
            columns.append(Column(header, [show(key, line[key]) for line in lines], right=key in NUMERIC))
    return columns


def columns_of(lines: Sequence[Line]) -> list[Column]:
    """Make the columns of these lines: first the settings that differ, then the measurements."""
    columns = setting_columns(lines)
    for key, (header, formatted) in MEASURES.items():
        values = [line[key] for line in lines]
        if _is_captioned(lines, key):
            continue
        if any(value is not None for value in values):
            write = _fixed(0) if key in _TIMES and _is_long(values) else formatted
            cells = ["-" if value is None else write(value) for value in values]
            columns.append(Column(header, cells, right=True))
    if any(int(str(line["runs"] or 1)) > 1 for line in lines):  # else each sample is one run, or nobody knows
        columns.append(Column("runs a sample", [show("runs", line["runs"]) for line in lines], right=True))
    rows = [_rows_of_capacity(line) for line in lines]
    if len({*rows} - {"-"}) > 1:
        columns.append(Column("busiest rank's rows", rows, right=True))
    known = {"of push": shares_of_push, "of link": shares_of_link, "of copy": shares_of_copy, "of step": shares_of_step}
    for header, shares_of in known.items():
        shares = shares_of(lines)
        if any(shares):
            cells = [f"{share:.0%}" if share else "-" for share in shares]
            if header == "of link" and any(line["gbps_link"] for line in lines):
                header = "of link GB/s"
                cells = [_of_its_link(cell, line) for cell, line in zip(cells, lines, strict=True)]
            columns.append(Column(header, cells, right=True))
    if any(ratios := speedups(lines)):
        columns.append(Column("vs slowest", [f"{ratio:.2f}x" if ratio else "-" for ratio in ratios], right=True))
    if any(line["losses"] for line in lines):
        columns.append(Column("loss", [loss_of(line) for line in lines], right=True))
    if any(restarts(line) for line in lines):
        columns.append(Column("went on from step", [", ".join(map(str, restarts(line))) or "-" for line in lines]))
    if any(line["stopped"] for line in lines):
        columns.append(Column("stopped", [f"after {line['samples']}" if line["stopped"] else "-" for line in lines]))
    if any(line["leaves_out"] or line["skipped"] for line in lines):
        columns.append(Column("leaves out", [_leaves_out(line) for line in lines]))
    return columns


def loss_of(line: Line) -> str:
    """Write the first and the last loss of a training.

    >>> loss_of({"losses": [[1, 6.25], [2, 5.0], [3, 1.5]]}), loss_of({"losses": None})
    ('6.250 to 1.500', '-')
    """
    points = line["losses"]
    if not isinstance(points, list) or not points:
        return "-"
    return f"{points[0][1]:.3f} to {points[-1][1]:.3f}"


def restarts(line: Line) -> list[int]:
    """Return the steps from which ranks went on after one was lost, or after the run was resumed.

    >>> restarts({"starts": [0, 100, 100]}), restarts({"starts": None})
    ([100, 100], [])
    """
    starts = line["starts"]
    return [int(step) for step in starts[1:]] if isinstance(starts, list) else []


def caption_of(lines: Sequence[Line]) -> str:
    """Name the settings that all lines share: `exchange: ranks 4, tokens 512, dtype bfloat16`."""
    shared = [
        f"{header} {show(key, lines[0][key])}"
        for key, header in SETTINGS.items()
        if key != "op" and lines[0][key] is not None and not _varies(lines, key)
    ]
    for key, name in CAPTIONED.items():
        values = {line[key] for line in lines} - {None}
        if values and _is_captioned(lines, key):
            shared.append(f"{name} {MEASURES[key][1](values.pop())}")
    rows = {_rows_of_capacity(line) for line in lines} - {"-"}
    if len(rows) == 1:
        shared.append(f"busiest rank {rows.pop()} rows")
    return f"{lines[0]['workload']}: {', '.join(shared)}"


_TIMES = ("us_p50", "us_p99")
_LONG_US = 1000.0
"""Times of which none is shorter are written without decimals."""


def _is_long(values: Sequence[object]) -> bool:
    return min(float(str(value)) for value in values if value is not None) >= _LONG_US


def _of_its_link(share: str, line: Line) -> str:
    """Add the limit of the same run to a share of it.

    >>> _of_its_link("75%", {"gbps_link": 254.0}), _of_its_link("75%", {"gbps_link": None})
    ('75% of 254.00', '75%')
    """
    return f"{share} of {_rate(line['gbps_link'])}" if line["gbps_link"] else share


def _is_captioned(lines: Sequence[Line], key: str) -> bool:
    return key in CAPTIONED and len({line[key] for line in lines} - {None}) <= 1


def _rows_of_capacity(line: Line) -> str:
    """Write the rows of the busiest rank in its fullest step, and the rows that it has memory for.

    >>> _rows_of_capacity({"rows_busiest": 2304, "rows_capacity": 8320})
    '2,304 of 8,320'
    """
    most, capacity = line["rows_busiest"], line["rows_capacity"]
    return "-" if most is None or capacity is None else f"{most:,} of {capacity:,}"


def speedups(lines: Sequence[Line]) -> list[float | None]:
    """Divide the slowest time of the same settings by each line's time.

    None where no other backend or transport has the line's settings.

    >>> from raymoe.report.results import complete
    >>> def line(backend, op, us):
    ...     measured = {"case": backend, "backend": backend, "op": op, "us_p50": us}
    ...     return complete(measured, run="a-b", generation=0, commit=None)
    >>> speedups([line("host", "dispatch", 50.0), line("collective", "dispatch", 100.0), line("host", "combine", 9.0)])
    [2.0, 1.0, None]
    """
    compared = ("backend", "transport", "protocol", "graph", "sms", "stages")
    keys = [other_settings(line, compared) for line in lines]
    groups: dict[tuple[object, ...], list[Line]] = {}
    for key, line in zip(keys, lines, strict=True):
        groups.setdefault(key, []).append(line)
    slowest: dict[tuple[object, ...], float] = {}
    for settings, group in groups.items():
        times = [float(str(line["us_p50"])) for line in group if line["us_p50"]]
        if times and len({(line["backend"], line["transport"]) for line in group}) > 1:
            slowest[settings] = max(times)
    result: list[float | None] = []
    for key, line in zip(keys, lines, strict=True):
        most = slowest.get(key)
        result.append(most / float(str(line["us_p50"])) if most and line["us_p50"] else None)
    return result


def other_settings(line: Line, compared: Collection[str]) -> tuple[object, ...]:
    """Give the settings of a line without the compared ones: of its keys, and of its case, which also names settings
    that no key has (masked, capacity)."""
    in_case = (word for word in case_settings(line).items() if word[0].rpartition(".")[2] not in compared)
    return (line["run"], *(line[key] for key in SETTINGS if key not in compared), *in_case)


def case_settings(line: Line) -> dict[str, str]:
    """Read the config keys and values that a case's name has. A value may have commas.

    >>> case_settings({"case": "file=a,b.npy,masked=0.5"}), case_settings({"case": "default"})
    ({'file': 'a,b.npy', 'masked': '0.5'}, {})
    """
    settings: dict[str, str] = {}
    key = ""
    for word in str(line["case"]).split(","):
        start, equals, value = word.partition("=")
        if equals:
            key = start
            settings[key] = value
        elif key:
            settings[key] += f",{word}"
    return settings


def shares_of_push(lines: Sequence[Line]) -> list[float | None]:
    """Divide each line's GB/s by those of row_push with the same settings.

    row_push measures what the links give for rows of this size and number: less at 128 tokens than at 4096. A combine
    with rows of another size has no such limit.

    >>> from raymoe.report.results import complete
    >>> def line(backend, op, gbps):
    ...     measured = {"case": "c", "backend": backend, "op": op, "gbps_wire": gbps}
    ...     return complete(measured, run="a-b", generation=0, commit=None)
    >>> lines = line("fused", "combine", 300.0), line("row_push", "dispatch", 400.0), line("host", "step", None)
    >>> shares_of_push(lines)
    [0.75, None, None]
    """
    compared = ("op", "backend", "transport", "graph", "sms")
    limits = {
        other_settings(line, compared): float(str(line["gbps_wire"]))
        for line in lines
        if line["backend"] == BASELINE and line["gbps_wire"]
    }
    shares: list[float | None] = []
    for line in lines:
        limit = limits.get(other_settings(line, compared)) if sends_dispatch_rows(line) else None
        known = limit and line["gbps_wire"] and line["backend"] != BASELINE
        shares.append(float(str(line["gbps_wire"])) / limit if known and limit else None)
    return shares


def sends_dispatch_rows(line: Line) -> bool:
    """Whether the rows of this line are as large as those of the case's dispatch. If combine has another dtype, `wire`
    names both, with a slash between them."""
    return line["op"] == "dispatch" or "/" not in str(line["wire"])


def shares_of_link(lines: Sequence[Line]) -> list[float | None]:
    """Divide each line's GB/s by those of plain copies of as many bytes in the same run.

    Lines of older runs, and of other systems, are divided by the highest rate measured on such links, for any size.

    >>> keys = {"op": "dispatch", "device": "NVIDIA H200", "gbps_wire": 190.5}
    >>> shares_of_link([keys | {"gbps_link": 254.0}, keys | {"gbps_link": None}])
    [0.75, 0.5]
    """
    limits = [link_gbps(line) for line in lines]
    return [
        float(str(line["gbps_wire"])) / limit if limit and line["gbps_wire"] else None
        for line, limit in zip(lines, limits, strict=True)
    ]


def link_gbps(line: Line) -> float | None:
    """Give the limit of an exchange's GB/s; None if it is not known."""
    if line["gbps_link"]:
        return float(str(line["gbps_link"]))
    return measured_link_gbps(line["device"]) if line["op"] in EXCHANGES else None


COPIES = ("copy", "own_copy")
"""These systems only copy as many bytes as an operation reads and writes. The faster one is the limit of its case."""


def shares_of_copy(lines: Sequence[Line]) -> list[float | None]:
    """Divide each line's rate of memory by that of the faster copy of the same operation and case.

    >>> from raymoe.report.results import complete
    >>> def line(system, gbps):
    ...     measured = {"case": "c", "op": "rms_norm", "backend": system, "gbps_memory": gbps}
    ...     return complete(measured, run="a-b", generation=0, commit=None)
    >>> shares_of_copy([line("raymoe", 3000.0), line("copy", 4000.0), line("own_copy", 3900.0)])
    [0.75, None, None]
    """
    limits: dict[tuple[object, ...], float] = {}
    for line in lines:
        if line["backend"] in COPIES and line["gbps_memory"]:
            case = line["run"], line["case"], line["op"]
            limits[case] = max(limits.get(case, 0.0), float(str(line["gbps_memory"])))
    shares: list[float | None] = []
    for line in lines:
        limit = limits.get((line["run"], line["case"], line["op"]))
        known = limit and line["gbps_memory"] and line["backend"] not in COPIES
        shares.append(float(str(line["gbps_memory"])) / limit if known and limit else None)
    return shares


def _leaves_out(line: Line) -> str:
    return f"skipped: {line['skipped']}" if line["skipped"] else show("leaves_out", line["leaves_out"])


def _varies(lines: Sequence[Line], key: str) -> bool:
    return len({line[key] for line in lines}) > 1


def _named_by_case(lines: Sequence[Line], key: str) -> bool:
    word = WORD_IN_CASE.get(key, key)
    return all(f"{word}={line[key]}" in str(line["case"]).split(",") for line in lines)
