"""Layout `token` by the kernels over NVLink, on emulated ranks: its two parts on one workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.token_rows import TokenBackend
from tests.emulator.machine import Emulator
from tests.emulator.ranks import EmulatedBackend, backend, small, workspaces
from tests.unit.exchange.exchange_cases import Batch


class EmulatedTokens:
    """The backends of all ranks. Their torch operations run between runs of the machine."""

    def __init__(self, emulator: Emulator, kind: str, spec: ExchangeSpec) -> None:
        self._emulator, self._spec = emulator, spec
        spaces = workspaces(emulator, *spec.parts(emulator.ranks))
        kinds = kind, "staged" if kind == "copied" else kind
        self._parts: list[list[EmulatedBackend]] = [
            [backend(name, space, part, small) for name, part in zip(kinds, spec.parts(emulator.ranks), strict=True)]
            for space in spaces
        ]
        worlds: list[Any] = [space.world for space in spaces]
        self.ranks = [TokenBackend(world, spec, parts, None) for world, parts in zip(worlds, self._parts, strict=True)]

    def dispatch(self, sent: Sequence[Batch], seed: int) -> list[Dispatched]:
        enqueued = []
        for token_rows, parts, batch in zip(self.ranks, self._parts, sent, strict=True):
            count = torch.tensor([batch.num_tokens], dtype=torch.int32)
            inputs = token_rows.tokens_of(Tokens(batch.x, batch.ids, batch.weights, count))
            outs = [self._new(part, part.spec.rows(len(self.ranks)), part.spec.dtype) for part in parts]
            gots = [part.dispatch(tokens, out) for part, tokens, out in zip(parts, inputs, outs, strict=True)]
            enqueued.append((*inputs, *gots))
        self._emulator.run(seed)
        return [token_rows.result_of(*each) for token_rows, each in zip(self.ranks, enqueued, strict=True)]

    def combine(self, gots: list[Dispatched], sums: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        ys = []
        for token_rows, parts, got, rows in zip(self.ranks, self._parts, gots, sums, strict=True):
            ys.append(self._new(parts[0], got.tokens, self._spec.dtype))
            token_rows.combine(parts[0].place(rows), got, False, ys[-1])
        self._emulator.run(seed)
        return ys

    def restored(self, gots: list[Dispatched], sent: Sequence[Batch]) -> list[Dispatched]:
        """Make the results again from their metadata, as operators do in a backward pass."""
        again = []
        for token_rows, parts, got, batch in zip(self.ranks, self._parts, gots, sent, strict=True):
            metadata = token_rows.pack(got)
            assert len(metadata) == token_rows.metadata_words
            ids = Ids(batch.ids, torch.tensor([batch.num_tokens], dtype=torch.int32))
            again.append(token_rows.unpack(parts[0].place(metadata), got.x, got.weights, ids))
        return again

    def dispatch_gradients(self, xs: list[torch.Tensor], gots: list[Dispatched], seed: int) -> list[torch.Tensor]:
        """Send rows to the places of a dispatch, or dispatch them again where the backend keeps no places."""
        outs = []
        for token_rows, parts, got, x in zip(self.ranks, self._parts, gots, xs, strict=True):
            outs.append(self._new(parts[0], self._spec.rows(len(self.ranks)), self._spec.dtype))
            if token_rows.keeps_places:
                token_rows.dispatch_known(x, got, outs[-1])
            else:
                ids = torch.zeros(len(x), self._spec.topk, dtype=torch.int64)
                token_rows.dispatch_again(Tokens(x, ids, torch.zeros(ids.shape), None), outs[-1], got)
        self._emulator.run(seed)
        return outs

    def check(self) -> None:
        for token_rows in self.ranks:
            token_rows.check()

    def _new(self, part: EmulatedBackend, rows: int, dtype: str) -> torch.Tensor:
        return part.new((rows, part.spec.hidden), getattr(torch, dtype), "rows")
