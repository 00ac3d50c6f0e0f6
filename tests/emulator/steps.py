"""Steps of an exchange on emulated ranks: dispatch, experts, combine, all enqueued before the machine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.peer.kernel_result import SavedMetadata
from raymoe.fp8 import FP8, FP8_BLOCK
from tests.emulator.machine import Emulator
from tests.emulator.ranks import EmulatedBackend
from tests.unit.exchange.exchange_cases import Batch, Case, Result, apply_experts, batches, expert_major
from tests.unit.exchange.exchange_judge import judge_combine, judge_dispatch, judge_quantised

FORMS = ("whole", "halves", "pairs", "known", "known pairs")
"""Forms of a step: two launches; four launches; two steps at a time, both dispatches before both combines; with
dispatches of known routing before and after the combine, where the backend has them."""


@dataclass
class Steps:
    """The steps of a case, and their results: `results[step][rank]`."""

    emulator: Emulator
    case: Case
    backends: list[EmulatedBackend]
    absent: frozenset[int] = frozenset()
    """Ranks that launch nothing."""
    results: list[list[Result]] = field(default_factory=list)
    known: list[tuple[int, int, float, torch.Tensor]] = field(default_factory=list)
    """The dispatches of known routing: step, rank, factor of the rows, and the rows that arrived."""
    _later: dict[int, Callable[[], object]] = field(default_factory=dict)

    def enqueue(self, step: int, form: str = "whole", change: Callable[[int, Batch], object] | None = None) -> None:
        """Enqueue a step of all ranks; `change` may spoil a rank's input."""
        got = [Result(np.zeros(0), np.zeros(0), [], [], np.zeros(0)) for _ in self.backends]
        self.results.append(got)
        for rank, (backend, batch) in enumerate(zip(self.backends, batches(self.case, step), strict=True)):
            if change is not None:
                change(rank, batch)
            if rank not in self.absent:
                combine = self._dispatch(backend, batch, form, got[rank])
                if form.endswith("pairs") and step % 2 == 0:
                    self._later[rank] = combine
                else:
                    self._later.pop(rank, lambda: None)()
                    combine()

    def judge(self, first: int = 0) -> None:
        """Compare the steps from `first` on: dispatched rows with the plan, y with the oracle."""
        for backend in self.backends:
            backend.check()
        for step in range(first, len(self.results)):
            sent = batches(self.case, step)
            if self.case.spec.dispatch_wire == FP8:
                judge_quantised(self.case, sent, self.results[step])
                continue
            for rank, result in enumerate(self.results[step]):
                judge_dispatch(self.case, sent, rank, result)
                judge_combine(self.case, sent[rank], result.y)
        for step, rank, factor, rows in self.known:
            if step >= first:
                self._judge_known(self.results[step][rank], factor * rows)

    def _judge_known(self, result: Result, rows: torch.Tensor) -> None:
        """Compare rows that went to the places of a dispatch with that dispatch's own rows; gaps only if filled."""
        for expert, count in enumerate(result.counts):
            begin, end = result.offsets[expert], result.offsets[expert + 1]
            here = slice(begin, end if self.case.spec.padding == "zero" else begin + count)
            found = rows[here].float().numpy()
            assert np.array_equal(found, result.x[here]), f"known rows of expert {expert} differ from {here}"

    def _dispatch(self, backend: EmulatedBackend, batch: Batch, form: str, result: Result) -> Callable[[], object]:
        """Enqueue a dispatch; return a function that enqueues the rest of its step."""
        case, spec, rank, step = self.case, self.case.spec, backend.world.rank, len(self.results) - 1
        count = torch.tensor([batch.num_tokens], dtype=torch.int32) if case.prefix else None
        tokens = Tokens(batch.x, batch.ids, batch.weights, count)
        rows, dtype = spec.rows(case.ranks), getattr(torch, spec.output_dtype)
        out = backend.new((rows, spec.hidden), dtype, "out") if spec.layout == "expert" else None
        y = backend.new(tuple(batch.x.shape), batch.x.dtype, "y")
        y.fill_(7)  # neither the right value nor NaN, which some steps give
        made = backend.new((rows, spec.hidden), batch.x.dtype, "expert rows")
        if form == "halves":
            got = backend.dispatch_send(tokens, out)
            backend.dispatch_receive(got, tokens)
        else:
            got = backend.dispatch(tokens, out)

        def known(factor: float) -> None:
            if form.startswith("known") and backend.keeps_places:
                rows = backend.new((case.spec.rows(case.ranks), spec.hidden), dtype, "known rows")
                saved, before = got.saved(SavedMetadata), list[torch.Tensor]()
                self.emulator.call(rank, lambda: before.append(saved.memory.clone()))
                backend.dispatch_known(batch.x / factor, got, rows)
                self.emulator.call(rank, lambda: _check_unchanged(before.pop(), saved.memory))
                self.known.append((step, rank, factor, rows))

        def combine() -> None:
            if spec.layout == "expert":  # else rows are in slots until the next dispatch
                known(-0.5)
            self.emulator.call(rank, lambda: self._experts(backend, got, made, result))
            if form == "halves":
                backend.combine_send(made, got, case.weighted, y)
                backend.combine_receive(made, got, case.weighted, y)
            else:
                backend.combine(made, got, case.weighted, y)
            self.emulator.call(rank, lambda: setattr(result, "y", y.float().numpy().copy()))
            known(0.25)
            known(-1.0)

        return combine

    def _experts(self, backend: EmulatedBackend, got: Dispatched, made: torch.Tensor, result: Result) -> None:
        spec = self.case.spec
        x = expert_major(got)
        if spec.output == "raw":
            assert got.scales is not None
            scales = got.scales if got.index is None else got.scales.index_select(0, got.index)
            x = x.float() * scales.repeat_interleave(FP8_BLOCK, 1)[:, : spec.hidden]
        owner: Any = backend
        made.copy_(apply_experts(owner, got, x.to(made.dtype)))
        result.offsets, result.counts = got.expert_offsets.tolist(), got.expert_counts.tolist()
        result.x = x.to(made.dtype)[: result.offsets[-1]].float().numpy().copy()
        result.weights = got.weights.numpy().copy()


def _check_unchanged(before: torch.Tensor, metadata: torch.Tensor) -> None:
    assert torch.equal(before, metadata), "a dispatch of known routing changed the results of the dispatch before"
