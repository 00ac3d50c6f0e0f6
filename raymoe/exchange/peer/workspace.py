"""Slots, flags and epochs of backends `fused` and `staged`, shared by the exchanges of one world.

A model of 58 layers has 58 exchanges and one workspace. Its memory fits the largest of them, and each exchange counts
slots in rows of its own size. All operations on a workspace, of all exchanges, are in one order on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from raymoe.cuda.launch import Launch
from raymoe.cuda.launcher import Copies, Launcher
from raymoe.cuda.nvml import nvlinked
from raymoe.errors import ConfigError
from raymoe.exchange.calls import Calls
from raymoe.exchange.peer.combine import MOST_PIECES, most_pieces, number_bytes
from raymoe.exchange.peer.dispatch import MAX_DONE, MOST_COUNTING_BLOCKS, STAMP_BYTES, Scratch
from raymoe.exchange.peer.ll import LINE_BYTES, is_mixed_ll, quantised_lines, row_lines
from raymoe.exchange.peer.trace import BLOCKS_A_SM, TRACE_POINTS, timeline
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.memory.layout import WORD_STRIDE, Layout, Region, round_up

if TYPE_CHECKING:
    import torch

    from raymoe.cuda.error_word import ErrorWord
    from raymoe.memory.heap import DeviceHeap
    from raymoe.memory.world import World


# Whether the LL path can be used.


class Links:
    """Whether all GPUs of a world are linked by NVLink. All ranks find it out together, once (`World.shared`).

    A line of 128 bytes, data and epoch in one, arrives whole over NVLink. Over PCIe it may arrive in parts, with the
    epoch before the data.
    """

    def __init__(self, world: World) -> None:
        gpus = world.swap(world.gpu.uuid, "links: GPUs")
        linked = all(nvlinked(world.gpu.uuid, str(peer)) for peer in gpus)
        self.lines = all(world.swap(linked, "links: NVLink"))
        """Whether NVLink connects every two GPUs of the world. False where NVML does not know."""

    def close(self, together: bool) -> None:
        """Do nothing: this holds no resource."""


STAMPS_VARIABLE = "RAYMOE_STAMPS"

_OWN = ("dispatch", "combine", "scratch", "dispatch_taken", "combine_taken")
"""Words of this rank alone, 128 bytes each."""


SLOT_LINE, LINED_BYTES = 128, 1024
"""Slots of quantised rows of LINED_BYTES or more are multiples of SLOT_LINE, so that rows begin at 128-byte lines.
4096 rows of 7392 bytes, pushed to adjacent slots, took 265 us; rows of 7424 bytes took 245 (4x H200, 2026-11-22)."""

FEW_TOKENS, FEW_BYTES, FEW_BYTES_OF_SM, FEW_BYTES_OF_MIXED_SM = 4096, 16 << 20, 40 << 10, 128 << 10
"""The limits of the LL path, for a rank: tokens, bytes of their rows, and bytes for each SM where `sms` is a number.

1024 tokens of 7168 bfloat16, us (2x H200, cold L2 cache, 2026-11-22): all SMs 71 each way by the LL path, 90 with
flags; 64 SMs 188 (dispatch) and 160 (combine) by the LL path, 86 and 145 with flags. On four GPUs the 8 bytes of epoch
in 128 cost more: 512 tokens 77 and 79 against 80 and 87 with flags, 1024 tokens 142 and 144 against 137 and 146.

Where blocks do both kinds of work, dispatch + combine by lines and with flags: 256 tokens on 24 SMs 49 + 61 and
54 + 71, on 48 34 + 39 and 44 + 45; 512 tokens on 24 86 + 107 and 81 + 121, on 48 59 + 71 and 61 + 63 (2x H200,
2026-11-26)."""


def is_ll(spec: ExchangeSpec, sms: int | None = None) -> bool:
    """Return whether `fused` takes the LL path for this spec: few tokens, layout `expert`, sums in their own dtype.

    `sms` limits its kernels to so many SMs; None means all.

    >>> from dataclasses import replace
    >>> spec = ExchangeSpec(tokens=1024, hidden=7168, experts=256, topk=8)
    >>> is_ll(spec), is_ll(spec, sms=64), is_ll(replace(spec, tokens=2048)), is_ll(replace(spec, layout="rank"))
    (True, False, False, False)
    >>> [is_ll(replace(spec, tokens=128), sms) for sms in (8, 16, 24, 48, 64)]
    [False, True, True, True, True]
    >>> is_ll(replace(spec, tokens=128, wire="float8_e4m3"), sms=24)
    False
    """
    most = FEW_BYTES
    if sms is not None:
        mixed = is_mixed_ll(sms, spec.dispatch_wire == FP8)
        most = min(most, sms * (FEW_BYTES_OF_MIXED_SM if mixed else FEW_BYTES_OF_SM))
    small = spec.tokens <= FEW_TOKENS and spec.tokens * spec.row_bytes <= most
    retypes = spec.combine_wire != spec.dtype
    return small and spec.layout == "expert" and not spec.by_copy_engine and not retypes


def slot_bytes_of(spec: ExchangeSpec, stamped: bool) -> int:
    """Return the bytes of a dispatch slot: a row, with its stamp where slots have one.

    Slots of larger quantised rows are padded, so that each row begins at a line of 128 bytes.

    >>> slot_bytes_of(ExchangeSpec(1, hidden=7168, experts=8, topk=1, wire="float8_e4m3"), stamped=False)
    7424
    """
    slot_bytes = spec.wire_row_bytes + stamped * STAMP_BYTES
    lined = spec.dispatch_wire == FP8 and slot_bytes >= LINED_BYTES
    return round_up(slot_bytes, SLOT_LINE) if lined else slot_bytes


def home_bytes(spec: ExchangeSpec, stamped: bool) -> int:
    """The most bytes of a combine's slot: a row, the numbers of its entries, and the stamps of its pieces."""
    return spec.combine_row_bytes + number_bytes(spec.topk) + stamped * MOST_PIECES * STAMP_BYTES


