"""Tables of the evidence that no line holds as it is: computed from lines, or read from a .txt file of benchmarks/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy

from tests.unit.docs.hidden_exchange import MEASURED, RANKS, exchange_us, hidden_us
from tests.unit.docs.measured_tables import DOCS, formatted
from tests.unit.docs.raw_lines import BENCHMARKS, Column, date_of, lines_of

Cells = Sequence[Sequence[str]]
BESIDE = "bench_overlap_h200x2"
CAPTURED_LAYERS, FP8_FORWARD = "captured_layers_h100x2.txt", "fp8_forward_h100.txt"


@dataclass(frozen=True)
class Derived:
    """A table whose head begins with `first`, and what computes its rows."""

    page: str
    first: str
    rows: Callable[[], Cells]

    def shown(self) -> Cells:
        text = (DOCS / self.page).read_text()
        assert text.count(f"| {self.first} |") == 1, f"{self.page} has no single table of {self.first}"
        lines = text[text.index(f"| {self.first} |") :].split("\n\n")[0].splitlines()[2:]
        return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def text_of(name: str) -> str:
    return (BENCHMARKS / name).read_text()


def json_lines(name: str) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in text_of(name).splitlines() if line.startswith("{")]


def lines_over_tokens() -> Cells:
    """Straight lines through the p50 of 2048 to 8192 tokens, by least squares."""
    rows = []
    for name, backend, op in (
        ("dispatch", "fused", "dispatch"),
        ("combine", "fused", "combine"),
        ("`row_push`", "row_push", "dispatch"),
    ):
        column = Column("bench_exchange_h200x2", "csun", {"backend": backend, "op": op, "l2": "cold"})
        tokens = numpy.array([2048, 4096, 8192])
        us = numpy.array([column.value({"tokens": int(count)}) for count in tokens])
        slope, start = numpy.polyfit(tokens / 1024, us, 1)
        distance = max(abs(us - (start + slope * tokens / 1024)) / us)
        rows.append([name, f"{start:.1f}", f"{slope:.1f}", f"{100 * distance:.1f} %"])
    return rows


def one_after_the_other() -> Cells:
    """What a product and an operation take alone, and the share that they save side by side."""
    rows = []
    for sms in ("32", "48", "64", "auto"):
        cells = [sms]
        for op in ("dispatch", "combine"):
            alone, product, both = (_beside(name, sms) for name in (op, "product", f"{op}+product"))
            saved = round(100 * (1 - both / (alone + product)))
            cells += [f"{alone + product:.0f}", f"{saved} %"]
        rows.append(cells)
    return rows


def _beside(op: str, sms: str) -> float:
    keys = {"backend": "fused", "case form": "whole", "op": op, "beside": None, "case sms": sms}
    return Column(BESIDE, "wiii", keys).value({})


def over_a_slow_link() -> Cells:
    lines = json_lines("rail_shaped_cpu.txt")
    return [[f"{line['topk']}", f"{line['rail_ms']:.0f}", f"{line['flat_ms']:.0f}"] for line in lines]


def hops() -> Cells:
    rows = []
    for line in json_lines("rail_one_gpu_h200.txt"):
        if line["tokens"] != 4096:
            continue
        for op in ("dispatch", "combine"):
            names = [f"inside: {op}", f"without network: {op}", f"network: {op}", op]
            names += [f"{op} in {chunks}" for chunks in (2, 4, 8)]
            times = [f"{line[name]:.0f}" if name in line else "" for name in names]
            rows.append([f"{line['domains']}, {line['tokens']}, {op}", *times])
    return rows


def beside_transformers() -> Cells:
    keys = ("layer", "layer_products", "block", "block_products")
    lines = [
        line
        for name in ("layer_beside_transformers_h200.txt", "layer_beside_transformers_h200x2.txt")
        for line in json_lines(name)
    ]
    return [[f"{line['ranks']}", f"{line['tokens']}", *(f"{line[key]:.0f}" for key in keys)] for line in lines]


WAYS = ("no_tensor", "raymoe", "raymoe_in_pool", "ray_nccl", "torch_nccl", "object_store")


def ray_tensors_ms(way: str, nbytes: int, shown: str = "us_p50") -> float:
    lines = [line for line in lines_of("ray_tensors_h100x2") if line["bytes"] == nbytes and line["way"] == way]
    assert len(lines) == 1, (way, nbytes)
    return float(lines[0][shown]) / 1000


def tensors_between_actors() -> Cells:
    """Medians of the calls, in ms."""
    rows = []
    for size, nbytes in (
        ("4 KiB", 2**12),
        ("1 MiB", 2**20),
        ("16 MiB", 2**24),
        ("64 MiB", 2**26),
        ("256 MiB", 2**28),
        ("1 GiB", 2**30),
    ):
        cells = [ray_tensors_ms(way, nbytes) for way in WAYS]
        rows.append([size, *(f"{ms:.1f}" if ms < 99.95 else f"{ms:.0f}" for ms in cells)])
    return rows


MODELS = {
    "deepseek_v3": "DeepSeek-V3, top-8 of 256",
    "qwen3": "Qwen3, top-8 of 128",
    "mixtral": "Mixtral, top-2 of 8",
    "gpt_oss": "gpt-oss, top-4 of 128",
}


def routers() -> Cells:
    lines = re.findall(r"^router (\w+) (\d+): ([\d.]+) us, torch.compile ([\d.]+) us", text_of("router_h200.txt"), re.M)
    rows = []
    for model, name in MODELS.items():
        ours, compiled = zip(*((us, other) for known, _, us, other in lines if known == model), strict=True)
        rows.append([name, *(f"{float(us):.1f}" for us in (*ours, *compiled))])
    return rows


def routers_of_two_systems() -> Cells:
    text = text_of("router_peers_h200.txt")
    return [list(found) for found in re.findall(r"^router \w+ (\d+): ([\d.]+) us, flashinfer ([\d.]+) us", text, re.M)]


def eager_calls() -> Cells:
    names = ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "swiglu with weights", "pointwise", "router")
    rows = []
    for name in names:
        line = re.search(rf"^{name}  +((?:[\d.]+ *){{10}})$", text_of("eager_rows_h100.txt"), re.M)
        assert line, name
        shown, _, weights = name.partition(" with ")
        cells = line[1].split()
        first = f"`{shown}`" if shown != "router" else shown
        rows.append([first + (f" with {weights}" if weights else ""), *cells[:3], *cells[6:9]])
    return rows


def eager_runs() -> Cells:
    """Three runs of two H200, and two of two H100, of calls of 128 tokens in a row."""
    rows = []
    for file, run, name in (
        ("eager_h200x2", "pwsz", "H200, `{}`"),
        ("eager_h200x2", "mato", "H200, `{}`, a minute later"),
        ("eager_h200x2", "lyah", "H200, `{}`"),
        ("eager_h100x2", "nfll", "H100, `{}`"),
        ("eager_h100x2", "zomd", "H100, `{}`, each rank bound to a half of the CPUs"),
    ):
        keys = {"backend": "fused", "tokens": 128, "l2": "warm"}
        calls = [Column(file, run, {**keys, "op": op}, shown="host_us_p50").value({}) for op in ("dispatch", "combine")]
        both = Column(file, run, {**keys, "op": "exchange"})
        line = both.lines({})[0]
        rows.append([date_of(line), name.format(line["commit"][:7]), *(f"{us:.1f}" for us in (*calls, both.value({})))])
    return rows


def bytes_of_8_bit_layers() -> Cells:
    """The memory of a rank's weights in layers whose parameters are on the device meta."""
    import torch

    from raymoe.exchange.spec import ExchangeSpec
    from raymoe.moe.layer_form import LayerForm, empty_parts

    def mib(spec: ExchangeSpec, ranks: int, ffn: int, shared: int, experts_dtype: str | None) -> float:
        form = LayerForm(ffn, shared=shared, norm=1e-6, experts_dtype=experts_dtype)
        parts = empty_parts(spec, form, spec.local_experts(ranks), torch.device("meta"))
        modules = parts.router, parts.experts, parts.shared, parts.norm
        return sum(each.nbytes for module in modules if module is not None for each in module.parameters()) / 2**20

    rows = []
    for model, ranks, hidden, experts, topk, ffn, shared in (
        ("DeepSeek-V3", 8, 7168, 256, 8, 2048, 2048),
        ("DeepSeek-V3, two ranks", 2, 7168, 256, 8, 2048, 2048),
        ("Qwen3-235B", 8, 4096, 128, 8, 1536, 0),
        ("Mixtral 8x22B", 8, 6144, 8, 2, 16384, 0),
    ):
        spec = ExchangeSpec(tokens=1, hidden=hidden, experts=experts, topk=topk)
        wide, scaled = (mib(spec, ranks, ffn, shared, dtype) for dtype in (None, "float8_e4m3"))
        rows.append([model, f"{wide:.1f}", f"{scaled:.1f}", f"{100 * scaled / wide:.1f} %"])
    return rows


