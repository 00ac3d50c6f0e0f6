"""Probe what products of experts meet on a Hopper GPU: ways to load operands, the L2 cache, clocks, early launches.

    python -m tests.perf.product_probes --out benchmarks/product_probes_h100.txt

Runs on GPU 0 in less than a minute. Each line of JSON is a result, after a line that says what its probe asks.
product_probes.cu describes the kernels. Where a probe says `right`, results are those of torch, to the bit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Launch, Shape, SizedLaunch
from raymoe.cuda.params import U32, Address, Params
from raymoe.cuda.tensor_map import EncodedMap, TensorMap
from raymoe.errors import RaymoeError
from tests.perf.sm_probe import probe_compiler

THREADS, MOST_STAGES, STAGE_MEMORY = 384, 8, 226 * 1024
COLUMNS, OUTPUTS, TOKENS, STEP = 1024, 2048, 2048, 64
"""Of all weights and tokens, which are 12 MiB; of a step."""
WEIGHTS = {"none": 0, "rows": 1, "halves": 2, "turns": 3}
TOKEN_WAYS = {"none": 0, "boxes": 1, "one_row": 2, "cp_async": 3}
SHAPES = ((128, 64), (128, 128), (128, 136), (128, 176), (128, 256))
TALL_SHAPES = ((256, 64), (256, 96), (256, 128), (256, 136), (256, 176))
REPEATS, DROPPED = 12, 4
MACS_A_CLOCK = 2048
"""Multiplications of an SM's tensor cores."""

ASKS = {
    "l2": "How many bytes a clock does each SM get from the L2 cache while all multiply tiles of a shape?",
    "turns": "Does the driver take a map of five dimensions with unordered strides, and do its boxes cost more?",
    "early": "When does a kernel begin after the one before it, by a programmatic dependent launch and without?",
    "sustained": "At which rate does a dense product go on for seconds, and does a product of experts keep its ratio?",
    "gather": "How many bytes a clock does an SM load of scattered tokens, alone and beside wgmma, in three ways?",
}


@dataclass(frozen=True)
class StreamParams(Params):
    """The struct of product_probes.cu, which describes its fields."""

    rows: EncodedMap
    turns: EncodedMap
    tokens: Annotated[tuple[EncodedMap, ...], EncodedMap.array(5)]
    x: Address
    order: Address
    results: Address
    sums: Address
    outputs: U32
    columns: U32
    steps: U32
    load_weights: U32
    load_tokens: U32
    multiplies: U32
    unused: Annotated[tuple[int, ...], ctypes.c_uint64 * 1] = (0,)


@dataclass(frozen=True)
class LinkParams(Params):
    """The struct of product_probes.cu, which describes its fields."""

    results: Address
    clocks: U32
    lets: U32
    waits: U32
    unused: U32 = 0


PROBES = KernelSource("product_probes", (StreamParams, LinkParams, EncodedMap))


