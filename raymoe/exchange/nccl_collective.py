"""Dispatch and combine over NCCL all-to-alls, as a careful user of torch.distributed would write them.

A dispatch tells all ranks the ids and weights of its tokens, by an all-gather of a fixed size. From what it hears each
rank works out on the device how many rows go where; the host waits for these numbers, once, and the rows follow, each
once for each (token, destination rank). A combine needs no wait: the numbers are known.

Because of that wait it cannot be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.telling import Rounds, Telling
from raymoe.exchange.tensor_plan import Heard, Places, sum_rows
from raymoe.memory.world import World


@dataclass(frozen=True)
class Traffic:
    """Which rows go where and come from where. Numbers are Python's; tensors are on the device.

    Rows that leave are in the order (destination, token), rows that arrive in the order (source, token).
    """

    giving: list[int]  # [R] rows to each rank
    taking: list[int]  # [R] rows from each rank
    tokens: torch.Tensor  # int64[sum(giving)] the token of each row that leaves
    arrived: torch.Tensor  # int64[sum(taking)] which of the N tokens of all ranks each row that arrives is of
    row_of: torch.Tensor  # int64[N + 1] the arrived row of each token; N where it has none
    home: torch.Tensor  # int64[T, R] the row that comes back for each token from each rank; R*T where none does


@dataclass(frozen=True)
class Counted:
    """The same before the host knows its numbers."""

    going: torch.Tensor  # bool[R, T]
    coming: torch.Tensor  # bool[R, T]
    numbers: torch.Tensor  # int64[2 * R + 1]: rows to each rank, rows from each, rows that the experts get, with gaps

    @classmethod
    def of(cls, heard: Heard, places: Places, rank: int, spec: ExchangeSpec) -> Counted:
        ranks = len(heard.ids)
        local = spec.local_experts(ranks)
        going = heard.going(rank, local)
        there = heard.ids - rank * local
        coming = ((there >= 0) & (there < local)).any(dim=2)
        return cls(going, coming, torch.cat([going.sum(1), coming.sum(1), places.offsets[-1:].long()]))

    def known(self, numbers: list[int]) -> tuple[Traffic, int]:
        """With the numbers on the host, and with how many places the experts' rows take."""
        ranks, tokens = self.going.shape
        giving, taking = numbers[:ranks], numbers[ranks : 2 * ranks]
        none = ranks * tokens
        leaving = _first_true(self.going.flatten(), sum(giving))
        arrived = _first_true(self.coming.flatten(), sum(taking))
        row_of = torch.full((none + 1,), none, device=arrived.device)
        row_of[arrived] = torch.arange(len(arrived), device=arrived.device)
        home = torch.full((none,), none, device=arrived.device)
        home[leaving] = torch.arange(len(leaving), device=arrived.device)
        return Traffic(giving, taking, leaving % tokens, arrived, row_of, home.view(ranks, tokens).t()), numbers[-1]


def _first_true(flags: torch.Tensor, count: int) -> torch.Tensor:
    """Where the flags are set, given how many are: `nonzero` would ask the device.

    >>> _first_true(torch.tensor([False, True, False, True]), 2).tolist()
    [1, 3]
    """
    return torch.sort(~flags, stable=True).indices[:count]


@dataclass(frozen=True)
class _WayHome:
    heard: Heard
    places: Places
    traffic: Traffic


class NcclCollective:
    """Rows that arrive lie one behind the other in a table, source after source; its last row stays zero."""

    capturable = False
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, rounds: Rounds) -> None:
        self._rank, self._size, self._spec = world.rank, world.size, spec
        self._rounds, self._telling = rounds, Telling(world, spec, rounds)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        most = world.size * spec.tokens
        self._table = torch.zeros(most + 1, spec.hidden, dtype=dtype, device=world.device)
        # Rows that leave with a dispatch and sums that leave with a combine take turns in one place.
        leaving = torch.empty(most * max(spec.row_bytes, spec.home_row_bytes), dtype=torch.uint8, device=world.device)
        home: torch.dtype = getattr(torch, spec.combine_wire)
        self._packed = leaving[: most * spec.row_bytes].view(dtype).view(most, spec.hidden)
        self._sums = leaving[: most * spec.home_row_bytes].view(home).view(most, spec.home_width)
        self._returned = torch.empty_like(self._sums)
        self._numbers = torch.empty(2 * world.size + 1, dtype=torch.int64, pin_memory=world.device.type == "cuda")

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        heard = self._telling.hear(tokens)
        places = Places.of(heard, self._rank, self._spec)
        counted = Counted.of(heard, places, self._rank, self._spec)
        self._numbers.copy_(counted.numbers, non_blocking=True)
        self._rounds.wait("dispatch")
        traffic, filled = counted.known(self._numbers.tolist())
        packed, table = self._packed[: len(traffic.tokens)], self._table[: len(traffic.arrived)]
        torch.index_select(tokens.x, 0, traffic.tokens, out=packed)
        self._rounds.all_to_all(torch.split(table, traffic.taking), torch.split(packed, traffic.giving))
        if out is not None:
            torch.index_select(self._table, 0, traffic.row_of[places.token[:filled]], out=out[:filled])
        return Dispatched(
            x=self._table if out is None else out,
            weights=places.weights,
            expert_offsets=places.offsets,
            expert_counts=places.counts,
            index=traffic.row_of[places.token] if out is None else None,
            tokens=len(tokens.x),
            _home=_WayHome(heard, places, traffic),
            _owner=self,
        )

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, _WayHome)
        traffic = home.traffic
        sums, returned = self._sums[: len(traffic.arrived)], self._returned[: len(traffic.tokens)]
        hidden = self._spec.hidden
        weights = home.heard.weights.flatten(0, 1)[traffic.arrived] if weighted else None
        sum_rows(rows, home.places.of_pair[traffic.arrived], weights, sums[:, :hidden])
        self._rounds.all_to_all(torch.split(returned, traffic.giving), torch.split(sums, traffic.taking))
        sum_rows(returned[:, :hidden], traffic.home[: got.tokens], None, out)
        self._telling.judge(home.heard, out)

    def check(self) -> None:
        self._telling.check()

    def close(self, together: bool) -> None:
        """Nothing: the rounds are the world's, and memory is torch's."""