LAYERS = (
    ("gpt-oss-120b, 4096", ("mgyt", "hynx"), 4096, "step", "≤ 0.80"),
    ("gpt-oss-120b, 4096 with gradients", ("ewjr", "mope"), 4096, "step", "≤ 0.60"),
    ("Qwen3-235B, 4096", ("pwls", "zczj"), 4096, "step", "≤ 0.92"),
    ("DeepSeek-V3, 4096", (("lbtr", "gwww"), ("ajbz", "yojt")), 4096, "step", "≤ 0.80"),
    ("DeepSeek-V3, 128", (("lbtr", "gwww"), ("ajbz", "yojt")), 128, "step", ""),
    ("DeepSeek-V3, 1", (("lbtr", "gwww"), ("ajbz", "yojt")), 1, "step", ""),
    ("DeepSeek-V3, 4096 with gradients", ("eiyg", "ajxs"), 4096, "step", "≤ 0.76"),
    ("of it `experts_backward`", ("eiyg", "ajxs"), 4096, "experts_backward", "≤ 0.72"),
    ("8 bits beside 16 of `96bc87d`, 4096", (("ajbz", "yojt"), "uwmy"), 4096, "step", ""),
    ("8 bits beside 16 of `96bc87d`, 128", (("ajbz", "yojt"), "uwmy"), 128, "step", ""),
    ("8 bits beside 16 of `96bc87d`, 1", (("ajbz", "yojt"), "uwmy"), 1, "step", ""),
)
"""Layers on two H100: the runs before and after, tokens, the part, and what was aimed at before there were kernels."""
BEFORE_8_BITS, WITH_8_BITS = ("etrd", "zhwj"), ("hebg", "bwrz")
LAYERS_OF_8_BITS = tuple(
    (str(count), (BEFORE_8_BITS, WITH_8_BITS), count, "step", aim)
    for count, aim in ((4096, "≤ 0.52"), (128, "≤ 0.58"), (1, "≤ 0.75"))
)
"""The same of DeepSeek-V3, each twice in turns."""
FILES = dict.fromkeys(("mgyt", "hynx", "ewjr", "mope", "pwls", "zczj", "uwmy"), "layer_models_h100x2")
FILES |= dict.fromkeys((*BEFORE_8_BITS, *WITH_8_BITS), "layer_fp8_h100x2")


