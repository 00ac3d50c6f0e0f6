"""The kernels of NCCL's backends for all ranks, emulated in one process, with copies in place of NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.nccl.nccl_kernels import RoundKernels
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import Change
from tests.unit.exchange import plan
from tests.unit.exchange.exchange_cases import Batch, Case, batches
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher, EmulatedWords


@dataclass(frozen=True)
class Named:
    """The facts of a world that the kernels need."""

    rank: int
    size: int
    device: torch.device


def read_now(op: str, memory: torch.Tensor) -> torch.Tensor:
    """Read memory of emulated kernels, which are done."""
    return memory


@dataclass
class Rank:
    """One rank's kernels, and the results of its dispatch."""

    kernels: RoundKernels
    got: Dispatched
    saved: torch.Tensor
    heard: EmulatedWords


class Ranks:
    """All ranks of a case, one after the other, with copies in place of NCCL."""

    def __init__(self, case: Case, compact: bool, launcher: EmulatedLauncher | None = None) -> None:
        self.case, self.spec, self.compact = case, case.spec, compact
        launcher = launcher or EmulatedLauncher()
        worlds: list[Any] = [Named(rank, case.ranks, torch.device("cpu")) for rank in range(case.ranks)]
        with mock.patch("raymoe.exchange.nccl.nccl_kernels.ENTRIES_A_RUN", 8):
            self.kernels = [RoundKernels(world, case.spec, launcher, compact=compact) for world in worlds]
        self.launcher = launcher

    def dispatch(self, sent: Sequence[Tokens]) -> list[Rank]:
        ranks = []
        for kernels, tokens in zip(self.kernels, sent, strict=True):
            got, saved = self.new(kernels, tokens)
            kernels.write_metadata(0, tokens, saved)
            ranks.append(Rank(kernels, got, saved, self.launcher.words(1 + 2 * len(self.kernels))))
        metadata = [rank.kernels.metadata(rank.saved)[1].clone() for rank in ranks]
        for rank in ranks:
            rank.kernels.metadata(rank.saved)[0].copy_(torch.cat(metadata))
            rank.kernels.number(0, rank.got, rank.saved, rank.heard)
        self.move(ranks, sent)
        for rank, tokens in zip(ranks, sent, strict=True):
            if rank.got.index is None:
                rank.kernels.place(0, rank.got, rank.saved, tokens.x if self.compact else None)
        return ranks

    def new(self, kernels: RoundKernels, tokens: Tokens) -> tuple[Dispatched, torch.Tensor]:
        shape, dtype = (self.spec.rows(self.case.ranks), self.spec.hidden), tokens.x.dtype
        out = torch.full(shape, torch.nan, dtype=dtype) if self.spec.layout == "expert" else None
        got, saved = kernels.new(tokens, out, kernels), kernels.new_memory()
        for tensor in (got.weights, got.expert_offsets, got.expert_counts, got.index, saved):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xEE)
        blocks = kernels.blocks
        for block in (
            *(blocks.outgoing, blocks.returned, blocks.packed, blocks.outgoing_numbers, blocks.returned_numbers),
        ):
            block.fill_(0xEE)
        kernels.blocks.table[:-1].fill_(0xEE)
        return got, saved

    def move(self, ranks: list[Rank], sent: Sequence[Tokens]) -> None:
        """Copy every rank's rows into the tables of all ranks."""
        size, tokens = len(ranks), self.spec.tokens
        tables = [rank.kernels.blocks.table[:-1].view(size, tokens, -1) for rank in ranks]
        for source, (rank, own_tokens) in enumerate(zip(ranks, sent, strict=True)):
            if not self.compact:
                for table in tables:
                    table[source, : len(own_tokens.x)].view(own_tokens.x.dtype).copy_(own_tokens.x)
                continue
            rank.kernels.pack(0, own_tokens, rank.saved, own=rank.got.index is not None)
            for peer, count in enumerate(rank.heard.read(1, size)):
                if peer != source:
                    tables[peer][source, :count] = rank.kernels.blocks.packed[peer, :count]

    def combine(self, ranks: list[Rank], rows: Sequence[torch.Tensor], weighted: Sequence[bool]) -> list[torch.Tensor]:
        return [y for y, _ in self.combine_with(ranks, rows, weighted, [None] * len(ranks))]

    def combine_with(
        self,
        ranks: list[Rank],
        rows: Sequence[torch.Tensor],
        weighted: Sequence[bool],
        numbers: Sequence[torch.Tensor | None],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Combine on all ranks; return y and the numbers of the entries of each."""
        for rank, products, times, theirs in zip(ranks, rows, weighted, numbers, strict=True):
            rank.kernels.sum_entries(0, products, rank.saved, times, theirs)
        results = []
        for here, rank in enumerate(ranks):
            for peer, other in enumerate(ranks):
                if peer != here:
                    rank.kernels.blocks.returned[peer] = other.kernels.blocks.outgoing[here]
                    rank.kernels.blocks.returned_numbers[peer] = other.kernels.blocks.outgoing_numbers[here]
            y = torch.full((rank.got.tokens, self.spec.hidden), 7, dtype=rows[here].dtype)
            entries = torch.full((rank.got.tokens, self.spec.topk), 7.0)
            rank.kernels.sum_ranks(0, rank.saved, y, None if numbers[here] is None else entries)
            results.append((y, entries))
        return results


def tokens_of(batch: Batch) -> Tokens:
    return Tokens(batch.x, batch.ids, batch.weights, torch.tensor([batch.num_tokens], dtype=torch.int32))


def judge_step(case: Case, compact: bool, launcher: EmulatedLauncher) -> None:
    """Check a dispatch and a combine of all ranks exactly."""
    spec, ranks, sent = case.spec, Ranks(case, compact, launcher), batches(case, 0)
    got = ranks.dispatch([tokens_of(batch) for batch in sent])
    ids = [batch.ids[: batch.num_tokens] for batch in sent]
    local = spec.local_experts(case.ranks)
    plans = [plan.plan(ids, rank, local, spec.alignment, spec.expert_group) for rank in range(case.ranks)]
    rows = []
    for rank, theirs in enumerate(plans):
        judge_places(case, sent, theirs, got[rank].got)
        judge_traffic(case, ids, rank, got[rank], compact)
        rng = np.random.default_rng((case.seed, rank))
        products = torch.from_numpy(rng.uniform(-2, 2, (spec.rows(case.ranks), spec.hidden))).to(sent[0].x.dtype)
        products[[at for at in range(len(products)) if at >= len(theirs.entries) or theirs.entries[at] is None]] = (
            torch.nan
        )
        rows.append(products)
    weights = [batch.weights if case.weighted else None for batch in sent]
    wire: torch.dtype = getattr(torch, spec.combine_wire)
    numbers = [rank.got.weights if case.seed % 2 else None for rank in got]
    for source, (y, entries) in enumerate(ranks.combine_with(got, rows, [case.weighted] * case.ranks, numbers)):
        want = plan.combine([values.nan_to_num() for values in rows], plans, weights, source, len(y), wire)
        assert torch.equal(y, want)
        judge_numbers(sent[source], entries, carried=numbers[source] is not None)
    assert all(rank.kernels.take_refused(read_now) == [] for rank in got)


def judge_places(case: Case, sent: list[Batch], theirs: plan.Plan, got: Dispatched) -> None:
    """Check rows, weights and counts of one rank exactly."""
    spec = case.spec
    assert (got.expert_counts.tolist(), got.expert_offsets.tolist()) == (theirs.counts, theirs.offsets)
    want = plan.dispatch([batch.x for batch in sent], theirs, spec.rows(case.ranks))
    x = got.x if got.index is None else got.x[got.index]
    for place, entry in enumerate(theirs.entries):
        if entry is None:
            assert got.weights[place] == 0
            zeros = spec.padding == "zero" or got.index is not None
            assert (x[place] == 0).all() if zeros else x[place].isnan().all()
        else:
            assert torch.equal(x[place], want[place])
            assert got.weights[place] == sent[entry[0]].weights[entry[1], entry[2]]
    gap = x[len(theirs.entries) :]
    assert (gap == 0).all() if got.index is not None else gap.isnan().all()


def judge_numbers(batch: Batch, entries: torch.Tensor, *, carried: bool) -> None:
    """Check that each entry with an expert has its weight, and the others zero; nothing is written if none is sent."""
    there = batch.ids >= 0
    there[batch.num_tokens :] = False
    want = torch.where(there, batch.weights.float(), 0.0) if carried else torch.full_like(entries, 7.0)
    assert torch.equal(entries, want)


def judge_traffic(case: Case, ids: list[torch.Tensor], rank: int, result: Rank, compact: bool) -> None:
    """Check the numbers that the host reads."""
    local = case.spec.local_experts(case.ranks)
    giving = [len(plan.rank_rows(ids[rank], peer, local)) for peer in range(case.ranks)]
    taking = [len(plan.rank_rows(theirs, rank, local)) for theirs in ids]
    wanted = [*giving, *taking] if compact else [case.spec.tokens] * 2 * case.ranks
    assert result.heard.read(0, 1 + 2 * case.ranks) == [1, *wanted]


def drawn(seed: int, changes: tuple[Change, ...] = ()) -> None:
    """Check the case of this seed, with changed kernels: injected bugs must fail in some seeds."""
    launcher = EmulatedLauncher(seed=seed * 1000, changes=changes)
    launcher.sms = 3 if seed % 5 == 0 else 13
    spec = ExchangeSpec(
        tokens=150 if seed % 5 == 0 else 23,
        hidden=(16, 1032)[seed % 2],
        experts=(9, 120)[seed % 4 == 0],
        topk=3,
        alignment=(4, 1)[seed % 3 == 0],
        layout=("expert", "rank")[seed % 4 > 1],
        expert_group=1 if seed // 4 % 2 else (3, 4)[seed % 4 == 0],
    )
    routing = ("masked", "repeated", "skewed")[seed % 3]
    case = Case(3, spec, "none", (routing,), seed=seed, prefix=True, weighted=seed % 3 == 0)
    judge_step(case, seed % 2 == 0, launcher)
