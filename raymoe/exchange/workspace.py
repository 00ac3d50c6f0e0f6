"""Slots, flags and epochs of the fused and the staged exchange, shared by the exchanges of one world.

A model of 58 layers has 58 exchanges and one workspace. Its memory is for the largest of them; each counts slots in
rows of its own. All operations on a workspace are in one order on all ranks, whichever exchange they are of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from raymoe.device.combine import MOST_PIECES, most_pieces
from raymoe.device.dispatch import MAX_DONE, MOST_ROUTERS, STAMP_BYTES, Scratch
from raymoe.device.ll import LINE_BYTES, quantised_lines, row_lines
from raymoe.device.nvml import nvlinked
from raymoe.device.trace import BLOCKS_A_SM, TRACE_POINTS, timeline
from raymoe.errors import ConfigError
from raymoe.exchange.calls import Calls
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import FP8, ExchangeSpec
from raymoe.memory.layout import WORD_STRIDE, Layout, Region, round_up

if TYPE_CHECKING:
    import torch

    from raymoe.device.error_word import ErrorWord
    from raymoe.device.kernels import Kernels
    from raymoe.device.stream_order import StreamOrder
    from raymoe.memory.heap import DeviceHeap
    from raymoe.memory.watchdog import Watchdog
    from raymoe.memory.world import World


# Whether rows may travel between the GPUs of a world in lines that say themselves that they are whole.


class Links:
    """Of a world of GPU ranks, found out once by all of them (`World.shared`).

    A line of 128 bytes, data and epoch in one, arrives whole over NVLink. Over PCIe it may arrive in parts, so that the
    epoch is there before the data.
    """

    def __init__(self, world: World) -> None:
        gpus = world.swap(world.gpu.uuid, "links: GPUs")
        linked = all(nvlinked(world.gpu.uuid, str(peer)) for peer in gpus)
        self.lines = all(world.swap(linked, "links: NVLink"))
        """Whether NVLink is between every two GPUs of the world. Where NVML does not know, flags follow the rows."""

    def close(self, together: bool) -> None:
        """Nothing is held."""


STAMPS_VARIABLE = "RAYMOE_STAMPS"

_OWN = ("dispatch", "combine", "scratch", "dispatch_taken", "combine_taken")
"""128 bytes each, of this rank alone."""


SLOT_LINE, LINED_BYTES = 128, 1024
"""Rows of 7392 bytes of 4096 tokens, pushed to slots one behind the other, took 265 us, rows of 7424 bytes 245: those
begin with lines of 128 bytes (4x H200, 2026-11-22)."""

FEW_TOKENS, FEW_BYTES, FEW_BYTES_OF_SM = 4096, 16 << 20, 40 << 10
"""Of a rank, of their rows, and of these for each multiprocessor where a number of them is asked for: up to here rows
travel in lines. 1024 tokens of 7168 bfloat16 took 71 us each way so, and 90 with flags; by 64 multiprocessors 188 and
160, with flags 86 and 145 (2x H200, cold L2 cache, 2026-11-22). On four GPUs a line's 8 bytes in 128 weigh more: 512
tokens 77 and 79 for 80 and 87, 1024 142 and 144 for 137 and 146."""


def is_ll(spec: ExchangeSpec, sms: int | None = None) -> bool:
    """Whether `fused` carries the rows of this spec in lines: few tokens, expert by expert, sums in their own dtype.

    `sms` limits its kernels to so many SMs; None leaves them all.

    >>> from dataclasses import replace
    >>> spec = ExchangeSpec(tokens=1024, hidden=7168, experts=256, topk=8)
    >>> is_ll(spec), is_ll(spec, sms=64), is_ll(replace(spec, tokens=2048)), is_ll(replace(spec, layout="rank"))
    (True, False, False, False)
    """
    most = FEW_BYTES if sms is None else min(FEW_BYTES, sms * FEW_BYTES_OF_SM)
    small = spec.tokens <= FEW_TOKENS and spec.tokens * spec.row_bytes <= most
    retypes = spec.combine_wire != spec.dtype
    return small and spec.layout == "expert" and not spec.by_copy_engine and not retypes


def slot_bytes_of(spec: ExchangeSpec, stamped: bool) -> int:
    """A row of dispatch in its slot, with its stamp where slots have one. Quantised rows that are not small are filled
    up, so that each begins with a line.

    >>> slot_bytes_of(ExchangeSpec(1, hidden=7168, experts=8, topk=1, wire="float8_e4m3"), stamped=False)
    7424
    """
    slot_bytes = spec.wire_row_bytes + stamped * STAMP_BYTES
    lined = spec.dispatch_wire == FP8 and slot_bytes >= LINED_BYTES
    return round_up(slot_bytes, SLOT_LINE) if lined else slot_bytes


def ll_lines(spec: ExchangeSpec) -> int:
    """Lines of a row of this spec, in the direction in which it has more."""
    quantised = quantised_lines(spec.hidden) if spec.dispatch_wire == FP8 else 0
    return max(row_lines(spec.row_bytes), quantised)


@dataclass(frozen=True)
class Bounds:
    """The largest of everything that the exchanges of a workspace may ask for.

    >>> spec = ExchangeSpec(tokens=128, hidden=7168, experts=256, topk=8)
    >>> Bounds.of(spec)  # doctest: +NORMALIZE_WHITESPACE
    Bounds(tokens=128, entries=1024, experts=256, dispatch_bytes=1835008, combine_bytes=1835008, pieces=2400,
           row_bytes=14336, ll_entries=1024, ll_lines=15360, block=(0, 0), lines=True)
    """

    tokens: int
    entries: int
    """Of (token, k), of one rank."""
    experts: int
    dispatch_bytes: int
    """Of the rows of one rank, on the wire."""
    combine_bytes: int
    pieces: int
    """Of one rank's rows in a combine, in whole lines of words."""
    row_bytes: int
    ll_entries: int
    """Of (token, k) of one rank, of the specs that have few tokens; 0 where none has."""
    ll_lines: int
    """Lines of the rows of one rank, of these specs."""
    block: tuple[int, int] = (0, 0)
    """Tokens, and bytes of a row, of the specs whose rows go by the copy engine: one for all. Their slots lie apart
    from the others': a copy that nobody can call back must find in them what it left there (kernels/pack.cu)."""
    lines: bool = True
    """Whether rows of few tokens may travel in lines, which NVLink alone carries whole (`Links`)."""

    @classmethod
    def of(cls, *specs: ExchangeSpec, stamped: bool = False, lines: bool = True) -> Bounds:
        if not specs:
            raise ConfigError("a workspace for no exchange; name the spec of each that will use it")
        blocks = sorted({(spec.tokens, slot_bytes_of(spec, stamped)) for spec in specs if spec.by_copy_engine})
        if len(blocks) > 1:
            sizes = " and ".join(f"{tokens} rows of {row_bytes} bytes" for tokens, row_bytes in blocks)
            raise ConfigError(f"one workspace for exchanges by the copy engine of {sizes}; each needs one of its own")
        return cls(
            max(spec.tokens for spec in specs),
            max(spec.tokens * spec.topk for spec in specs),
            max(spec.experts for spec in specs),
            max((not spec.by_copy_engine) * spec.tokens * slot_bytes_of(spec, stamped) for spec in specs),
            max(spec.tokens * (spec.home_row_bytes + stamped * MOST_PIECES * STAMP_BYTES) for spec in specs),
            round_up(max(most_pieces(spec.tokens) for spec in specs), WORD_STRIDE),
            max(spec.row_bytes for spec in specs) + stamped * STAMP_BYTES,
            max(lines * is_ll(spec) * spec.tokens * spec.topk for spec in specs),
            max(lines * is_ll(spec) * spec.tokens * ll_lines(spec) for spec in specs),
            blocks[0] if blocks else (0, 0),
            lines,
        )

    def check(self, spec: ExchangeSpec, stamped: bool = False) -> None:
        """Refuse a spec that this workspace is too small for."""
        asked = Bounds.of(spec, stamped=stamped, lines=self.lines)
        for name, have in vars(self).items():
            needs = getattr(asked, name)
            if needs != have if name == "block" and spec.by_copy_engine else needs > have:
                raise ConfigError(
                    f"an exchange needs {name} {needs} of its workspace, which was made for {have}; "
                    "make the workspace with this exchange's spec among its specs"
                )


