"""The exchange's own backends on emulated ranks: real grids, offsets and parameters on emulated memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from raymoe.cuda.error_word import _RECORD, ErrorWord
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Field, Shape, value_of
from raymoe.cuda.params import Params, address_setter
from raymoe.cuda.structs import ErrorRecord
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.domains.domain_kernels import ADVANCE_CHUNK, ChunkParams
from raymoe.exchange.peer import combine, dispatch_grid, ll
from raymoe.exchange.peer.build import Build, Grids
from raymoe.exchange.peer.column_pieces import ColumnPieces
from raymoe.exchange.peer.combine import CombineGrid
from raymoe.exchange.peer.dispatch_grid import DispatchGrid
from raymoe.exchange.peer.fused import FUSED
from raymoe.exchange.peer.fused_chunks import CHUNKS, ChunksBackend
from raymoe.exchange.peer.fused_ll import FEW_TOKENS
from raymoe.exchange.peer.peer_backend import PeerBackend
from raymoe.exchange.peer.staged import COPIED, STAGED
from raymoe.exchange.peer.workspace import STAMPS_VARIABLE, Workspace
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import Layout, Region
from tests.emulator.machine import RED_ZONE_BYTES, Emulator, Memory

LONG_S = 60.0
"""Virtual time: the deadline of waits that should not fail."""


@dataclass(frozen=True)
class EmulatedGpu:
    """The properties of a GPU that grids depend on. They are small, so that every ring and window wraps."""

    emulator: Emulator
    rank: int
    sms: int = 6
    shared_bytes: int = 64 << 10
    capability: tuple[int, int] = (9, 0)

    def synchronise(self) -> None:
        """Do nothing: the host writes to the memory that kernels read."""


@dataclass(frozen=True)
class EmulatedWorld:
    """A world whose ranks are made by one process, one after the other, all alike."""

    gpu: EmulatedGpu
    size: int
    heaps: dict[str, tuple[Layout, list[Memory]]]
    """The heaps of all ranks, by purpose."""
    timeout_s: float = LONG_S
    name: str = "emulated"
    unclosed: Any = field(default_factory=lambda: SimpleNamespace(watch=lambda *_, **__: lambda: None))
    """The machine owns the memory of a workspace, so a dropped workspace leaks nothing."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    waiter: Any = field(default_factory=lambda: SimpleNamespace(on_abort=lambda _: lambda: None))
    """Nothing aborts the ranks of a machine from outside."""

    @property
    def rank(self) -> int:
        return self.gpu.rank

    def swap(self, value: object, what: str) -> list[object]:  # noqa: ARG002
        return [value] * self.size

    def agree(self, problem: Exception | None, what: str) -> None:  # noqa: ARG002
        if problem is not None:
            raise problem

    def shared(self, kind: object) -> Any:  # noqa: ARG002
        """Return a link on which lines arrive whole."""
        return SimpleNamespace(lines=True)

    def barrier(self, what: str) -> None:
        """Do nothing: no kernel runs before `Emulator.run`."""

    def allocate(self, layout: Layout, what: str, where: str) -> EmulatedHeap:
        assert where == "device"
        if what not in self.heaps:
            self.heaps[what] = heaps_of(self.gpu.emulator, layout)
        return EmulatedHeap(*self.heaps[what], self.rank)


class EmulatedHeap:
    """One rank's view of the heaps of all ranks. The bytes between its regions may not be accessed."""

    def __init__(self, layout: Layout, heaps: list[Memory], rank: int) -> None:
        self.layout, self._rank, self._heaps = layout, rank, heaps

    def base(self, peer: int) -> int:
        return self._heaps[peer].address

    def address(self, name: str) -> int:
        return self.base(self._rank) + self.layout.find(name).offset

    def tensor(self, name: str) -> torch.Tensor:
        placed = self.layout.find(name)
        region, begin = placed.region, placed.offset
        flat = torch.from_numpy(self._heaps[self._rank].bytes[begin : begin + region.nbytes])
        return flat.view(getattr(torch, region.dtype)).view(region.shape)

    def close(self) -> None:
        """Do nothing: the machine owns the memory."""


