"""Everything to everyone, by NCCL: the yardstick of a small world.

A dispatch is two all-gathers: of ids and weights, and of all rows, from which every rank picks its own. A combine hands
every rank a block of T sums, zeros for the tokens that have no expert here; the source adds the blocks in rank order.
That is a reduce-scatter whose sum the source takes itself, because NCCL rounds at every hop and in an order of its own.

Nothing depends on a number that only the device knows, so all of it can be captured. The price: C rows are written and
N*K looked at however few there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.captured_memory import CapturedMemory
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.telling import Rounds, Telling
from raymoe.exchange.tensor_plan import Heard, Places, sum_blocks, sum_rows
from raymoe.memory.world import World


@dataclass(frozen=True)
class _WayHome:
    heard: Heard
    places: Places


class NcclAllgather:
    """Row t of source s arrives as row s*T + t of a table, whose last row stays zero."""

    capturable = True
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, rounds: Rounds) -> None:
        self._rank, self._size, self._spec = world.rank, world.size, spec
        self._rounds, self._telling = rounds, Telling(world, spec, rounds)
        self._memory = CapturedMemory(world.device)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._table = torch.zeros(world.size * spec.tokens + 1, spec.hidden, dtype=dtype, device=world.device)
        self._mine = torch.zeros(spec.tokens, spec.hidden, dtype=dtype, device=world.device)
        home: torch.dtype = getattr(torch, spec.combine_wire)
        self._leaving = torch.empty(world.size, spec.tokens, spec.home_width, dtype=home, device=world.device)
        self._returned = torch.empty_like(self._leaving)

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._memory():
            return self._dispatch(tokens, out)

    def _dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        mine = tokens.x
        if len(mine) < self._spec.tokens:
            self._mine[: len(mine)].copy_(mine)
            mine = self._mine
        heard = self._telling.hear(tokens)
        self._rounds.all_gather(self._table[:-1], mine)
        places = Places.of(heard, self._rank, self._spec)
        if out is not None:
            torch.index_select(self._table, 0, places.token, out=out)
        return Dispatched(
            x=self._table if out is None else out,
            weights=places.weights,
            expert_offsets=places.offsets,
            expert_counts=places.counts,
            index=places.token if out is None else None,
            tokens=len(tokens.x),
            _home=_WayHome(heard, places),
            _owner=self,
        )

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, _WayHome)
        with self._memory():
            weights = home.heard.weights.flatten(0, 1) if weighted else None
            sum_rows(rows, home.places.of_pair, weights, self._leaving.flatten(0, 1)[:, : rows.shape[1]])
            self._rounds.all_to_all(list(self._returned), list(self._leaving))
            sum_blocks(self._returned[..., : rows.shape[1]], out)
            self._telling.judge(home.heard, out)

    def check(self) -> None:
        self._telling.check()

    def close(self, together: bool) -> None:  # noqa: ARG002
        """The rounds are the world's, and stay."""
        self._memory.close()