def ll_lines(spec: ExchangeSpec) -> int:
    """Return the lines of a row of this spec on the LL path, in the direction that has more."""
    quantised = quantised_lines(spec.hidden) if spec.dispatch_wire == FP8 else 0
    return max(row_lines(spec.row_bytes), quantised)


@dataclass(frozen=True)
class Bounds:
    """The largest sizes that the exchanges of a workspace may need.

    >>> spec = ExchangeSpec(tokens=128, hidden=7168, experts=256, topk=8)
    >>> Bounds.of(spec)  # doctest: +NORMALIZE_WHITESPACE
    Bounds(tokens=128, entries=1024, experts=256, dispatch_bytes=1835008, combine_bytes=1839104, pieces=2400,
           row_bytes=14336, ll_entries=1024, ll_lines=15360, block=(0, 0), lines=True)
    """

    tokens: int
    entries: int
    """Entries (token, k) of one rank."""
    experts: int
    dispatch_bytes: int
    """Bytes of one rank's rows in a dispatch, on the wire."""
    combine_bytes: int
    """Bytes of one rank's rows in a combine, on the wire, each with a number of each entry."""
    pieces: int
    """Pieces of one rank's rows in a combine, rounded up to 128 bytes of words."""
    row_bytes: int
    ll_entries: int
    """Entries (token, k) of one rank, of the specs on the LL path; 0 if there are none."""
    ll_lines: int
    """Lines of one rank's rows, of these specs."""
    block: tuple[int, int] = (0, 0)
    """Tokens, and bytes of a row, of the specs whose rows go by the copy engine; all have the same.

    Their slots are separate: a copy cannot be cancelled, and must find its own rows there (kernels/peer/pack.cu)."""
    lines: bool = True
    """Whether the LL path may be used: only NVLink carries lines whole (`Links`)."""

    @classmethod
    def of(cls, *specs: ExchangeSpec, stamped: bool = False, lines: bool = True) -> Bounds:
        if not specs:
            raise ConfigError("a workspace without specs; give the spec of each exchange that will use it")
        blocks = sorted({(spec.tokens, slot_bytes_of(spec, stamped)) for spec in specs if spec.by_copy_engine})
        if len(blocks) > 1:
            sizes = " and ".join(f"{tokens} rows of {row_bytes} bytes" for tokens, row_bytes in blocks)
            raise ConfigError(f"one workspace for exchanges by the copy engine of {sizes}; each needs one of its own")
        return cls(
            max(spec.tokens for spec in specs),
            max(spec.tokens * spec.topk for spec in specs),
            max(spec.experts for spec in specs),
            max((not spec.by_copy_engine) * spec.tokens * slot_bytes_of(spec, stamped) for spec in specs),
            max(spec.tokens * home_bytes(spec, stamped) for spec in specs),
            round_up(max(most_pieces(spec.tokens) for spec in specs), WORD_STRIDE),
            max(spec.row_bytes for spec in specs) + stamped * STAMP_BYTES,
            max(lines * is_ll(spec) * spec.tokens * spec.topk for spec in specs),
            max(lines * is_ll(spec) * spec.tokens * ll_lines(spec) for spec in specs),
            blocks[0] if blocks else (0, 0),
            lines,
        )

    def check(self, spec: ExchangeSpec, stamped: bool = False) -> None:
        """Raise if this workspace is too small for a spec."""
        if (lacking := self._lacking(spec, stamped)) is not None:
            name, needs = lacking
            raise ConfigError(
                f"an exchange needs {name} {needs} of its workspace, which was made for {getattr(self, name)}; "
                "give the workspace this exchange's spec too"
            )

    def serves(self, spec: ExchangeSpec, stamped: bool = False) -> bool:
        """Whether this workspace is large enough for a spec."""
        return self._lacking(spec, stamped) is None

    def _lacking(self, spec: ExchangeSpec, stamped: bool) -> tuple[str, object] | None:
        """Return the first size that is too small, and what the spec needs."""
        bounds = Bounds.of(spec, stamped=stamped, lines=self.lines)
        for name, size in vars(self).items():
            needs = getattr(bounds, name)
            if needs != size if name == "block" and spec.by_copy_engine else needs > size:
                return name, needs
        return None