def with_gaps(layout: Layout) -> Layout:
    """Return the same regions with red zones between them."""
    regions: list[Region] = []
    for placed in layout.placed:
        regions += [placed.region, Region(f"gap after {placed.region.name}", (RED_ZONE_BYTES,), "uint8")]
    return Layout.of(regions)


def heaps_of(emulator: Emulator, layout: Layout) -> tuple[Layout, list[Memory]]:
    """Map a heap for each rank."""
    wide = with_gaps(layout)
    kept = [each for each in wide.placed if not each.region.name.startswith("gap after ")]
    regions = [(each.region.name, each.offset, each.region.nbytes) for each in kept]
    return wide, [emulator.heap(rank, regions, wide.nbytes) for rank in range(emulator.ranks)]


class EmulatedWords:
    """Words of the host that kernels read and write."""

    def __init__(self, gpu: EmulatedGpu, count: int) -> None:
        self._memory = gpu.emulator.memory(gpu.rank, count * 8, "host words")
        self._memory.bytes[:] = 0
        self.words = self._memory.bytes.view(np.uint64)

    def device_address(self, index: int = 0) -> int:
        return self._memory.address + index * 8

    def close(self) -> None:
        """Do nothing: the machine owns the memory."""


class EmulatedErrorWord(ErrorWord):
    """The abort word, the record and the poison of one rank, in memory of the machine."""

    def __init__(self, gpu: Any, rank: int) -> None:
        self.rank, self._gpu = rank, gpu
        self._lock = threading.Lock()
        self._ops, self._reason, self._closed = [], None, False
        host: Any = EmulatedWords(gpu, _RECORD + ErrorRecord.nbytes() // 8)
        self._host, self._poison = host, EmulatedWords(gpu, 16).device_address()

    def close(self) -> None:
        """Do nothing: the machine owns the memory."""


class EmulatedLaunch:
    """Enqueues on the rank's stream; the machine copies the parameters at that time, as a GPU does."""

    def __init__(self, gpu: EmulatedGpu, source: KernelSource, shape: Shape, params: Params) -> None:
        self._gpu, self._source, self._shape = gpu, source, shape
        self.fields, self.sms = params.packed(), shape.blocks
        self.set_addresses: Callable[..., None]

    def enqueue(self, stream: int) -> None:  # noqa: ARG002 - a rank has one stream here
        self._gpu.emulator.launch(self._gpu.rank, self._source, self._shape, self.fields)


class EmulatedOrder:
    """The order of streams; a rank has one stream here, so it does nothing."""

    def current(self) -> int:
        return 0

    def enter(self, what: str, sms: int) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0

    def leave(self, stream: int, capture: int) -> None: ...


class MachineLauncher:
    """Makes launches, words and memory of the machine for one rank. It is what `Launcher` is on a GPU."""

    red_zone = RED_ZONE_BYTES

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu, self.order = gpu, EmulatedOrder()
        self.allocations = 0
        """How many tensors the functions of `allocator` have made."""

    def ready(
        self, source: KernelSource, shape: Shape, params: Params, *addresses: str, **memory: Field
    ) -> EmulatedLaunch:
        """The machine holds all blocks at once."""
        launch = EmulatedLaunch(self._gpu, source, shape, params)
        launch.set_addresses = address_setter(launch.fields, type(params), addresses)
        for name, field_ in memory.items():
            setattr(launch.fields, name, value_of(field_))
        return launch

    def words(self, count: int) -> EmulatedWords:
        return EmulatedWords(self._gpu, count)

    def error_word(self, rank: int) -> EmulatedErrorWord:
        return EmulatedErrorWord(self._gpu, rank)

    def allocator(
        self, shape: tuple[int, ...], dtype: torch.dtype, arrays: dict[str, tuple[int, int]] | None = None
    ) -> Callable[[], torch.Tensor]:
        """Tensors begin as NaN and absurd numbers, with red zones between their arrays."""

        def allocate() -> torch.Tensor:
            self.allocations += 1
            places = [(name, *place) for name, place in (arrays or {}).items()]
            return machine_tensor(self._gpu, shape, dtype, "metadata" if places else "a result", places)

        return allocate

    def copy(self, into: int, source: int, nbytes: int, stream: int) -> None:  # noqa: ARG002
        """Copy piece by piece, in order with the rank's stream."""
        for begin in range(0, nbytes, _COPIED_BYTES):

            def copy(here: int = source + begin, there: int = into + begin, size: int = nbytes - begin) -> None:
                size = min(size, _COPIED_BYTES)
                self._gpu.emulator.write(_bytes_at(there, size), _bytes_at(here, size))

            self._gpu.emulator.call(self._gpu.rank, copy)

    def side_stream(self) -> SimpleNamespace:
        """A rank has one stream here."""
        return SimpleNamespace(begin=lambda: 0, join=lambda: None)

    def synchronise(self) -> None:
        """Do nothing: whoever calls `check` has run the machine."""

    def close(self) -> None:
        """Do nothing: the machine owns the memory."""


_COPIED_BYTES = 144
"""About a row of the specs here, so that other work comes between the rows of a copy."""


def machine_tensor(
    gpu: EmulatedGpu,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
    arrays: Sequence[tuple[str, int, int]] = (),
) -> torch.Tensor:
    """Allocate a tensor that this rank's kernels may access, filled with NaN."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = gpu.emulator.memory(gpu.rank, nbytes, name, arrays)
    return torch.from_numpy(memory.bytes).view(dtype).view(shape)


def workspaces(
    emulator: Emulator,
    *specs: ExchangeSpec,
    stamped: bool = True,
    traced: bool = False,
    timeout_s: float = LONG_S,
    ranks: int | None = None,
) -> list[Workspace]:
    """Make a workspace for each rank. `timeout_s` is virtual time; a step takes about 8 ns of it.

    With `ranks` only the machine's first ranks have one. The streams of the others are free for other work.
    """
    heaps: dict[str, tuple[Layout, list[Memory]]] = {}
    size = emulator.ranks if ranks is None else ranks
    worlds = [EmulatedWorld(EmulatedGpu(emulator, rank), size, heaps, timeout_s) for rank in range(size)]
    with mock.patch.dict(os.environ, {STAMPS_VARIABLE: str(int(stamped))}):
        return [
            Workspace(cast(Any, world), *specs, traced=traced, launcher=cast(Any, MachineLauncher(world.gpu)))
            for world in worlds
        ]


class EmulatedBackend(PeerBackend):
    """A backend that copies its arguments into the machine, whose kernels reach no other memory."""

    _sent: Tokens

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        return super().dispatch(self.in_machine(tokens), out)

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self._sent = self.in_machine(tokens)
        return super().dispatch_send(self._sent, out)

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:  # noqa: ARG002 - the send copied them
        super().dispatch_receive(got, self._sent)

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        super().dispatch_known(self.place(x), got, out)

    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        return super().dispatch_again(self.in_machine(tokens), out, forward)

    def column_pieces(self, got: Dispatched) -> ColumnPieces | None:
        first = self._pieces is None
        pieces = super().column_pieces(got)
        if first and pieces is not None:
            self._reach(pieces.words, "column pieces")
        return pieces

    def refusal_record(self) -> torch.Tensor:
        words = super().refusal_record()
        self._reach(words, "refusal records")
        return words

    def mark_passes(self, word: torch.Tensor) -> None:
        super().mark_passes(word)
        self._reach(word, "mark of passes")

    def in_machine(self, tokens: Tokens) -> Tokens:
        """Copy the tokens to memory of the machine."""
        values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
        placed = {name: self.place(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(tokens, **placed)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Allocate a tensor that this rank's kernels may access, filled with NaN."""
        return machine_tensor(cast(Any, self.world.gpu), shape, dtype, name)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to memory of the machine."""
        shape = tuple(tensor.shape)
        return self.new(shape, tensor.dtype, f"tensor {'x'.join(map(str, shape))} of {tensor.dtype}").copy_(tensor)

    def _reach(self, tensor: torch.Tensor, name: str) -> None:
        """Let this rank's kernels access memory of torch."""
        gpu, storage = cast(Any, self.world.gpu), tensor.untyped_storage()
        gpu.emulator.reach(storage.data_ptr(), storage.nbytes(), name, gpu.rank)


def _bytes_at(address: int, nbytes: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class EmulatedChunks(EmulatedBackend, ChunksBackend):
    """Backend `fused` whose rows come late, by a second stream of each rank: the machine has twice as many ranks.

    Its crossings are not ordered with a rank's own stream, so the machine must run between two dispatches.
    """

    delay = 0
    """How many launches before each chunk only take time."""
    late_chunks: int | None = None
    """How many chunks of the next dispatch come; None: all."""
    aborted_from: int | None = None
    """The chunk from which on an abort of the rail keeps the rows away; None: there is no abort."""

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        """Wait for words in the machine, which are as many as `words`."""
        self.machine_words = torch.from_numpy(self._reachable(words.nbytes, "chunk words")).view(torch.int64)
        self._spare = torch.from_numpy(self._reachable(16, "spare words")).view(torch.int64)
        self.rail_aborted = torch.from_numpy(self._reachable(8, "word of the rail")).view(torch.int64)
        self._late_x = self._reachable(self.spec.tokens * self.spec.row_bytes, "x")
        self._chunk_tokens = tokens
        super().await_chunks(self.machine_words, tokens)

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        ChunksBackend.dispatch_known(self, self._come_late(x), got, out)

    def in_machine(self, tokens: Tokens) -> Tokens:
        x = self._come_late(tokens.x)
        return replace(super().in_machine(replace(tokens, x=x[:0])), x=x)

    def _come_late(self, x: torch.Tensor) -> torch.Tensor:
        """Enqueue the rows, chunk by chunk, each after a launch that advances its word. Until then they are NaN."""
        gpu: Any = self.world.gpu
        emulator, stream = gpu.emulator, self.world.rank + self.world.size
        late = self._late_x[: x.nbytes]
        late[:] = 0xFF
        self.machine_words[0] += 1
        rows = x.flatten().view(torch.uint8).numpy().copy()
        each, chunks = self._chunk_tokens * (x.nbytes // max(1, len(x))), len(self.machine_words) - 1
        aborted = self.rail_aborted.data_ptr()
        for number in range(chunks if self.late_chunks is None else self.late_chunks):
            begin = number * each
            for _ in range(self.delay):  # launches that only take time
                emulator.launch(stream, ADVANCE_CHUNK, Shape(4, 32), ChunkParams(self._spare.data_ptr(), aborted))
            if self.aborted_from is None or number < self.aborted_from:
                emulator.call(stream, lambda at=begin: emulator.write(late[at : at + each], rows[at : at + each]))
            elif number == self.aborted_from:
                emulator.call(stream, lambda: self.rail_aborted.fill_(1))
            params = ChunkParams(self.machine_words.data_ptr(), aborted, number)
            emulator.launch(stream, ADVANCE_CHUNK, Shape(1, 32), params)
        return torch.from_numpy(late).view(x.dtype).view(x.shape)

    def _reachable(self, nbytes: int, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Map zeros that both streams of this rank reach."""
        gpu: Any = self.world.gpu
        found: np.ndarray[Any, np.dtype[np.uint8]] = gpu.emulator.heap(
            self.world.rank, [(name, 0, nbytes)], nbytes
        ).bytes
        return found


FEW = ("few", "few chunks")
KINDS = {
    "fused": FUSED,
    "few": FUSED,
    "few chunks": CHUNKS,
    "staged": STAGED,
    "copied": COPIED,
    "ll": FEW_TOKENS,
    "few ll": FEW_TOKENS,
    "chunks": CHUNKS,
}
"""Kinds of backends. Those of FEW, and "few ll" on two SMs, are laid out as on few SMs, the others as on all."""


def spec_for(kind: str, **fields: Any) -> ExchangeSpec:
    """Return a small spec that this kind of backend takes."""
    transport = "copy_engine" if kind == "copied" else "auto"
    return ExchangeSpec(**{"tokens": 20, "hidden": 64, "experts": 12, "topk": 3, "transport": transport, **fields})


def backend(
    name: str,
    workspace: Workspace,
    spec: ExchangeSpec,
    shape: Callable[[Any, Any], Any] | None = None,
    sms: int | None = None,
) -> EmulatedBackend:
    """Make a backend; `shape` changes its grids of dispatch and combine."""
    kind, world = KINDS[name], workspace.world

    def grids(build: Build, sms: int) -> Grids:
        original = kind.grids(build, sms)
        return original if shape is None else Grids(sms, *shape(original.dispatch, original.combine))

    backend_of = EmulatedChunks if name in ("chunks", "few chunks") else EmulatedBackend
    if sms is None:
        sms = 2 if name == "few ll" else world.gpu.sms
    with (
        mock.patch.object(combine, "MOST_WHOLE_SMS", sms if name in FEW else 0),
        mock.patch.object(dispatch_grid, "is_mixed", lambda *_: name in FEW),
        mock.patch.object(dispatch_grid, "FEWEST_MIXED_ROWS", 2),
        mock.patch.object(ll, "is_mixed_ll", lambda *_: name == "few ll"),
        mock.patch.object(ll, "FEW_ROUNDS", 0),
    ):
        return backend_of(world, spec, workspace, sms, replace(kind, grids=grids))


def small(moving: DispatchGrid, summing: CombineGrid) -> tuple[DispatchGrid, CombineGrid]:
    """Few warps with rings of two stages, so that every ring and window wraps."""
    return (
        replace(
            moving,
            senders=3 if moving.mixed else 2,
            placement_blocks=3,
            counting_blocks=2,
            sender_warps=min(2, moving.sender_warps),
            sender_stages=min(2, moving.sender_stages),
            placement_warps=min(2, moving.placement_warps),
            placement_stages=min(2, moving.placement_stages),
        ),
        replace(summing, local_blocks=2, final_blocks=2, local_warps=2),
    )


def narrow(moving: DispatchGrid, summing: CombineGrid) -> tuple[DispatchGrid, CombineGrid]:
    """One warp each way, so that readers wait for rows while most are still to be sent."""
    moving, summing = small(moving, summing)
    moving = replace(moving, placement_blocks=2) if moving.mixed else moving
    return replace(moving, senders=2 if moving.mixed else 1, sender_warps=1), replace(
        summing, local_blocks=1, local_warps=1, final_blocks=1
    )


def long_pieces(moving: DispatchGrid, summing: CombineGrid) -> tuple[DispatchGrid, CombineGrid]:
    """One piece for a whole row of a combine, so that the piece has all steps of the row."""
    moving, summing = narrow(moving, summing)
    return moving, replace(summing, pieces=1)


def deep(stages: int) -> Callable[[DispatchGrid, CombineGrid], tuple[DispatchGrid, CombineGrid]]:
    """One warp each way, with rings of so many stages."""

    def shape(moving: DispatchGrid, summing: CombineGrid) -> tuple[DispatchGrid, CombineGrid]:
        moving, summing = narrow(moving, summing)
        one = replace(moving, senders=1, placement_blocks=1, placement_warps=1, counting_blocks=1)
        return replace(one, sender_stages=stages, placement_stages=stages), summing

    return shape