@dataclass(frozen=True)
class Case:
    """A launch of `stream`: the shape of its tiles, how many SMs, what they load, and whether they multiply."""

    weights_tile: int
    tokens_tile: int
    sms: int
    weights: str
    tokens: str
    multiplies: bool

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block; the same sum as in product_probes.cu.

        >>> Case(256, 176, 1, "rows", "boxes", True).shared_bytes
        221952
        """
        stage = (self.weights_tile + self.tokens_tile) * STEP * 2
        return min(MOST_STAGES, STAGE_MEMORY // stage) * (stage + 16) + self.tokens_tile * 4

    @property
    def step_bytes(self) -> int:
        """The bytes that a step loads."""
        rows = self.weights_tile * (self.weights != "none") + self.tokens_tile * (self.tokens != "none")
        return rows * STEP * 2

    @property
    def step_clocks(self) -> float:
        """The clocks of a step at the full rate of the tensor cores.

        >>> Case(256, 128, 1, "rows", "boxes", True).step_clocks
        1024.0
        """
        return self.weights_tile * self.tokens_tile * STEP / MACS_A_CLOCK

    @property
    def steps(self) -> int:
        """Steps of a launch: about one to two milliseconds."""
        clocks = max(self.step_clocks if self.multiplies else 0, self.step_bytes / 50)
        return round(2e6 / clocks)


class Streams:
    """Launches cases on weights and tokens that the L2 cache holds."""

    def __init__(self, kernels: Any) -> None:
        import torch

        self.torch, self.kernels, self.sms = torch, kernels, kernels.gpu.sms
        self.random = torch.Generator("cuda").manual_seed(0)
        self.order = torch.randperm(TOKENS, device="cuda", generator=self.random).int()
        self.weights = torch.empty(2 * OUTPUTS, COLUMNS, dtype=torch.bfloat16, device="cuda")
        self.tokens = torch.empty(TOKENS, COLUMNS, dtype=torch.bfloat16, device="cuda")
        self.weights.normal_(generator=self.random)
        self.tokens.normal_(generator=self.random)

    def maps(self) -> tuple[TensorMap, TensorMap, tuple[TensorMap, ...]]:
        """Return the maps of the weights by rows and with turns, and of the tokens by boxes of 64, 32, 16, 8 and 1."""
        at, row = self.weights.data_ptr(), COLUMNS * 2
        rows = TensorMap(at, (COLUMNS, 2 * OUTPUTS, 1), (row, 2 * OUTPUTS * row), (STEP, 128, 1))
        strides = row, OUTPUTS * row, 8 * row, 2 * OUTPUTS * row
        turns = TensorMap(at, (COLUMNS, 8, 2, OUTPUTS // 8, 1), strides, (STEP, 8, 2, 8, 1))
        x = self.tokens.data_ptr()
        boxes = (TensorMap(x, (COLUMNS, TOKENS), (row,), (STEP, box_rows)) for box_rows in (64, 32, 16, 8, 1))
        return rows, turns, tuple(boxes)

    def launch(self, case: Case, steps: int, sums: Any = None) -> Launch:
        rows, turns, tokens = self.maps()
        params = StreamParams(
            rows=rows.encoded(),
            turns=turns.encoded(),
            tokens=tuple(each.encoded() for each in tokens),
            x=self.tokens.data_ptr(),
            order=self.order.data_ptr(),
            results=0,
            sums=0 if sums is None else sums.data_ptr(),
            outputs=OUTPUTS,
            columns=COLUMNS,
            steps=steps,
            load_weights=WEIGHTS[case.weights],
            load_tokens=TOKEN_WAYS[case.tokens],
            multiplies=case.multiplies,
        )
        function = self.kernels.function(PROBES, f"stream_{case.weights_tile}_{case.tokens_tile}")
        return Launch(function, Shape(case.sms, THREADS, case.shared_bytes), params, waits=False)

    def measured(self, case: Case) -> dict[str, Any]:
        """Launch the case some times, one right after the other, and return its line."""
        torch = self.torch
        results = torch.zeros(REPEATS, case.sms, 4, dtype=torch.int64, device="cuda")
        launch = self.launch(case, case.steps)
        for repeat in results:
            launch(torch.cuda.current_stream().cuda_stream, results=repeat)
        torch.cuda.synchronize()
        clocks, ns = (results[DROPPED:, :, word].double() for word in range(2))
        step = float(clocks.median()) / case.steps
        return {
            **asdict(case),
            "clocks_a_step": round(step, 1),
            "bytes_a_clock": round(case.step_bytes / step, 1),
            "wanted_a_clock": round(case.step_bytes / case.step_clocks, 1) if case.multiplies else None,
            "of_tensor_rate": round(case.step_clocks / step, 3) if case.multiplies else None,
            "ghz": round(float((clocks / ns).median()), 3),
        }

    def right(self, case: Case) -> bool:
        """Whether the products of small integers are those of torch. One pass over the columns, exact sums."""
        torch = self.torch
        for tensor in (self.weights, self.tokens):
            tensor.copy_(torch.randint(-2, 3, tensor.shape, device="cuda", generator=self.random))
        rows, columns = case.weights_tile, case.tokens_tile
        sums = torch.zeros(case.sms, rows, columns, device="cuda")
        launch = self.launch(case, COLUMNS // STEP, sums)
        results = torch.zeros(case.sms, 4, dtype=torch.int64, device="cuda")
        launch(torch.cuda.current_stream().cuda_stream, results=results)
        wanted = torch.stack([self._product(case, block) for block in range(case.sms)])
        same = torch.equal(sums, wanted)
        self.weights.normal_(generator=self.random)
        self.tokens.normal_(generator=self.random)
        return bool(same)

    def _product(self, case: Case, block: int) -> Any:
        torch, rows = self.torch, case.weights_tile
        tiles = 2 * OUTPUTS // rows
        tile, first = block % tiles, block // tiles * case.tokens_tile
        if case.weights == "turns":
            both = self.weights.view(2, OUTPUTS // 8, 8, COLUMNS).transpose(0, 1).reshape(2 * OUTPUTS, COLUMNS)
            weights = both[tile * rows :][:rows]
        elif case.weights == "halves":
            weights = torch.cat([half[tile * 128 :][:128] for half in self.weights.split(OUTPUTS)])
        else:
            weights = self.weights[tile * rows :][:rows]
        chosen = slice(first, first + case.tokens_tile)
        tokens = self.tokens[chosen] if case.tokens == "boxes" else self.tokens[self.order[chosen].long()]
        return (weights.double() @ tokens.double().T).float()


def probe_turns(streams: Streams) -> Iterator[dict[str, Any]]:
    """Yield lines of gate and up rows: two boxes of 128 rows, or two of 64 and 64 rows that take turns."""
    for ways in ("halves", "turns"):
        yield {"weights": ways, "right": streams.right(Case(256, 128, 20, ways, "boxes", True))}
    for tokens_tile in (64, 128, 176):
        for ways in ("halves", "turns"):
            yield streams.measured(Case(256, tokens_tile, streams.sms, ways, "none", False))
            yield streams.measured(Case(256, tokens_tile, streams.sms, ways, "boxes", True))


def probe_gather(streams: Streams) -> Iterator[dict[str, Any]]:
    """Yield lines of the ways to load tokens: alone, and with the weights beside wgmma."""
    ways = "boxes", "one_row", "cp_async"
    for way in ways:
        yield {"tokens": way, "right": streams.right(Case(256, 136, 20, "rows", way, True))}
    for sms in (1, streams.sms):
        for shape in ((128, 256), (256, 128), (256, 176)):
            yield from (streams.measured(Case(*shape, sms, "none", way, False)) for way in ways)
            yield from (streams.measured(Case(*shape, sms, "none", way, True)) for way in ways)
            yield from (streams.measured(Case(*shape, sms, "rows", way, True)) for way in ways)


def probe_l2(streams: Streams) -> Iterator[dict[str, Any]]:
    """Yield lines of all SMs: loads alone, products alone, and both."""
    for shape in (*SHAPES, *TALL_SHAPES):
        yield streams.measured(Case(*shape, streams.sms, "rows", "boxes", False))
        yield streams.measured(Case(*shape, streams.sms, "none", "none", True))
        yield streams.measured(Case(*shape, streams.sms, "rows", "boxes", True))


class Link:
    """Launches of `link` by one of both ways, with results of their own."""

    def __init__(self, kernels: Any, early: bool, params: LinkParams, shape: Shape) -> None:
        import torch

        self.launch = SizedLaunch(kernels.function(PROBES, "link"), early=early)
        self.shape = shape
        self.results = torch.zeros(shape.blocks, 6, dtype=torch.int64, device="cuda")
        self.fields = params.packed()
        self.fields.results = self.results.data_ptr()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.fields))
        self.launch.check(shape, params)

    def __call__(self, stream: int) -> None:
        block = self.shape.threads, self.shape.shared_bytes
        with self.launch.lock:
            self.launch.enqueue(stream, ctypes.addressof(self._pointers), self.shape.blocks, block)


def repeated(torch: Any, captured: bool, work: Callable[[int], None]) -> Callable[[], None]:
    """Return a call that enqueues the work after a pause of the GPU, so that no launch is late."""
    stream = torch.cuda.Stream()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work(stream.cuda_stream)

    def again() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            if captured:
                graph.replay()
            else:
                work(stream.cuda_stream)

    return again


def probe_early(kernels: Any) -> Iterator[dict[str, Any]]:
    """Yield lines of pairs of kernels, and of chains of 200 empty ones."""
    import torch

    sms, most = kernels.gpu.sms, kernels.function(PROBES, "link").max_dynamic_shared
    rooms = {"free SMs": (sms // 2, most), "room on its SMs": (sms, 0), "none": (sms, most)}
    for captured in (False, True):
        for room, (blocks, shared) in rooms.items():
            for early in (False, True):
                shape = Shape(blocks, THREADS, shared)
                first = Link(kernels, False, LinkParams(0, 40_000, early, False), shape)
                second = Link(kernels, early, LinkParams(0, 4_000, False, early), shape)

                def pair(stream: int, first: Link = first, second: Link = second) -> None:
                    first(stream)
                    second(stream)

                again, samples = repeated(torch, captured, pair), []
                for _ in range(24):
                    again()
                    torch.cuda.synchronize()
                    samples.append((first.results.tolist(), second.results.tolist()))
                samples = samples[DROPPED:]
                yield {
                    "captured": captured,
                    "room": room,
                    "early": early,
                    "begins_after_let_us": us_between(samples, 1, 0) if early else None,
                    "begins_after_end_us": us_between(samples, 3, 0),
                    "works_after_end_us": us_between(samples, 3, 2),
                }
    for captured in (False, True):
        for early in (False, True):
            link = Link(kernels, early, LinkParams(0, 0, early, early), Shape(sms, THREADS, 0))
            yield {"captured": captured, "early": early, "us_of_empty_kernel": us_of_chain(torch, captured, link)}


def us_between(samples: list[Any], first_word: int, second_word: int) -> float:
    """Return the time from the last block's `first_word` of the first kernel to the other's first `second_word`."""
    times = (
        min(block[second_word] for block in second) - max(block[first_word] for block in first)
        for first, second in samples
    )
    return round(median(times) / 1000, 2)


def us_of_chain(torch: Any, captured: bool, link: Link, length: int = 200) -> float:
    """Return the time of a kernel in a chain of many, by events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    stream = torch.cuda.Stream()

    def chain() -> None:
        for _ in range(length):
            link(stream.cuda_stream)

    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph, stream=stream):
            chain()
    times = []
    for _ in range(7):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            events[0].record(stream)
            graph.replay() if captured else chain()
            events[1].record(stream)
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1000 / length)
    return round(median(times), 2)


