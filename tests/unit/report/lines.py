"""Result lines for tests of the report, with the columns of real workloads."""

from raymoe.report.results import Line, complete

SHAPE = {"ranks": 4, "tokens": 512, "hidden": 1024, "experts": 32, "topk": 4, "dtype": "bfloat16", "wire": "bfloat16"}
LOAD = [128.0, 32.0, 0.0, 96.0] * 8
"""Rows of 32 experts, of 4 tokens x 512 on each of 4 ranks; 8 experts have none."""
SETTING = {"routing": "uniform", "seed": 0, "layout": "expert", "alignment": 16, "padding": "any", "device": "cpu"}


def complete_line(measured: dict[str, object], run: str = "quick-1") -> Line:
    return complete(measured, run=run, generation=0, commit="0123456789ab")


def exchange_case(backend: str, us: float, run: str = "quick-1") -> list[Line]:
    times = {"dispatch": 0.4 * us, "combine": 0.6 * us, "exchange": us}
    return [
        complete_line(
            {
                "case": f"backend={backend}",
                "workload": "exchange",
                "op": op,
                "backend": backend,
                **SHAPE,
                **SETTING,
                "samples": 50,
                "us_p50": t,
                "us_p99": 2 * t,
                "us_min": t / 2,
                "us_max": 3 * t,
                "bytes_wire": 1234567,
                "gbps_wire": 3.21,
                "verified": True,
                "max_error": 1.25e-3,
                "expert_load_imbalance": 2.0,
                "expert_load": LOAD if op == "dispatch" else None,
            },
            run,
        )
        for op, t in times.items()
    ]


def slow_case(case: str = "backend=slow") -> list[Line]:
    """Return a dispatch whose second step was slow on rank 1, with the rows of the busiest rank."""
    (line, *_) = exchange_case("slow", 500.0)
    tail = {"us_p99": 2000.0, "us_by_rank": [[190.0, 250.0], [195.0, 2000.0]], "samples": 4, "case": case}
    tail |= {"us_over_steps": [200.0, 2000.0, 200.0, 210.0], "gbps_link": 4.0}
    return [line | tail | {"rows_busiest": 2500, "rows_capacity": 8320}]


def copy_case() -> list[Line]:
    return [
        complete_line(
            {
                "case": "default",
                "workload": "p2p",
                "op": "copy",
                "transport": "host",
                "pattern": "pairs",
                "src": src,
                "dst": 1 - src,
                "bytes": size,
                "ranks": 2,
                "device": "cpu",
                "samples": 50,
                "us_p50": size / 1e4,
                "us_p99": size / 5e3,
                "us_min": 0.1,
                "us_max": size / 1e3,
                "bytes_wire": size,
                "gbps_wire": 10.0,
                "verified": True,
                "max_error": 0.0,
            }
        )
        for size in (4096, 2**28)
        for src in (0, 1)
    ]


def traced_exchange(tokens: tuple[int, ...] = (1, 4096)) -> list[Line]:
    """Return lines of `fused` with invented timelines; a single token has fewer points."""
    lines = gpu_exchange("fused", 8.0, tokens)
    for line in lines:
        count = int(str(line["tokens"]))
        names = DISPATCH_POINTS if line["op"] == "dispatch" else COMBINE_POINTS
        if line["l2"] == "cold" and line["op"] != "exchange":
            points = [
                [name, *(round(at + share * count / 8, 1) for at, share in times)]
                for name, times in names.items()
                if count > 1 or name not in ("arrived", "planned")
            ]
            line["timeline"] = sorted(points, key=lambda point: point[2])
    return lines