def layers_before_and_after(layers: Sequence[Any] = LAYERS) -> Cells:
    def column(runs: str | tuple[str, ...], keys: Mapping[str, object], shown: str) -> Column:
        file = FILES.get(runs if isinstance(runs, str) else runs[0], "layer_products_h100x2")
        return Column(file, runs, {**keys, "l2": "cold"}, shown=shown)

    rows = []
    for name, runs, count, part, aim in layers:
        keys = {"tokens": count, "op": part}
        before, after = (column(of, keys, "us_p50").value({}) for of in runs)
        cells = [f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}", aim]
        for shown in ("bytes_peak", "bytes_kept"):
            columns = [column(of, keys, shown) for of in runs]
            there = part == "step" and columns[0].lines({})[0][shown] is not None
            cells += [f"{of.value({}) / 2**20:.0f}" if there else "" for of in columns]
        rows.append([name, *cells])
    return rows


def layers_of_8_bits() -> Cells:
    """Without what is kept for a backward pass."""
    return [row[:-2] for row in layers_before_and_after(LAYERS_OF_8_BITS)]


def shared_experts() -> Cells:
    """A shared expert of DeepSeek-V3 in 16 and in 8 bits, and what quantising its rows takes alone."""
    rows = []
    for line in json_lines("shared_fp8_h100.jsonl"):
        wide, scaled = line["us_wide"], line["us_scaled"]
        times = (wide, scaled, line["us_quantise"], line["us_quantise_torch"])
        rows.append([str(line["tokens"]), *(formatted(us) for us in times), f"{scaled / wide:.2f}"])
    return rows


PRODUCT_RUNS = {"uniform": "nysv", "equal": "ywys", "hot": "qqrn"}


def product_time(kind: str, op: str, system: str, rows: int) -> float:
    """The median of one product of benchmarks/bench_products_h100.jsonl."""
    keys = {"routing": kind, "op": op, "backend": system, "rows": rows}
    return Column("bench_products_h100", PRODUCT_RUNS[kind], keys).value({})