def probe_sustained(kernels: Any, seconds: float = 2.0) -> Iterator[dict[str, Any]]:
    """Yield lines of torch.mm, of a product of experts with as much work, and of torch.mm again; each after a pause."""
    import torch

    from raymoe.moe import grouped_linear

    random = torch.Generator("cuda").manual_seed(0)
    experts, rows, H, N = 64, 512, 7168, 4096
    x = torch.randn(experts * rows, H, device="cuda", dtype=torch.bfloat16, generator=random)
    weight = torch.empty(experts, N, H, device="cuda", dtype=torch.bfloat16).normal_(std=0.02, generator=random)
    counts = torch.full((experts,), rows, dtype=torch.int32, device="cuda")
    offsets = torch.arange(0, experts + 1, dtype=torch.int32, device="cuda") * rows
    y = torch.empty(experts * rows, N, device="cuda", dtype=torch.bfloat16)
    work = {
        "torch.mm": lambda: torch.mm(x, weight[0].T, out=y),
        "grouped_linear": lambda: grouped_linear(x, weight, offsets, counts),
    }
    flops, stream = 2 * experts * rows * H * N, torch.cuda.current_stream()
    clock = Link(kernels, False, LinkParams(0, 60_000, False, False), Shape(1, THREADS, 0))
    for name in ("torch.mm", "grouped_linear", "torch.mm"):
        work[name]()
        torch.cuda.synchronize()
        time.sleep(1)
        batches, batch = round(seconds / 0.027), 10
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(batches)]
        clocks = []
        for begin, end in events:
            begin.record()
            for _ in range(batch):
                work[name]()
            end.record()
            clock(stream.cuda_stream)
            clocks.append(clock.results.clone())
        torch.cuda.synchronize()
        tflops = [flops * batch / begin.elapsed_time(end) / 1e9 for begin, end in events]
        ghz = [float(each[0, 4] / (each[0, 3] - each[0, 2])) for each in clocks]
        after = [events[0][0].elapsed_time(end) / 1000 for _, end in events]
        late = len(after) // 2
        for i in sorted({0, 1, 3, 9, 19, 39, batches - 1} & set(range(batches))):
            yield {"work": name, "until_s": round(after[i], 3), "tflops": round(tflops[i]), "ghz": round(ghz[i], 3)}
        yield {
            "work": name,
            "from_s": round(after[late], 2),
            "until_s": round(after[-1], 2),
            "tflops": round(median(tflops[late:])),
            "ghz": round(median(ghz[late:]), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the raw lines")
    parser.add_argument("--probes", nargs="+", choices=list(ASKS), default=list(ASKS))
    arguments = parser.parse_args()
    from raymoe.cuda.gpu import Gpu
    from raymoe.cuda.launch import Kernels

    out = arguments.out.open("a") if arguments.out else None

    def tell(line: str) -> None:
        print(line, flush=True)
        if out is not None:
            print(line, file=out, flush=True)

    with probe_compiler("product_probes") as compiler:
        kernels = Kernels(Gpu.open(0), compiler)
        tell(f"# {kernels.gpu.name}")
        streams = Streams(kernels)
        for name in arguments.probes:
            tell(f"# {name}: {ASKS[name]}")
            begun = time.monotonic()
            probe = {
                "turns": lambda: probe_turns(streams),
                "gather": lambda: probe_gather(streams),
                "l2": lambda: probe_l2(streams),
                "early": lambda: probe_early(kernels),
                "sustained": lambda: probe_sustained(kernels),
            }[name]
            try:
                for line in probe():
                    tell(json.dumps({"probe": name, **line}))
            except (RaymoeError, RuntimeError) as error:  # the other probes are still wanted
                tell(f"# {name} ended early: {type(error).__name__}: {error}")
            tell(f"# {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
