"""Backends of one emulated GPU, as the exchange inside a domain of one rank. A call returns when its work is done.

The machine is the only one of the process, so the launches between domains run on it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Field, Shape, value_of
from raymoe.cuda.params import Params
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu, RailParts
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, workspaces
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher, storage_of
from tests.unit.exchange.nccl.gloo_rounds import TensorRail


class Machine(EmulatedLauncher):
    """A launcher on an emulator that is open already."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self.emulator, self._runs = emulator, count()

    def run(self) -> None:
        self.emulator.run(next(self._runs))

    def ready(self, source: KernelSource, shape: Shape, params: Params, **memory: Field) -> Callable[..., None]:  # type: ignore[override]
        def launch(_stream: int, **changed: Field) -> None:
            fields = memory | changed
            for begin, nbytes in {storage_of(each) for each in fields.values() if isinstance(each, torch.Tensor)}:
                self.emulator.reach(begin, nbytes, f"memory of {source.stem}")
            given = replace(params, **{name: value_of(field) for name, field in fields.items()})
            self.emulator.launch(0, source, shape, given)
            self.run()

        return launch


class Inside:
    """Copies the arguments of each call into the machine, runs it, and copies the results back."""

    capturable, sms = False, None

    def __init__(self, kind: str, spec: ExchangeSpec, machine: Machine) -> None:
        self._machine = machine
        (space,) = workspaces(machine.emulator, spec, stamped=False, ranks=1)
        self._words: torch.Tensor | None = None
        self._backend: Any = backend(kind, space, spec)
        self.keeps_places, self.metadata_words = self._backend.keeps_places, self._backend.metadata_words
        self.refusal_record, self.pack = self._backend.refusal_record, self._backend.pack
        self.backward_record, self.mark_passes = self._backend.backward_record, self._backend.mark_passes
        self.refusal_words = self._backend.refusal_words
        self.check, self.check_waits = self._backend.check, self._backend.check_waits
        self.combine, self.combine_tokens = self._at_once("combine"), self._at_once("combine_tokens")

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        self._words = words
        self._backend.await_chunks(words, tokens)
        self._backend.delay = 20

    @contextmanager
    def _late(self) -> Iterator[None]:
        """Let the rows come once more, while the machine runs. Check that their words then have the same numbers."""
        if self._words is None:
            yield
            self._machine.run()
            return
        assert self._words.unique().numel() == 1, "each chunk has come"
        self._backend.machine_words[:] = self._words - 1
        yield
        self._machine.run()
        assert self._backend.late_chunks is not None or torch.equal(self._backend.machine_words, self._words)

    def lose(self, chunks: int) -> None:
        """Let only so many chunks of the next dispatch come, and bound its waits by a millisecond of the machine."""
        self._backend.late_chunks = chunks
        for launch in self._backend._dispatch.launches:
            launch.fields.watch.timeout_ns = 1_000_000

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        return self._dispatched(self._backend.dispatch, tokens, out)

    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        return self._dispatched(partial(self._backend.dispatch_again, forward=forward), tokens, out)

    def _dispatched(self, call: Callable[..., Dispatched], tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        placed = None if out is None else self._backend.new(tuple(out.shape), out.dtype, "out")
        with self._late():
            got = call(tokens, placed)
        if out is not None:
            got.x = out.copy_(placed)
        return got

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        placed = self._backend.new(tuple(out.shape), out.dtype, "out")
        with self._late():
            self._backend.dispatch_known(x, got, placed)
        out.copy_(placed)

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        got: Dispatched = self._backend.unpack(self._backend.place(metadata), rows, weights, ids)
        return got

    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        place = self._backend.place
        y, entries = place(out), place(out_weights)
        self._backend.combine_gradients(place(rows), place(weights), got, y, entries)
        self._machine.run()
        out.copy_(y)
        out_weights.copy_(entries)

    def close(self, together: bool) -> None:
        """Do nothing: the machine owns the memory."""

    def _at_once(self, name: str) -> Callable[..., None]:
        of = self._backend
        enqueue = getattr(of, name, None)

        def combine(
            rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, *tokens: tuple[int, int]
        ) -> None:
            placed = of.new(tuple(out.shape), out.dtype, "y")
            placed.copy_(out)
            enqueue(of.place(rows), got, weighted, placed, *tokens)
            self._machine.run()
            out.copy_(placed)

        return combine


@contextmanager
def between_domains(world: World, spec: ExchangeSpec, kind: str, chunk: int = 0) -> Iterator[HierarchicalGpu]:
    """Make the exchange of a world whose domains have one rank each, around an emulated backend.

    With `chunk`, rows cross in chunks of so many tokens. Then the backend is `chunks`.
    """
    with Emulator(2) as emulator:  # its second stream brings rows late
        machine = Machine(emulator)
        inside: Any = Inside(kind, spec.inside(world.domains), machine)
        yield HierarchicalGpu(world, spec, RailParts(machine, world.shared(TensorRail), inside, chunk))