SYSTEMS = {"raymoe, 8 bits": "raymoe_fp8", "SwiGLU": "raymoe", "SwiGLU, 8-bit results": "raymoe_fp8_quantised"}
"""The names of the table that are no names of systems. Those with SwiGLU are of the operation `up_swiglu`."""
AIMS = (
    ("uniform", 1024, "grouped_mm", "raymoe", "≥ 1.08"),
    ("uniform", 512, "grouped_mm", "raymoe", "≥ 1.15"),
    ("uniform", 256, "grouped_mm", "raymoe", "≥ 1.35"),
    ("uniform", 128, "grouped_mm", "raymoe", "≥ 1.12"),
    ("uniform", 64, "grouped_mm", "raymoe", "≥ 1"),
    ("uniform", 32, "grouped_mm", "raymoe", "≥ 1"),
    ("uniform", 128, "copy", "raymoe", "≥ 0.88"),
    ("uniform", 64, "copy", "raymoe", "≥ 0.92"),
    ("uniform", 32, "copy", "raymoe", "≥ 0.92"),
    ("uniform", 512, "dense", "raymoe", "≥ 0.88"),
    ("uniform", 1024, "dense", "raymoe", "≥ 0.90"),
    ("equal", 512, "grouped_mm", "raymoe", "≥ 0.98"),
    ("equal", 1024, "grouped_mm", "raymoe", "≥ 0.98"),
    ("hot", 1024, "raymoe", "grouped_mm", "≤ 1.1"),
    ("uniform", 8, "SwiGLU", "raymoe", "≤ 1.02"),
    ("uniform", 512, "SwiGLU", "raymoe", "≤ 1.02"),
    ("equal", 512, "raymoe, 8 bits", "dense", "≤ 0.60, 0.57"),
    ("uniform", 256, "raymoe, 8 bits", "dense", "≤ 0.80"),
    ("uniform", 8, "raymoe, 8 bits", "raymoe", "≤ 0.53"),
    ("uniform", 16, "raymoe, 8 bits", "raymoe", "≤ 0.53"),
    ("uniform", 8, "half a copy", "raymoe, 8 bits", "≥ 0.90"),
    ("uniform", 16, "half a copy", "raymoe, 8 bits", "≥ 0.90"),
    ("uniform", 512, "SwiGLU, 8-bit results", "raymoe, 8 bits", "≤ 1.04"),
    ("uniform", 4096, "SwiGLU, 8-bit results", "raymoe, 8 bits", "≤ 1.04"),
    ("equal", 512, "SwiGLU, 8-bit results", "raymoe, 8 bits", "≤ 1.04"),
)
"""Ratios of two systems' times, by the kind and the number of rows, and what was aimed at before there were kernels."""


def product_ratios() -> Cells:
    def time(kind: str, op: str, system: str, rows: int) -> float:
        if system == "half a copy":
            return product_time(kind, op, "copy", rows) / 2
        op = "up_swiglu" if system.startswith("SwiGLU") else op
        return product_time(kind, op, SYSTEMS.get(system, system), rows)

    rows = []
    for kind, count, above, below, aim in AIMS:
        ops = ("up",) if above.startswith("SwiGLU") else ("up", "down")
        ratios = [f"{time(kind, op, above, count) / time(kind, op, below, count):.2f}" for op in ops]
        rows.append([f"{above} ÷ {below}", f"{kind}, {count}", *ratios, *[""] * (2 - len(ops)), aim])
    return rows


VLLM_WAYS = ("expert", "token", "own", "all-gather")
HOST_STEPS = {"torchtitan": "torchtitan_step_h200x2.txt", "Megatron-Core": "megatron_step_h200x2.txt"}
HOST_COLUMNS = (
    "{} all-gather",
    "{} all-to-all",
    "{} DeepEP",
    "raymoe",
    "raymoe, capacity 1.5",
    "raymoe, capacity 1.5, captured",
)


def host_steps(host: str) -> Mapping[str, Mapping[str, Any]]:
    """The lines of a framework's step, by the dispatcher."""
    return {line["host"]: line for line in json_lines(HOST_STEPS[host])}


def steps_of_hosts() -> Cells:
    """The median of a step in ms, and the range of all samples."""
    rows = []
    for host in HOST_STEPS:
        lines = host_steps(host)
        commit = re.search(r"commit ([0-9a-f]{7,})", text_of(HOST_STEPS[host]))
        assert commit, "the file names the commit of its lines"
        cells = [f"{host}, `{commit[1]}`"]
        for column in HOST_COLUMNS:
            line = lines.get(column.format(host.removesuffix("-Core")))
            ms = [] if line is None else [f"{line[f'us_{key}'] / 1000:.1f}" for key in ("p50", "min", "max")]
            cells.append("{} ({} to {})".format(*ms) if ms else "")
        rows.append(cells)
    return rows


