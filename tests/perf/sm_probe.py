"""Measure what some SMs do at best: bulk loads and stores of rows, rows placed, rows added; alone and beside a link.

    python -m tests.perf.sm_probe --out benchmarks/sm_probe_h200x2.jsonl

Runs on GPU 0. With a second GPU it also pushes rows to that one, alone and while other SMs work. A case is a launch of
sm_probe.cu, one block to an SM. Each line has bytes a clock of an SM, loads and stores apart, the median over its
blocks; GB/s of all SMs together by events; and how many of the SMs share a TPC with another one. It takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from raymoe.cuda.jit import Compiler, KernelSource
from raymoe.cuda.params import U32, U64, Address, Params

HERE = Path(__file__).parent
MODES = {"load": 0, "store": 1, "place": 2, "add": 3}
THREADS, LEAVING = 512, 2
ROW = 14336
"""Bytes of a row of 7168 bfloat16."""
REPEATS = 7


@dataclass(frozen=True)
class ProbeParams(Params):
    """The struct of sm_probe.cu, which describes its fields."""

    source: Address
    target: Address
    results: Address
    source_rows: U64
    target_rows: U64
    mode: U32
    row_bytes: U32
    stages: U32
    warps: U32
    places: U32
    count: U32


PROBE = KernelSource("sm_probe", (ProbeParams,))


@contextmanager
def probe_compiler(name: str = "sm_probe") -> Iterator[Compiler]:
    """Yield a compiler of a source in this folder, with the headers of kernels/."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.cu").symlink_to(HERE / f"{name}.cu")
        (Path(folder) / "include").symlink_to(HERE.parent.parent / "kernels" / "include")
        yield Compiler(Path(folder))