# For the first, the median and the last block: microseconds without tokens, and the share of the rows' time.
DISPATCH_POINTS = {
    "start": ((0.0, 0), (0.4, 0), (1.1, 0)),
    "first push": ((2.4, 0), (3.0, 0.01), (3.6, 0.02)),
    "last push": ((3.0, 0.78), (3.8, 0.9), (4.9, 0.94)),
    "arrived": ((3.4, 0.79), (4.3, 0.91), (5.4, 0.95)),
    "said done": ((3.5, 0.79), (4.4, 0.91), (5.5, 0.95)),
    "entries published": ((1.6, 0.02), (2.0, 0.02), (2.8, 0.025)),
    "counts": ((3.9, 0.03), (4.1, 0.04), (4.6, 0.045)),
    "planned": ((4.5, 0.05), (4.9, 0.06), (5.5, 0.065)),
    "first row": ((4.6, 0.05), (5.0, 0.06), (5.9, 0.07)),
    "last row": ((4.7, 0.6), (5.4, 0.93), (6.3, 0.95)),
    "placed": ((4.9, 0.62), (5.8, 0.93), (6.8, 0.97)),
    "end": ((3.6, 0.62), (6.0, 0.92), (7.0, 0.97)),
    "all awaited": ((7.3, 0.97), (7.3, 0.97), (7.3, 0.97)),
}
COMBINE_POINTS = {
    name: times for name, times in DISPATCH_POINTS.items() if name not in ("entries published", "planned")
}


GPU_SHAPE = {"ranks": 4, "hidden": 7168, "experts": 256, "topk": 8, "dtype": "bfloat16", "wire": "bfloat16"}
LEFT_OUT = "routing, counts"
ROW_BYTES = 14336


def gpu_exchange(backend: str, us: float, tokens: tuple[int, ...] = (128, 4096), **keys: object) -> list[Line]:
    """Return lines of an exchange between GPUs that takes `us` plus 1/8 microsecond for each token."""
    push = backend == "row_push"
    setting = {**GPU_SHAPE, **SETTING, "device": "NVIDIA H200", "samples": 50, "graph": backend != "collective"}
    lines = []
    for count in tokens:
        for op in ("dispatch",) if push else ("dispatch", "combine", "exchange"):
            for l2 in ("cold", "warm"):
                time = (us + count / 8) * (2 if op == "exchange" else 1) - (l2 == "warm")
                measured = {"op": op, "l2": l2, "us_p50": time, "gbps_wire": 2.5 * ROW_BYTES * count / time / 1e3}
                known = {
                    "workload": "exchange",
                    "backend": backend,
                    "tokens": count,
                    "bytes_wire": 10 * ROW_BYTES * count,
                }
                known |= {"sms": 12 if push else 132, "leaves_out": LEFT_OUT if push else None}
                known |= {"verified": None if push else True, "max_error": None if push else 4e-3}
                case = f"backend={backend},tokens={count}"
                lines.append(complete_line({"case": case, **setting, **known, **measured, **keys}))
    return lines


SYSTEM_GBPS = {
    "raymoe": 3900.0,
    "in_turn": 2000.0,
    "eager": 1000.0,
    "compile": 2500.0,
    "copy": 4000.0,
    "own_copy": 4080.0,
}


def rows_case(op: str = "rms_norm", tokens: int = 4096, **asked: int) -> list[Line]:
    """Return the lines of a case of workload pointwise. Each system has its rate of SYSTEM_GBPS; raymoe, with few SMs
    or stages, has less. One system is skipped."""
    words = {"op": op, "tokens": tokens, **asked}
    nbytes = tokens * 7168 * 4
    shared = {
        "case": ",".join(f"{key}={value}" for key, value in words.items()),
        "workload": "pointwise",
        "op": op,
        "ranks": 1,
        "tokens": tokens,
        "hidden": 7168,
        "dtype": "bfloat16",
        "device": "NVIDIA H200",
        "graph": True,
        "l2": "cold",
    }
    lines = []
    for system, most in SYSTEM_GBPS.items():
        few = min(1.0, asked.get("sms", 132) / 100) * min(1.0, asked.get("stages", 4) / 4)
        gbps = most * few if system == "raymoe" else most * min(1.0, asked.get("sms", 132) / 132)
        gbps = gbps if system in ("raymoe", "in_turn") else most
        times = {"samples": 20, "us_p50": nbytes / gbps / 1e3, "bytes_memory": nbytes, "gbps_memory": gbps}
        limits = asked if system == "raymoe" else {"sms": asked.get("sms")} if system == "in_turn" else {}
        lines.append(complete_line({**shared, **limits, **times, "backend": system, "verified": True}))
    lines.append(complete_line({**shared, "backend": "quack", "samples": 0, "skipped": "Quack cannot be imported"}))
    return lines