@dataclass(frozen=True)
class Slots:
    """Where the dispatch slots of a spec lie, in rows of that spec, from the region's beginning on.

    The halves of all specs share no byte: half 1 begins behind the largest half 0, and the row of zeros behind the
    largest half 1.
    """

    half: int
    """Slot number of half 1's first; half 0 begins at 0."""
    zero: int
    """A slot that stays zero."""

    @classmethod
    def of(cls, bounds: Bounds, slot_bytes: int, ranks: int) -> Slots:
        """
        >>> bounds = Bounds.of(ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2))
        >>> Slots.of(bounds, 128, ranks=2), Slots.of(bounds, 48, ranks=2)
        (Slots(half=16, zero=33), Slots(half=43, zero=88))
        """
        whole = ranks * bounds.dispatch_bytes
        return cls(-(-whole // slot_bytes), -(-(2 * whole + bounds.row_bytes) // slot_bytes))


def workspace_layout(bounds: Bounds, ranks: int) -> Layout:
    """The heap of a workspace, the same on every rank. kernels/dispatch.cu and combine.cu say who writes what.

    >>> layout = workspace_layout(Bounds.of(ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)), ranks=4)
    >>> layout.region("dispatch_rows").nbytes, layout.region("told").shape
    (469805056, (2, 131072))
    """
    words = Region.words
    return Layout.of(
        [
            words("own", len(_OWN)),
            words("dispatch_heads", ranks),
            words("combine_heads", ranks),
            Region("dispatch_done", (ranks, MAX_DONE), "int64"),
            Region("dispatch_arrivals", (ranks, round_up(bounds.tokens, WORD_STRIDE)), "int64"),
            Region("combine_done", (ranks, MAX_DONE), "int64"),
            Region("combine_arrivals", (ranks, bounds.pieces), "int64"),
            Region("counts", (2, bounds.experts + ranks), "int32"),
            Region("statuses", (2, ranks, Refusal.NBYTES // 8), "int64"),
            Region("router_words", (MOST_ROUTERS,), "int64"),
            Region("router_counts", (MOST_ROUTERS, bounds.experts), "int32"),
            Region("told", (2, ranks * bounds.entries), "int64"),
            # Room for both halves, for the gap between them and for the row of zeros, in rows of any of the specs.
            Region("dispatch_rows", (2 * ranks * bounds.dispatch_bytes + 3 * bounds.row_bytes,), "uint8"),
            Region("combine_rows", (2, ranks * bounds.combine_bytes), "uint8"),
            *(_ll_regions(bounds, ranks) if bounds.ll_entries else ()),
            *(_block_regions(bounds, ranks) if bounds.block[0] else ()),
        ]
    )


def _block_regions(bounds: Bounds, ranks: int) -> list[Region]:
    """Of kernels/pack.cu: a block of slots for each source, and a row of zeros."""
    tokens, slot_bytes = bounds.block
    return [Region("dispatch_blocks", ((ranks * tokens + 1) * slot_bytes,), "uint8")]


def _ll_regions(bounds: Bounds, ranks: int) -> list[Region]:
    """Of kernels/dispatch_ll.cu and combine_ll.cu: words of 16 bytes and lines of 128, each with its epoch."""
    lines = ranks * bounds.ll_lines
    return [
        Region("ll_counts", (2, bounds.experts + ranks, 2), "int64"),
        Region("ll_statuses", (2, ranks, 2, 2), "int64"),
        Region("ll_told", (2, ranks * bounds.ll_entries, 2), "int64"),
        Region("ll_dispatch_rows", (2, lines, LINE_BYTES), "uint8"),
        Region("ll_combine_rows", (2, lines, LINE_BYTES), "uint8"),
    ]


class Workspace:
    """Made, used and closed by all ranks of a world. `with` it, or close it after the exchanges that use it.

    - **One order.** Its operations follow one another, on whichever streams they are enqueued (`stream_order.py`).
      Exchanges that shall run together need two workspaces, and `sms` that fit on the GPU together.
    - **Failed once, failed for ever.** A wait that ran out of time poisons every exchange on it.
    - **`traced`.** Blocks of `fused` store when they came to which point of a kernel, for `timeline`. It costs them a
      little speed. `staged` has several launches, of which the later ones overwrite what the earlier ones stored.
    """

    def __init__(self, world: World, *specs: ExchangeSpec, traced: bool = False) -> None:
        from raymoe.device.error_word import ErrorWord
        from raymoe.device.kernels import Kernels
        from raymoe.device.stream_order import StreamOrder
        from raymoe.memory.watchdog import Watchdog

        # RAYMOE_STAMPS=1: every slot is stamped with its epoch, and who reads it checks. It costs some speed; it is for
        # tests, which hold the kernels to the protocol with it.
        self.stamped = os.environ.get(STAMPS_VARIABLE) == "1"
        self.traces = traced
        self._traces: dict[str, torch.Tensor] = {}
        self.world = world
        self.bounds = Bounds.of(*specs, stamped=self.stamped, lines=world.shared(Links).lines)
        problem: ConfigError | None = None
        theirs = world.swap(self.bounds, "workspace: bounds")
        for rank, bounds in enumerate(theirs):
            if bounds != self.bounds:
                problem = problem or ConfigError(
                    f"rank {rank} makes a workspace for {bounds}, rank {world.rank} for {self.bounds}"
                )
        world.agree(problem, "workspace: agreed")
        self.heap = world.allocate(workspace_layout(self.bounds, world.size), "exchange workspace", where="device")
        scratch = Scratch()
        own = self.heap.tensor("own")[_OWN.index("scratch")]
        for word, value in ((0, scratch.bad_entry), (2, scratch.liar)):
            own[word] = value - 2**64
        world.gpu.synchronise()
        self.kernels = Kernels(world.gpu)
        self.error = ErrorWord(world.gpu, world.rank)
        self.watch = self.error.watch(world.timeout_s)
        self._watchdog = Watchdog(world, on_abort=self.error.abort)
        self._order = StreamOrder(world.gpu)
        self.stream: Callable[[], int] = self._order.current
        """The stream that `enqueue` would take now, by the driver's number."""
        self.captured = False
        """Whether the last operation went into a graph."""
        self._closed = False
        self._pending: dict[str, object | None] = {}
        self.calls = Calls()
        release = partial(_let_go, self.heap, self._watchdog, self.error, self._order, self.kernels)
        name = f"a workspace of rank {world.rank} of world {world.name!r}"
        self._forget = world.unclosed.watch(self, name, release, at_once=False)
        world.barrier("workspace: ready")  # nobody's kernel runs before everybody's words are as they begin

    def begin(self, op: str) -> None:
        """Refuse an operation between the halves of another.

        Epochs belong to the workspace: it would run under the same number.
        """
        if self._pending.get(op) is not None:
            raise ConfigError(
                f"{op} between {op}_send and {op}_receive of an exchange on the same workspace; receive first, or give "
                "one of the two a workspace of its own"
            )

    def sent(self, op: str, who: object) -> None:
        """The first half of an operation of `who` is enqueued."""
        self._pending[op] = who

    def begin_second_half(self, op: str, who: object) -> None:
        """Refuse the second half of what `who` has not begun."""
        if self._pending.get(op) is not who:
            raise ConfigError(f"{op}_receive without the {op}_send of this exchange before it")

    def received(self, op: str) -> None:
        """The second half is enqueued."""
        self._pending[op] = None

    def enqueue(self, op: str, sms: int, steps: Iterable[Callable[[int], None]]) -> None:
        """Enqueue launches of an operation on the current stream, behind the last operation of this workspace.

        `sms` is how many multiprocessors the largest of them occupies.
        """
        stream, capture = self._order.enter(op, sms)
        for step in steps:
            step(stream)
        self._order.leave(stream, capture)
        self.captured = capture != 0

    def trace_of(self, op: str) -> int:
        """Where the kernels of an operation store their times; 0 unless they do."""
        if not self.traces:
            return 0
        import torch  # not above: bytes are counted with this module where no torch is loaded

        if op not in self._traces:
            blocks = BLOCKS_A_SM * self.world.gpu.sms
            self._traces[op] = torch.zeros(blocks, TRACE_POINTS, dtype=torch.int64, device=self.world.device)
        return int(self._traces[op].data_ptr())

    def timeline(self, op: str) -> dict[str, tuple[float, float, float]]:
        """What the last run of an operation says: of each point the microseconds after the start at which the first,
        the median and the last block came to it. Waits for the device, and makes ready for the next run."""
        times = self._traces[op]
        found = timeline([row for row in times.tolist() if row[0]])
        times.zero_()
        return found

    @property
    def nbytes(self) -> int:
        """Device memory of it on each rank."""
        return self.heap.nbytes

    def offset(self, region: str) -> int:
        """Where a region begins in every rank's heap."""
        return self.heap.layout.find(region).offset

    def halves(self, region: str) -> tuple[int, int]:
        """Where its two halves begin, of a region whose first dimension they are."""
        placed = self.heap.layout.find(region)
        return placed.offset, placed.offset + placed.region.nbytes // 2

    def own(self, name: str) -> int:
        """The address of words of this rank alone."""
        return self.heap.address("own") + _OWN.index(name) * WORD_STRIDE * 8

    def bases(self) -> list[int]:
        return [self.heap.base(rank) for rank in range(self.world.size)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget()
            self.heap.close()
            self._watchdog.close()
            self.error.close()
            self._order.close()
            self.kernels.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(heap: DeviceHeap, watchdog: Watchdog, error: ErrorWord, order: StreamOrder, kernels: Kernels) -> None:
    """Close what a workspace had that was dropped. Peers are not waited for: they may still use theirs."""
    heap.unmap_peers()
    watchdog.close()
    error.close()
    order.close()
    kernels.close()
