"""Which raw lines each measured table of the pages shows. `make tables` writes the cells.

New lines of a table: put the file into benchmarks/, name its run here, run `make tables`, and correct the date and the
commit above the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.python_path import REPOSITORY
from tests.unit.docs.raw_lines import Column, Line

DOCS = REPOSITORY / "docs"
ARCHIVE = "evidence/archive.md"
"""The one page whose lines may be of changed trees: it says so for each table."""


@dataclass(frozen=True)
class Table:
    """A table of a page: its head begins with `first`; `row` makes keys of a row's first cell."""

    page: str
    first: str
    columns: Mapping[str, Column]
    row: Callable[[str], Mapping[str, object]]

    def block(self) -> tuple[int, int]:
        """Where the table begins and ends in the text of its page."""
        text = (DOCS / self.page).read_text()
        assert text.count(f"| {self.first} |") == 1, f"{self.page} has no single table of {self.first}"
        start = text.index(f"| {self.first} |")
        end = text.find("\n\n", start)
        return start, len(text.rstrip("\n")) if end < 0 else end

    def cells(self) -> list[list[str]]:
        start, end = self.block()
        lines = (DOCS / self.page).read_text()[start:end].splitlines()
        return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]

    def rows(self) -> list[dict[str, str]]:
        head, _, *rows = self.cells()
        return [dict(zip(head, row, strict=True)) for row in rows]

    def section(self) -> str:
        """The page's text from the heading above the table to its end."""
        start, end = self.block()
        text = (DOCS / self.page).read_text()
        return text[text.rindex("\n#", 0, start) : end]

    def lines(self) -> list[Line]:
        """All lines behind the cells that are shown."""
        return [
            line
            for row in self.rows()
            for name, column in self.columns.items()
            if row[name]
            for line in column.lines(self.row(row[self.first]))
        ]


def keys_of(column: Column) -> tuple[str, ...]:
    """What a cell shows: p50 / p99, or one number that is no percentile of the GPU's time."""
    return (column.shown, "us_p99") if column.shown == "us_p50" and not column.median_only else (column.shown,)


def formatted(value: float, scale: float = 1.0) -> str:
    return f"{value:.0f}" if value >= 99.95 and scale == 1.0 else f"{value:.1f}"


def cell(table: Table, column: Column, first: str) -> str:
    row = table.row(first)
    return " / ".join(formatted(column.value(row, key), column.scale) for key in keys_of(column))


def written(table: Table) -> str:
    """The table as its raw lines give it, with the rows and the empty cells that the page has now."""
    head, rule, *rows = table.cells()
    lines = [head, rule]
    for row in rows:
        shown = [
            cell(table, table.columns[name], row[0]) if name in table.columns and old else old
            for name, old in zip(head[1:], row[1:], strict=True)
        ]
        lines.append([row[0], *shown])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in lines)


def tokens(cell: str) -> Mapping[str, object]:
    return {"tokens": int(cell)}


def mean_rows(cell: str) -> Mapping[str, object]:
    return {"rows": int(cell)}


def sms(cell: str) -> Mapping[str, object]:
    return {"case sms": cell}


def backend(cell: str) -> Mapping[str, object]:
    return {"backend": cell.split("`")[1]}


def backend_and_tokens(cell: str) -> Mapping[str, object]:
    name, count = cell.split(", ")
    return backend(name) | tokens(count)


def tokens_system_and_sms(cell: str) -> Mapping[str, object]:
    count, name, sms_word = cell.split(", ")
    return tokens(count) | backend(name) | sms(sms_word)


def operation(cell: str) -> Mapping[str, object]:
    return {"op": cell.strip("`")}


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(cell: str) -> Mapping[str, object]:
    number, unit = cell.split()
    return {"bytes": int(number) * UNITS[unit]}


def exchange(file: str, run: str, backend: str, op: str, l2: str = "cold") -> Column:
    return Column(file, run, {"backend": backend, "op": op, "l2": l2})