@dataclass(frozen=True)
class Case:
    """A launch: what its warps do, with how many stages, on how many SMs."""

    mode: str
    sms: int
    warps: int
    stages: int
    """Of each warp."""
    row_bytes: int = ROW
    places: int = 1
    """Rows stored of each that is loaded; `add`: rows loaded of each that is stored."""
    to_peer: bool = False
    beside: Case | None = None
    """A launch that runs on other SMs at the same time, for longer."""
    cold: bool = True
    """The rows are more than the L2 cache holds."""

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block; the same sum as in sm_probe.cu.

        >>> Case("add", 8, warps=8, stages=5, row_bytes=4096).shared_bytes
        230400
        """
        leaving = LEAVING if self.mode == "add" else 0
        warp = (self.stages + leaving) * self.row_bytes + self.stages * 8
        return self.warps * -(-warp // 128) * 128

    def count(self, row_us: float = 0.3, us: float = 600) -> int:
        """Return the rows of a warp: those that an SM needs about so many microseconds for."""
        per_sm = us / row_us * ROW / self.row_bytes
        if self.mode in ("store", "place"):
            per_sm /= self.places
        rows = max(8, round(per_sm / self.warps))
        return rows - rows % self.places if self.mode == "add" else rows

    def bytes_of(self, rows: int) -> tuple[int, int]:
        """Return the bytes loaded and stored where so many rows are loaded, or stored from."""
        whole = rows * self.row_bytes
        if self.mode == "add":
            return whole, whole // self.places
        return whole * (self.mode != "store"), whole * self.places * (self.mode != "load")


SHAPES = ((1, 12), (2, 6), (4, 3), (7, 2))
"""Warps and stages of each that fit on an SM with whole rows."""
ADDED = ((8, 3584, 5), (8, 4096, 5), (8, 2048, 10), (16, 2048, 4), (16, 1792, 5), (12, 3584, 3))
"""Warps, bytes of a piece and stages, for rows that are added."""
PUSH = Case("place", 8, 4, 3, to_peer=True)


def cases(sms_of_gpu: int) -> Iterator[Case]:
    """Yield the cases without a link."""
    for sms in (1, 8, 16, 24, 48, 64, sms_of_gpu):
        for warps, stages in SHAPES:
            yield Case("load", sms, warps, stages)
            yield from (Case("store", sms, warps, stages, places=places) for places in (1, 2, 4))
            yield from (Case("place", sms, warps, stages, places=places) for places in (1, 2, 3, 4))
        for row_bytes, warps, stages in ((4096, 8, 6), (2048, 8, 12), (7168, 4, 7)):
            yield Case("load", sms, warps, stages, row_bytes)
            yield Case("place", sms, warps, stages, row_bytes, places=4)
        for warps, row_bytes, stages in ADDED:
            yield from (Case("add", sms, warps, stages, row_bytes, places) for places in (1, 4, 8))
    for sms in (8, 24):
        yield from (
            Case("load", sms, 4, 3, cold=False),
            Case("place", sms, 4, 3, places=4, cold=False),
            Case("add", sms, 8, 5, 3584, 4, cold=False),
        )


def linked_cases() -> Iterator[Case]:
    """Yield the cases with a second GPU."""
    for sms in (1, 2, 3, 4, 8, 16, 24, 48):
        yield from (Case("place", sms, warps, stages, to_peer=True) for warps, stages in SHAPES)
    for sms in (8, 16, 24, 48):
        yield Case("load", sms, 4, 3, beside=PUSH)
        yield from (Case("place", sms, 4, 3, places=places, beside=PUSH) for places in (1, 4))
        yield Case("add", sms, 8, 5, 3584, 4, beside=PUSH)


@dataclass
class Memory:
    """Rows to load from and to store to, and results, for launches that run at the same time."""

    device: Any
    peer: Any
    tensors: dict[str, Any] = field(default_factory=dict)

    def rows(self, name: str, row_bytes: int, device: Any, cold: bool) -> tuple[Any, int]:
        """Return memory and the number of its rows, a power of two."""
        import torch

        if name not in self.tensors:
            self.tensors[name] = torch.zeros(1 << 29, dtype=torch.uint8, device=device)
        most = len(self.tensors[name]) if cold else 16 << 20
        return self.tensors[name], 1 << (most // row_bytes).bit_length() - 1


class Probe:
    """Launches cases on GPU 0."""

    def __init__(self, compiler: Compiler) -> None:
        import torch

        from raymoe.cuda.gpu import Gpu
        from raymoe.cuda.launch import Kernels

        self.torch = torch
        self.gpu = Gpu.open(0)
        self.function = Kernels(self.gpu, compiler).function(PROBE)
        both = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
        self.peer = torch.device("cuda", 1) if both else None
        if self.peer is not None:  # torch lets kernels reach the peer when it first copies there
            torch.zeros(1, device=self.peer).copy_(torch.ones(1, device="cuda:0"))
        self.memory = Memory(torch.device("cuda", 0), self.peer)

    def launch(self, case: Case, role: str, count: int) -> tuple[Any, Any]:
        """Return a launch and its results."""
        from raymoe.cuda.launch import Launch, Shape

        target_device = self.peer if case.to_peer else self.memory.device
        source, source_rows = self.memory.rows(f"{role} source", case.row_bytes, self.memory.device, case.cold)
        place = "peer" if case.to_peer else "target"
        target, target_rows = self.memory.rows(f"{role} {place}", case.row_bytes, target_device, case.cold)
        results = self.torch.zeros(case.sms, 4, dtype=self.torch.int64, device=self.memory.device)
        params = ProbeParams(
            source=source.data_ptr(),
            target=target.data_ptr(),
            results=results.data_ptr(),
            source_rows=source_rows,
            target_rows=target_rows,
            mode=MODES[case.mode],
            row_bytes=case.row_bytes,
            stages=case.stages,
            warps=case.warps,
            places=case.places,
            count=count,
        )
        # Blocks take all shared memory of an SM, so that launches side by side share none.
        shape = Shape(case.sms, THREADS, self.function.max_dynamic_shared)
        return Launch(self.function, shape, params, waits=False), results

    def measured(self, case: Case) -> dict[str, Any]:
        """Run the case and return its line."""
        torch = self.torch
        count = case.count()
        launch, results = self.launch(case, "main", count)
        other, beside = None, None
        if case.beside is not None:
            other, beside = self.launch(case.beside, "beside", case.beside.count(us=1200))
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        times, clocks, speeds = [], [], []
        for repeat in range(REPEATS + 2):
            torch.cuda.synchronize()
            if other is not None:
                other(streams[1].cuda_stream)
                torch.cuda._sleep(100_000)  # so that the other launch has begun
                torch.cuda.current_stream().synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(streams[0])
            launch(streams[0].cuda_stream)
            end.record(streams[0])
            torch.cuda.synchronize()
            if repeat >= 2:
                times.append(begin.elapsed_time(end) * 1000)
                clocks.append(median(results[:, 0].tolist()))
                speeds.append(float((results[:, 0] / results[:, 1]).median()))
        loaded, stored = case.bytes_of(case.warps * count)
        sms = results[:, 2].tolist()
        us, clock = median(times), median(clocks)
        line = {
            **asdict(case),
            "count": count,
            "us": round(us, 1),
            "loaded_a_clock": round(loaded / clock, 1),
            "stored_a_clock": round(stored / clock, 1),
            "loaded_gbps": round(loaded * case.sms / us / 1e3, 1),
            "stored_gbps": round(stored * case.sms / us / 1e3, 1),
            "ghz": round(median(speeds), 3),
            "sms_with_neighbour": sum((sm ^ 1) in sms for sm in sms),
            "gpu": self.gpu.name,
        }
        if beside is not None and case.beside is not None:
            line["beside_gbps"] = round(
                case.beside.bytes_of(case.beside.warps * case.beside.count(us=1200))[1]
                * case.beside.sms
                / float(beside[:, 1].max()),
                1,
            )
        return line


HEAD = ("mode", "sms", "warps", "stages", "row_bytes", "places", "to_peer", "cold")
NUMBERS = ("us", "loaded_a_clock", "stored_a_clock", "loaded_gbps", "stored_gbps", "ghz", "sms_with_neighbour")


def row_of(line: dict[str, Any]) -> str:
    """Return the line as a row of the table."""
    beside = f"beside a push at {line['beside_gbps']} GB/s" if "beside_gbps" in line else ""
    return " ".join(f"{line[key]!s:>9}" for key in (*HEAD, *NUMBERS)) + f" {beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw lines")
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=sorted(MODES))
    arguments = parser.parse_args()
    with probe_compiler() as compiler:
        probe = Probe(compiler)
        wanted = [*cases(probe.gpu.sms), *(linked_cases() if probe.peer is not None else ())]
        wanted = [case for case in wanted if case.mode in arguments.modes]
        out = arguments.out.open("a") if arguments.out else None
        print(" ".join(f"{key[:9]:>9}" for key in (*HEAD, *NUMBERS)), flush=True)
        for case in wanted:
            if case.shared_bytes > probe.function.max_dynamic_shared:
                print(f"left out, {case.shared_bytes} bytes of shared memory: {case}", file=sys.stderr)
                continue
            line = probe.measured(case)
            print(row_of(line), flush=True)
            if out is not None:
                print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
