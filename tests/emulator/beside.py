"""Steps whose experts are the real product, with a combine beside it that sends its pieces of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.cuda.launch import Shape
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.peer import column_pieces
from raymoe.moe.products import THREADS, Product, TileClass
from tests.emulator.build import Change
from tests.emulator.machine import Emulator
from tests.emulator.ranks import LONG_S, EmulatedBackend, backend, small, spec_for, workspaces
from tests.emulator.tensor_map import emulated_map
from tests.unit.exchange.exchange_cases import Batch, Case, batches
from tests.unit.exchange.exchange_judge import judge_combine

TILES = TileClass(16, 2)


@dataclass
class StepsBeside:
    """Steps of all ranks: dispatch, product, combine. The product computes what `apply_experts` does."""

    emulator: Emulator
    case: Case
    backends: list[EmulatedBackend]
    blocks: int = 2
    """Of a product."""
    told: Callable[[int, int], tuple[bool, bool]] = lambda _step, _rank: (True, True)
    """Whether the product of a step and rank stores pieces, and whether the combine knows of it."""
    lost: tuple[int, int] = (-1, -1)
    """The step and rank whose product is never launched."""
    change: Callable[[int, int, Batch], object] = lambda _step, _rank, _batch: None
    """Spoils the input of a step and rank."""

    def __post_init__(self) -> None:
        self.results: list[list[torch.Tensor]] = []

    def enqueue(self, step: int) -> None:
        self.results.append([])
        for rank, (owner, batch) in enumerate(zip(self.backends, batches(self.case, step), strict=True)):
            spec, case = self.case.spec, self.case
            self.change(step, rank, batch)
            rows = spec.rows(case.ranks)
            count = torch.tensor([batch.num_tokens], dtype=torch.int32) if case.prefix else None
            out = owner.new((rows, spec.hidden), batch.x.dtype, "out")
            made = owner.new((rows, spec.hidden), batch.x.dtype, "expert rows")
            y = owner.new(tuple(batch.x.shape), batch.x.dtype, "y")
            got = owner.dispatch(Tokens(batch.x, batch.ids, batch.weights, count), out)
            pieces = owner.column_pieces(got)
            assert pieces is not None
            tells, known = self.told(step, rank)
            pieces.rows = made if known else None
            if (step, rank) != self.lost:
                self._launch(owner, got, made, pieces if tells else None)
            owner.combine_beside_product(made, got, case.weighted, y, pieces)
            self.results[step].append(torch.empty_like(y))
            self.emulator.call(rank, lambda at=(step, rank), y=y: self.results[at[0]][at[1]].copy_(y))

    def judge(self, first: int = 0) -> None:
        """Compare y of the steps from `first` on with the oracle, and look at the words of pieces."""
        for owner in self.backends:
            owner.check()
        for step, results in enumerate(self.results[first:], first):
            for y, batch in zip(results, batches(self.case, step), strict=True):
                judge_combine(self.case, batch, y.float().numpy())
        for owner in self.backends:
            stored = owner._pieces.words[column_pieces.MOST_PIECES :]  # type: ignore[union-attr]
            assert not stored.any(), "a count of stored tiles is not 0 after the last step"

    def _launch(self, owner: EmulatedBackend, got: Dispatched, y: torch.Tensor, pieces: Any) -> None:
        """Enqueue the product of each expert's factor times the identity, plus its bias."""
        rank, hidden, local = owner.world.rank, self.case.spec.hidden, len(got.expert_counts)
        numbers = torch.arange(local).double() + rank * local
        weight = torch.eye(hidden).double() * (0.5 + numbers / 8)[:, None, None]
        bias = ((numbers - 2.25) / 4)[:, None].expand(local, hidden)
        placed = [owner.place(each.to(y.dtype).contiguous()) for each in (weight, bias)]
        product = Product(
            got.x, placed[0], got.expert_offsets, got.expert_counts, y, bias=placed[1], tiles=TILES, pieces=pieces
        )
        first, second, tokens = product.maps()
        encoded = emulated_map(first), emulated_map(second), tuple(map(emulated_map, tokens))
        params = product.params(encoded, owner.place(torch.zeros(1, dtype=torch.int32)).data_ptr())
        shape = Shape(self.blocks, THREADS, TILES.shared_bytes(local))
        self.emulator.launch(rank, product.source(), shape, params)


def run_beside(
    seed: int,
    routings: Sequence[str] = ("uniform", "skewed"),
    changes: Sequence[Change] = (),
    ranks: int = 2,
    told: Callable[[int, int], tuple[bool, bool]] = lambda _step, _rank: (True, True),
    **fields: Any,
) -> None:
    """Run steps and judge them. A piece has one tile of the product, 256 columns."""
    with steps_beside(seed, routings, changes, ranks, **fields) as steps:
        steps.told = told
        for step in range(len(routings)):
            steps.enqueue(step)
        steps.emulator.run(seed)
        steps.judge()


@contextmanager
def steps_beside(
    seed: int,
    routings: Sequence[str],
    changes: Sequence[Change] = (),
    ranks: int = 2,
    timeout_s: float = LONG_S,
    **fields: Any,
) -> Iterator[StepsBeside]:
    spec = spec_for("fused", **{"tokens": 9, "hidden": 640, "experts": 2 * ranks, "topk": 2, **fields})
    with Emulator(ranks, changes=tuple(changes)) as emulator:
        spaces = workspaces(emulator, spec, stamped=seed % 2 == 0, timeout_s=timeout_s)
        case = Case(ranks, spec, "auto", tuple(routings), seed=seed)
        yield StepsBeside(emulator, case, [backend("fused", space, spec, small) for space in spaces])