def copies(page: str, first: str, file: str, run: str, pattern: str) -> Table:
    def column(protocol: str, transport: str) -> Column:
        return Column(file, run, {"case": f"protocol={protocol},pattern={pattern}", "transport": transport})

    columns = {
        "copy engine put": column("put", "copy_engine"),
        "TMA put": column("put", "tma"),
        "NCCL": column("put", "collective"),
        "copy engine get": column("get", "copy_engine"),
        "TMA get": column("get", "tma"),
    }
    return Table(page, first, columns, size)


def overlap(page: str, first: str, file: str, run: str) -> Table:
    def beside(op: str) -> Column:
        return Column(file, run, {"backend": "fused", "case form": "whole", "op": op, "beside": None})

    columns = {
        "dispatch": beside("dispatch"),
        "product": beside("product"),
        "dispatch beside a product": beside("dispatch+product"),
        "combine": beside("combine"),
        "combine beside a product": beside("combine+product"),
    }
    return Table(page, first, columns, sms)


def overlap_tried(first: str, columns: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> Table:
    """A table of ways beside a product that were tried: by column the operation, the run, and words of the case."""
    page, file = "evidence/experiments/overlap.md", "bench_overlap_h200x2"
    keys = {name: {"op": f"{op}+product", "beside": None, **words} for name, (op, _, words) in columns.items()}
    return Table(page, first, {name: Column(file, columns[name][1], keys[name]) for name in columns}, sms)


def systems(page: str, first: str, file: str, run: str) -> Table:
    columns = {
        "dispatch `fused`": exchange(file, run, "fused", "dispatch"),
        "`staged`": exchange(file, run, "staged", "dispatch"),
        "`nvshmem`": exchange(file, run, "nvshmem", "dispatch"),
        "`row_push`": exchange(file, run, "row_push", "dispatch"),
        "combine `fused`": exchange(file, run, "fused", "combine"),
        "combine `staged`": exchange(file, run, "staged", "combine"),
        "combine `nvshmem`": exchange(file, run, "nvshmem", "combine"),
    }
    return Table(page, first, columns, tokens)


def nccl(op: str, calls: Mapping[str, str]) -> Table:
    file, run = "bench_nccl_h200x2", "uiez"
    backends = {f"`{name}`": exchange(file, run, name, op) for name in ("fused", "allgather", "collective")}
    bare = {name: exchange(file, run, "nccl_bare", call) for name, call in calls.items()}
    return Table("evidence/comparison.md", f"{op}, tokens", backends | bare, tokens)


def by_sms(page: str, first: str, file: str, run: str) -> Table:
    def column(layout: str, op: str) -> Column:
        return Column(file, run, {"layout": layout, "op": op, "l2": "cold"})

    columns = {
        "dispatch, layout `rank`": column("rank", "dispatch"),
        "dispatch, layout `expert`": column("expert", "dispatch"),
        "combine": column("expert", "combine"),
    }
    return Table(page, first, columns, sms)


SYSTEMS = (
    *("vvdk", "qrfo", "qlfc", "umwx", "wxyy", "zmsv", "atfz"),
    *("nyio", "zxii", "vftt", "qtub", "dcyp", "tvap", "esfm"),
)
"""The runs of bench_systems at one commit."""
OPERATIONS = {"dispatch": "dispatch", "combine": "combine", "both": "exchange"}


def by_one_clock(**keys: object) -> Column:
    """Cold times of bench_systems on two H200, of bfloat16 rows by expert unless `keys` say otherwise."""
    return Column("bench_systems_h200x2", SYSTEMS, {"layout": "expert", "l2": "cold", "wire": "bfloat16", **keys})


def both_by_system(first: str) -> Table:
    """A dispatch and its combine together; the low latency of NCCL EP takes few tokens."""

    def both(backend: str, sms: str) -> Column:
        return by_one_clock(op="exchange", backend=backend, **{"case sms": sms})

    columns = {
        "raymoe": both("fused", "auto"),
        "DeepEP V2": both("deepep_v2", "auto"),
        "raymoe, 24 SMs": both("fused", "24"),
        "DeepEP V2, 24 SMs": both("deepep_v2", "24"),
        "NCCL EP, low latency, 24 SMs": both("nccl_ep_ll", "24"),
        "NCCL EP, 24 SMs": both("nccl_ep", "24"),
    }
    return Table(COMPARISON, first, columns, tokens)


def at_equal_sms(first: str, layout: str) -> Table:
    def column(backend: str, op: str, layout: str = layout) -> Column:
        return by_one_clock(backend=backend, op=op, layout=layout, tokens=4096)

    columns = {f"{op} `{name}`": column(name, op) for op in ("dispatch", "combine") for name in ("fused", "deepep_v2")}
    if layout == "rank":
        columns |= {f"{op} `fused` by token": column("fused", op, "token") for op in ("dispatch", "combine")}
    return Table(COMPARISON, first, columns, sms)


def all_systems(first: str) -> Table:
    """All systems at one commit, with many and few tokens."""
    columns = {
        f"{name} by {layout}": by_one_clock(layout=layout, op=op)
        for layout in ("expert", "rank", "token")
        for name, op in OPERATIONS.items()
    }
    return Table(COMPARISON, first, columns, tokens_system_and_sms)


def rows_of_8_bits(first: str) -> Table:
    """Rows that are quantised in the dispatch, and before the clock starts, as DeepEP takes them."""

    def column(op: str, backend: str, leaves_out: str | None) -> Column:
        return by_one_clock(op=op, backend=backend, leaves_out=leaves_out, wire="float8_e4m3/bfloat16")

    before = "quantisation"
    columns = {
        "dispatch `fused`": column("dispatch", "fused", None),
        "quantised before": column("dispatch", "fused", before),
        "`deepep_v2`": column("dispatch", "deepep_v2", before),
        "both `fused`": column("exchange", "fused", None),
        "both, quantised before": column("exchange", "fused", before),
        "both `deepep_v2`": column("exchange", "deepep_v2", f"{before}, weights"),
    }
    return Table(COMPARISON, first, columns, sms)


def on_two_h100(first: str) -> Table:
    keys = {"layout": "expert", "tokens": 1024, "l2": "cold"}
    columns = {
        f"{op} `{name}`": Column("bench_systems_h100x2", ("urwd", "yhkm"), {**keys, "backend": name, "op": op})
        for op in ("dispatch", "combine")
        for name in ("fused", "deepep_v2")
    }
    return Table(ARCHIVE, first, columns, sms)


def zipf(page: str, first: str, file: str, run: str) -> Table:
    columns = {
        "dispatch": exchange(file, run, "fused", "dispatch"),
        "`row_push`": exchange(file, run, "row_push", "dispatch"),
        "combine": exchange(file, run, "fused", "combine"),
    }
    return Table(page, first, columns, tokens)


def performance(page: str, first: str, file: str, run: str) -> Table:
    columns = {
        "dispatch": exchange(file, run, "fused", "dispatch"),
        "row push": exchange(file, run, "row_push", "dispatch"),
        "combine": exchange(file, run, "fused", "combine"),
    }
    return Table(page, first, columns, tokens)


def as_fp8(page: str, first: str, file: str, run: str) -> Table:
    columns = {
        "dispatch as fp8": exchange(file, run, "fused", "dispatch"),
        "row push as fp8": exchange(file, run, "row_push", "dispatch"),
    }
    return Table(page, first, columns, tokens)


def cpu_ranks() -> Table:
    ops = {"dispatch": "dispatch", "combine": "combine", "both": "exchange"}
    columns = {name: Column("host_exchange", "ooza", {"op": op}, scale=1e-3) for name, op in ops.items()}
    return Table("evidence/performance.md", "backend, ms", columns, backend)


def eager() -> Table:
    def host(op: str, l2: str) -> Column:
        return Column("eager_h200x2", "lyah", {"op": op, "l2": l2}, shown="host_us_p50")

    columns = {
        "dispatch, host, in a row": host("dispatch", "warm"),
        "combine, in a row": host("combine", "warm"),
        "dispatch, host, alone": host("dispatch", "cold"),
        "combine, alone": host("combine", "cold"),
        "both": Column("eager_h200x2", "lyah", {"op": "exchange", "l2": "warm"}),
    }
    return Table("evidence/performance.md", "calls, tokens", columns, backend_and_tokens)


def rows_by_system(first: str, count: int) -> Table:
    systems = ("raymoe", "eager", "compile", "copy")
    keys: dict[str, dict[str, object]] = {name: {"backend": name, "tokens": count} for name in systems}
    columns = {f"`{name}`": Column("norm_h200", ("dmai", "ojcv"), keys[name]) for name in systems}
    return Table("evidence/rows.md", first, columns, operation)


def beside_liger() -> Table:
    names = ("raymoe", "compile", "liger", "copy", "own_copy")
    columns = {f"`{name}`": Column("norm_h200", "eqlc", {"backend": name, "tokens": 4096}) for name in names}
    return Table("evidence/rows.md", "4096 rows, beside Liger", columns, operation)


def stages_of_rows(op: str) -> Table:
    def column(backend: str, stages: int | str) -> Column:
        return Column("norm_sms_h100", "mast", {"backend": backend, "op": op, "case stages": stages})

    columns = {f"{count} stage{'s' * (count > 1)}": column("raymoe", count) for count in (1, 2, 4, 8)}
    others = {"auto": column("raymoe", "auto"), "`in_turn`": column("in_turn", 8)}
    return Table("evidence/rows.md", f"SMs, `{op}`", columns | others, sms)


POINTS = {
    "first row out": "first push",
    "entries published": "told",
    "counts here": "counts",
    "last row out": "last push",
    "last row placed": "placed",
    "over": "all awaited",
}
"""By column: the point of a dispatch, by its name in the raw lines, when its last block comes there."""


def timeline(page: str, first: str, file: str, run: str) -> Table:
    keys = {"op": "dispatch", "l2": "cold"}
    points = {name: Column(file, run, keys, shown=f"timeline {point}") for name, point in POINTS.items()}
    return Table(page, first, points | {"by the clock": Column(file, run, keys)}, tokens)


def layer_parts(first: str, file: str, run: str, counts: tuple[int, ...]) -> Table:
    columns = {str(count): Column(file, run, {"tokens": count, "l2": "cold"}) for count in counts}
    return Table("evidence/layer.md", first, columns, operation)


MODELS, PRODUCTS, FP8 = "layer_models_h100x2", "layer_products_h100x2", "layer_fp8_h100x2"


def two_commits(first: str, columns: Mapping[str, tuple[str, str | tuple[str, ...], int]]) -> Table:
    """Parts of layers whose columns name their commit: by column the file, the runs, and the tokens."""
    shown = {name: Column(file, runs, {"tokens": count, "l2": "cold"}) for name, (file, runs, count) in columns.items()}
    return Table("evidence/layer.md", first, shown, operation)


def products(first: str, columns: Mapping[str, tuple[str, str]]) -> Table:
    """Medians over rows of an expert, uniform routing: by column the operation and the system."""
    keys = {name: {"op": op, "backend": system} for name, (op, system) in columns.items()}
    shown = {name: Column("bench_products_h100", "nysv", keys[name], median_only=True) for name in columns}
    return Table("products.md", first, shown, mean_rows)


PERFORMANCE, COMPARISON, SCALING = "evidence/performance.md", "evidence/comparison.md", "evidence/scaling.md"
TABLES = [
    performance(PERFORMANCE, "tokens, 2× H200", "bench_exchange_h200x2", "csun"),
    as_fp8(PERFORMANCE, "tokens as fp8, 2× H200", "bench_exchange_fp8_h200x2", "oxzr"),
    cpu_ranks(),
    eager(),
    copies("evidence/links.md", "one pair at a time", "p2p_h200x2", "awho", "pairs"),
    copies("evidence/links.md", "both at once", "p2p_h200x2", "awho", "all_to_all"),
    overlap("evidence/overlap.md", "`sms`, 2× H200", "bench_overlap_h200x2", "wiii"),
    systems(COMPARISON, "tokens, 2× H200", "bench_exchange_h200x2", "csun"),
    both_by_system("both operations, tokens"),
    at_equal_sms("SMs, 4096 tokens by expert", "expert"),
    at_equal_sms("SMs, 4096 tokens by rank", "rank"),
    all_systems("tokens, system, SMs of two H200"),
    rows_of_8_bits("8-bit rows, SMs"),
    nccl("dispatch", {"NCCL all-gather": "all_gather", "NCCL all-to-all": "all_to_all"}),
    nccl("combine", {"NCCL, all sums": "all_to_all_sums", "NCCL, wanted sums": "all_to_all"}),
    by_sms(SCALING, "SMs, 2× H200", "bench_sms_h200x2", "jiyo"),
    zipf(SCALING, "tokens, zipf, 2× H200", "bench_zipf_h200x2", "ypox"),
    rows_by_system("4096 rows", 4096),
    rows_by_system("128 rows", 128),
    beside_liger(),
    stages_of_rows("rms_norm"),
    timeline("evidence/experiments/timeline.md", "tokens, 2× H200", "bench_trace_h200x2", "ziqr"),
    layer_parts("forward on two, tokens", "layer_h200x2", "asnu", (1, 128, 4096)),
    layer_parts("with gradients on two, tokens", "layer_h200x2", "dygh", (128, 4096)),
    overlap_tried(
        "`sms`, in parts",
        {
            "dispatch, whole": ("dispatch", "wiii", {}),
            "dispatch, in parts": ("dispatch", "vgbj", {}),
            "combine, whole": ("combine", "wiii", {}),
            "combine, in parts": ("combine", "vgbj", {}),
        },
    ),
    overlap_tried(
        "dispatch beside a product, `sms`",
        {
            "priority": ("dispatch", "wiii", {}),
            "`carveout`": ("dispatch", "aeei", {"case keep_off": "carveout"}),
            "`green_context`": ("dispatch", "aeei", {"case keep_off": "green_context"}),
        },
    ),
    two_commits(
        "forward on two H100",
        {
            "gpt-oss `2bd4ba3`": (MODELS, "mgyt", 4096),
            "gpt-oss `c843c26`": (MODELS, "hynx", 4096),
            "Qwen3 `2bd4ba3`": (MODELS, "pwls", 4096),
            "Qwen3 `c843c26`": (MODELS, "zczj", 4096),
            "DeepSeek-V3 `2bd4ba3`": (PRODUCTS, ("lbtr", "gwww"), 4096),
            "DeepSeek-V3 `96bc87d`": (PRODUCTS, ("ajbz", "yojt"), 4096),
        },
    ),
    two_commits(
        "with gradients on two H100",
        {
            "gpt-oss `2bd4ba3`": (MODELS, "ewjr", 4096),
            "gpt-oss `c843c26`": (MODELS, "mope", 4096),
            "DeepSeek-V3 `2bd4ba3`": (PRODUCTS, "eiyg", 4096),
            "DeepSeek-V3 `96bc87d`": (PRODUCTS, "ajxs", 4096),
        },
    ),
    two_commits(
        "DeepSeek-V3, tokens",
        {
            f"{count}, {bits} bits `{commit}`": (FP8, run, count)
            for count in (4096, 128, 1)
            for bits, commit, run in ((16, "2bd4ba3", ("etrd", "zhwj")), (8, "62efe7d", ("hebg", "bwrz")))
        },
    ),
    products(
        "rows of an expert, on average",
        {
            "raymoe": ("up", "raymoe"),
            "grouped_mm": ("up", "grouped_mm"),
            "dense": ("up", "dense"),
            "copy": ("up", "copy"),
            "raymoe, 8 bits": ("up", "raymoe_fp8"),
        },
    ),
    products(
        "mean rows",
        {
            "of `x`": ("dx", "raymoe"),
            "`x`, grouped_mm": ("dx", "grouped_mm"),
            "of `weight`": ("dw", "raymoe"),
            "`weight`, grouped_mm": ("dw", "grouped_mm"),
            "added to `main_grad`": ("dw", "added"),
            "two passes": ("dw", "grouped_mm_added"),
        },
    ),
    # The archive.
    performance(ARCHIVE, "tokens, 4× H200", "bench_exchange_h200x4", "unnt"),
    systems(ARCHIVE, "tokens by system, 4× H200", "bench_exchange_h200x4", "gxgs"),
    on_two_h100("SMs of two H100, 1024 tokens"),
    copies(ARCHIVE, "all four, each to three", "p2p_h200x4", "yapr", "all_to_all"),
]
