"""Result lines for tests of the report, shaped like those of real workloads."""

from raymoe.report.results import Line, complete

SHAPE = {"ranks": 4, "tokens": 512, "hidden": 1024, "experts": 32, "topk": 4, "dtype": "bfloat16", "wire": "bfloat16"}
SETTING = {"routing": "uniform", "seed": 0, "layout": "expert", "alignment": 16, "padding": "any", "device": "cpu"}


def whole(measured: dict[str, object], run: str = "quick-1") -> Line:
    return complete(measured, run=run, generation=0, commit="0123456789ab")


def exchange_case(backend: str, us: float, run: str = "quick-1") -> list[Line]:
    times = {"dispatch": 0.4 * us, "combine": 0.6 * us, "exchange": us}
    return [
        whole(
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
            },
            run,
        )
        for op, t in times.items()
    ]


def copy_case() -> list[Line]:
    return [
        whole(
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


GPU_SHAPE = {"ranks": 4, "hidden": 7168, "experts": 256, "topk": 8, "dtype": "bfloat16", "wire": "bfloat16"}
LEFT_OUT = "routing, counts"
ROW_BYTES = 14336


def gpu_exchange(backend: str, us: float, tokens: tuple[int, ...] = (128, 4096), **keys: object) -> list[Line]:
    """Lines of an exchange between GPUs that takes `us` and 1/8 of a microsecond for each token."""
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
                lines.append(whole({"case": case, **setting, **known, **measured, **keys}))
    return lines
