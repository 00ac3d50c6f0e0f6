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