@dataclass(frozen=True)
class Slots:
    """The dispatch slots of a spec in their region, counted in slots of that spec.

    Buffers of different parity share no byte, whichever specs they belong to: buffer 1 begins after the largest
    buffer 0, and the row of zeros after the largest buffer 1.
    """

    buffer_slots: int
    """The first slot of buffer 1; buffer 0 begins at 0."""
    zero: int
    """The slot that stays zero."""

    @classmethod
    def of(cls, bounds: Bounds, slot_bytes: int, ranks: int) -> Slots:
        """
        >>> bounds = Bounds.of(ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2))
        >>> Slots.of(bounds, 128, ranks=2), Slots.of(bounds, 48, ranks=2)
        (Slots(buffer_slots=16, zero=33), Slots(buffer_slots=43, zero=88))
        """
        whole = ranks * bounds.dispatch_bytes
        return cls(-(-whole // slot_bytes), -(-(2 * whole + bounds.row_bytes) // slot_bytes))


def workspace_layout(bounds: Bounds, ranks: int) -> Layout:
    """Return the heap of a workspace, the same on every rank. dispatch.cu and combine.cu name each region's writer.

    >>> layout = workspace_layout(Bounds.of(ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)), ranks=4)
    >>> layout.region("dispatch_rows").nbytes, layout.region("routing_entries").shape
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
            Region("passes", (2, ranks, 2), "int64"),
            Region("statuses", (2, ranks, Refusal.NBYTES // 8), "int64"),
            Region("counting_words", (MOST_COUNTING_BLOCKS,), "int64"),
            Region("counting_sums", (MOST_COUNTING_BLOCKS, bounds.experts), "int32"),
            Region("routing_entries", (2, ranks * bounds.entries), "int64"),
            # Holds both buffers, the gap between them and the row of zeros, in rows of any of the specs.
            Region("dispatch_rows", (2 * ranks * bounds.dispatch_bytes + 3 * bounds.row_bytes,), "uint8"),
            Region("combine_rows", (2, ranks * bounds.combine_bytes), "uint8"),
            *(_ll_regions(bounds, ranks) if bounds.ll_entries else ()),
            *(_block_regions(bounds, ranks) if bounds.block[0] else ()),
        ]
    )


def _block_regions(bounds: Bounds, ranks: int) -> list[Region]:
    """Return the regions of kernels/peer/pack.cu: a block of slots for each source, and a row of zeros."""
    tokens, slot_bytes = bounds.block
    return [Region("dispatch_blocks", ((ranks * tokens + 1) * slot_bytes,), "uint8")]


def _ll_regions(bounds: Bounds, ranks: int) -> list[Region]:
    """Return the regions of the LL path: words of 16 bytes and lines of 128, each with its epoch."""
    lines = ranks * bounds.ll_lines
    return [
        Region("ll_counts", (2, bounds.experts + ranks, 2), "int64"),
        Region("ll_statuses", (2, ranks, 2, 2), "int64"),
        Region("ll_routing_entries", (2, ranks * bounds.ll_entries, 2), "int64"),
        Region("ll_dispatch_rows", (2, lines, LINE_BYTES), "uint8"),
        Region("ll_combine_rows", (2, lines, LINE_BYTES), "uint8"),
    ]


class Workspace:
    """The memory that exchanges share: made, used and closed by all ranks of a world. Close it after its exchanges.

    - **One order.** Its operations run one after another, on all streams (`stream_order.py`). Exchanges that should run
      at the same time need a workspace each, and `sms` that fit on the GPU together.
    - **A failure is final.** A wait that runs out of time poisons every exchange on it.
    - **`traced`.** Blocks of `fused` store the time at which they reach each point of a kernel, for `timeline`. This
      costs a little speed. With `staged`, a later launch of an operation overwrites the times of an earlier one.
    """

    def __init__(
        self, world: World, *specs: ExchangeSpec, traced: bool = False, launcher: Launcher | None = None
    ) -> None:
        """`launcher` launches the kernels of all exchanges on the workspace; by default, on the world's GPU."""
        # RAYMOE_STAMPS=1: every slot is stamped with its epoch, and each reader checks the stamp. Tests check the
        # protocol with it; it costs some speed.
        self.stamped = os.environ.get(STAMPS_VARIABLE) == "1"
        self.traces = traced
        self._traces: dict[str, torch.Tensor] = {}
        self.world = world
        specs = tuple(part for spec in specs for part in spec.over_slots(world.size).parts(world.size))
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
        for word, value in ((0, scratch.bad_entry), (2, scratch.bad_count)):
            own[word] = value - 2**64
        world.gpu.synchronise()
        self.launcher = Launcher(world.gpu) if launcher is None else launcher
        self.error = self.launcher.error_word(world.rank)
        self.watch = self.error.watch(world.timeout_s)
        self._forget_aborts = world.waiter.on_abort(self.error.abort)
        self._order = self.launcher.order
        self.stream: Callable[[], int] = self._order.current
        """Gives the driver's number of the stream that `enqueue` would use now."""
        self.captured = False
        """Whether the last operation went into a graph."""
        self._closed = False
        self._sent_by: dict[str, object | None] = {}
        self.calls = Calls()
        release = partial(_let_go, self.heap, self._forget_aborts, self.error, self.launcher)
        name = f"a workspace of rank {world.rank} of world {world.name!r}"
        self._forget = world.unclosed.watch(self, name, release, at_once=False)
        world.barrier("workspace: ready")  # no kernel runs before the words of all ranks have their first values

    def begin(self, op: str) -> None:
        """Refuse an operation between a send and its receive: both would run with the same epoch of the workspace."""
        if self._sent_by.get(op) is not None:
            raise ConfigError(
                f"{op} between {op}_send and {op}_receive of an exchange on the same workspace; call {op}_receive "
                "first, or give one of the two a workspace of its own"
            )

    def sent(self, op: str, exchange: object) -> None:
        """Note that `exchange` has enqueued a send."""
        self._sent_by[op] = exchange

    def begin_receive(self, op: str, exchange: object) -> None:
        """Refuse a receive of `exchange` without its send."""
        if self._sent_by.get(op) is not exchange:
            raise ConfigError(f"{op}_receive without {op}_send of this exchange; call {op}_send first")

    def received(self, op: str) -> None:
        """Note that the receive is enqueued."""
        self._sent_by[op] = None

    def enqueue(self, op: str, sms: int, launches: Iterable[Launch | Copies]) -> None:
        """Enqueue launches of an operation on the current stream, after the last operation of this workspace.

        `sms` is the number of SMs that the largest of them occupies.
        """
        stream, capture = self._order.enter(op, sms)
        for launch in launches:
            launch.enqueue(stream)
        self._order.leave(stream, capture)
        self.captured = capture != 0

    def trace_of(self, op: str) -> int:
        """Return the address where the kernels of an operation store their times; 0 if the workspace is not traced."""
        if not self.traces:
            return 0
        import torch  # here, because the driver counts bytes with this module and loads no torch

        if op not in self._traces:
            blocks = BLOCKS_A_SM * self.world.gpu.sms
            self._traces[op] = torch.zeros(blocks, TRACE_POINTS, dtype=torch.int64, device=self.world.device)
        return int(self._traces[op].data_ptr())

    def timeline(self, op: str) -> dict[str, tuple[float, float, float]]:
        """Return when the first, the median and the last block of an operation's last run reached each point.

        In microseconds after the start. Waits for the device, and clears the times for the next run.
        """
        times = self._traces[op]
        times_reached = timeline([row for row in times.tolist() if row[0]])
        times.zero_()
        return times_reached

    @property
    def nbytes(self) -> int:
        """Bytes of device memory on each rank."""
        return self.heap.nbytes

    def offset(self, region: str) -> int:
        """Return the offset of a region in every rank's heap."""
        return self.heap.layout.find(region).offset

    def buffers(self, region: str) -> tuple[int, int]:
        """Return the offsets of the two buffers of a region, whose first dimension is the parity."""
        placed = self.heap.layout.find(region)
        return placed.offset, placed.offset + placed.region.nbytes // 2

    def own(self, name: str) -> int:
        """Return the address of some of this rank's own words."""
        return self.heap.address("own") + _OWN.index(name) * WORD_STRIDE * 8

    def bases(self) -> list[int]:
        return [self.heap.base(rank) for rank in range(self.world.size)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget()
            self.heap.close()
            self._forget_aborts()
            self.error.close()
            self.launcher.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(heap: DeviceHeap, forget_aborts: Callable[[], None], error: ErrorWord, launcher: Launcher) -> None:
    """Release the resources of a workspace that was dropped. It does not wait for peers, which may still use theirs."""
    heap.unmap_peers()
    forget_aborts()
    error.close()
    launcher.close()