def rows_of_vllm() -> Cells:
    """Medians in µs of the way to the experts and back, and to the experts alone, by layout and by NCCL's calls."""
    return [
        [str(line["tokens"])]
        + [f"{median(line['us'][f'{way}, {part}']):.1f}" for part in ("both", "bring") for way in VLLM_WAYS]
        for line in json_lines("vllm_rows_h100x2.jsonl")
    ]


def losses_of_training() -> Cells:
    """The losses of each way to run examples/train.py, and how far they are from those of the same model unsharded."""
    ways: dict[str, list[Mapping[str, Any]]] = {}
    for line in json_lines("train_losses_cpu.jsonl"):
        name = f"{line['ranks']}, {'DDP' if line['parallel'] == 'ddp' else 'FSDP2'}" + ", compiled" * line["compiled"]
        ways.setdefault(name + (f", went on at step {line['resumed']}" if line["resumed"] else ""), []).append(line)
    unsharded = {(line["unsharded"][0], line["unsharded"][-1]) for lines in ways.values() for line in lines}
    ((first, last),) = unsharded
    rows = [["unsharded", f"{first:.4f}", f"{last:.4f}", ""]]
    for name, lines in ways.items():
        losses, wanted = (numpy.array([line[key] for line in lines]) for key in ("losses", "unsharded"))
        rows.append([name, f"{losses[0][0]:.4f}", f"{losses[0][-1]:.4f}", f"{abs(losses - wanted).max():.0e}"])
    return rows


BESIDE_PRODUCTS, TOLD_COMBINES = "beside_products_h200x2.jsonl", "combine_beside_product_h200.jsonl"
FORMATS = {"bfloat16": "bf16", "float8_e4m3": "8 bits"}
ONES = {"deepseek_v3": "DeepSeek-V3", "narrow": "4096 wide"}


def beside_products(file: str = BESIDE_PRODUCTS) -> Cells:
    """What a product and an exchange of other rows take one after the other, and at least beside each other."""
    rows = []
    for line in json_lines(file):
        if "gain_us" not in line:
            continue
        name = f"{ONES[line['shape']]}, {FORMATS[line['dtype']]}, {line['op'].replace('+', ' + ')}"
        both = line["beside"][str(line["best_sms"])]["both_us"]
        gains = [line[key] for key in ("gain_us", "gain_in_parts_us", "gain_in_pieces_us", "bar_us")]
        times = [f"{line[key]:.0f}" for key in ("exchange_us", "product_us", "sum_us")]
        shown = ["" if each is None else f"{each:.0f}" for each in gains]
        rows.append([name, *times, f"{both:.0f}", str(line["best_sms"]), *shown])
    return rows


def beside_products_of_four() -> Cells:
    return beside_products("beside_products_h100x4.jsonl")


def combines_that_are_told() -> Cells:
    """A product that tells its combine, by the SMs that it leaves to it."""
    rows = []
    for line in json_lines(TOLD_COMBINES):
        if line["op"] == "combine+down":
            told = {sms: of_sms["told_us"] for sms, of_sms in line["beside"].items()}
            times = [line["exchange_us"], line["product_us"], line["sum_us"], *map(told.get, ("8", "16", "24"))]
            shown = ["" if each is None else f"{each:.0f}" for each in (*times, line["gain_told_us"], line["gain_us"])]
            rows.append([f"{line['ranks']}, {FORMATS[line['dtype']]}", *shown])
    return rows


DEEP_GEMM_RUNS = {"uniform": "ksgy", "equal": "okei"}


def deep_gemm_us(kind: str, op: str, system: str, rows: int) -> float:
    keys = {"op": op, "backend": system, "rows": rows, "case kind": kind}
    return Column("bench_products_h200", DEEP_GEMM_RUNS[kind], keys).value({})


def beside_deep_gemm() -> Cells:
    """Products of one run: raymoe, grouped_mm, DeepGEMM and cuBLAS, and both in 8 bits."""
    systems = ("raymoe", "grouped_mm", "deep_gemm", "cublas", "dense", "raymoe_fp8", "deep_gemm_fp8")
    rows = []
    for kind, counts in (("uniform", (64, 128, 256, 512, 1024)), ("equal", (256, 512))):
        for op in ("up", "down"):
            for count in counts:
                wrong = kind == "uniform" and count == 64  # DeepGEMM's masked product
                shown = ["" if wrong and each == "deep_gemm" else f"{deep_gemm_us(kind, op, each, count):.0f}"
                         for each in systems]  # fmt: skip
                rows.append([f"{kind}, {count}, `{op}`", *shown])
    return rows


def hidden_on_more_gpus() -> Cells:
    """The exchange, and what it could hide beside the product, by a model; on two GPUs as measured."""
    rows = []
    for line in json_lines(BESIDE_PRODUCTS):
        if "gain_us" not in line:
            continue
        name = f"{ONES[line['shape']]}, {FORMATS[line['dtype']]}, {line['op'].replace('+', ' + ')}"
        pairs = [f"{exchange_us(line, ranks):.0f}, {hidden_us(line, ranks):.0f}" for ranks in (MEASURED, *RANKS)]
        rows.append([name, f"{line['product_us']:.0f}", *pairs])
    return rows


def captured_layers() -> Cells:
    """A step of eight layers and what ran in one replay, in ms, on the rank where it is longer."""
    rows = []
    for line in json_lines(CAPTURED_LAYERS):
        replay = [max(rank[key] for rank in line["ranks_us"]) for key in ("traced", "sum", "union")]
        times = [median(line["eager_us"]), median(line["us"]), median(line["paced_us"]), *replay]
        ratios = [f"{line['traced_times_sum']:.3f}", f"{median(line['paced_us']) / replay[1]:.3f}"]
        ratios.append(f"{line['times_sum']:.3f}")
        rows.append([line["optimizer"], *(f"{us / 1e3:.2f}" for us in times), *ratios])
    return rows


FP8_FORWARD_PARTS = {
    "step": "step with gradients",
    "products": "forward's products, 16 bits",
    "products_fp8": "8 bits",
    "products_fp8_kept": "8 bits, gate and up kept in 16",
    "quantise_rows": "quantise rows",
    "convert_weights": "weights to 8 bits in one pass, no scales",
    "quantise_weights": "quantise weights by torch",
}


def fp8_forward() -> Cells:
    """The parts of a step, in µs, that 8 bits in the products of its forward pass would change."""
    (line,) = json_lines(FP8_FORWARD)
    return [[name, f"{median(line['us'][part]):.0f}"] for part, name in FP8_FORWARD_PARTS.items()]


DERIVED = [
    Derived("layer.md", "weights of a rank, MiB", bytes_of_8_bit_layers),
    Derived("frameworks.md", "host, commit, ms", steps_of_hosts),
    Derived("frameworks.md", "tokens of a rank", rows_of_vllm),
    Derived("training.md", "ranks, way", losses_of_training),
    Derived("evidence/scaling.md", "two H200, µs", lines_over_tokens),
    Derived("evidence/scaling.md", "on paper, µs", hidden_on_more_gpus),
    Derived("evidence/overlap.md", "`sms`", one_after_the_other),
    Derived("evidence/links.md", "ms", tensors_between_actors),
    Derived("evidence/domains.md", "top-k", over_a_slow_link),
    Derived("evidence/domains.md", "domains, tokens, operation", hops),
    Derived("evidence/layer.md", "H200, ranks", beside_transformers),
    Derived("evidence/layer.md", "two H100, tokens", layers_before_and_after),
    Derived("evidence/layer.md", "optimizer, ms", captured_layers),
    Derived("evidence/layer.md", "part of a step, µs", fp8_forward),
    Derived("evidence/layer.md", "8 bits on two H100, tokens", layers_of_8_bits),
    Derived("evidence/layer.md", "tokens, one H100", shared_experts),
    Derived("evidence/archive.md", "router, µs", routers),
    Derived("evidence/rows.md", "host µs of a call", eager_calls),
    Derived("evidence/experiments/backends.md", "date", eager_runs),
    Derived("evidence/experiments/beside_products.md", "two H200, µs", beside_products),
    Derived("evidence/experiments/beside_products.md", "four H100, µs", beside_products_of_four),
    Derived("evidence/comparison.md", "router, tokens", routers_of_two_systems),
    Derived("evidence/experiments/beside_products.md", "GPUs, experts", combines_that_are_told),
    Derived("evidence/experiments/products.md", "H200, mean rows", beside_deep_gemm),
    Derived("evidence/experiments/products.md", "ratio of times", product_ratios),
]
