"""The reference arithmetic of dispatch and combine for all ranks at once; tests compare every backend with it.

Nothing here moves between ranks and nothing is fast. A *routing* is the input of one rank: ids[T', K] and
weights[T', K]. Expert e lives on rank e // L, where L = experts / ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import round_up


def rank_rows(ids: torch.Tensor, rank: int, local_experts: int) -> list[int]:
    """Return the tokens that have an expert on `rank`. Each sends one row, however many experts of that rank it names.

    >>> ids = torch.tensor([[0, 1], [2, 0], [3, -1], [-1, -1]])
    >>> rank_rows(ids, rank=0, local_experts=2), rank_rows(ids, rank=1, local_experts=2)
    ([0, 1], [1, 2])
    """
    there = (ids >= rank * local_experts) & (ids < (rank + 1) * local_experts)
    return [token for token, hit in enumerate(there.any(dim=1).tolist()) if hit]


def expert_entries(ids: Sequence[torch.Tensor], expert: int) -> list[tuple[int, int, int]]:
    """Return the entries that `expert` receives, ordered by (source rank, token, k). A token may name it several times.

    >>> expert_entries([torch.tensor([[0, 1], [1, 1]]), torch.tensor([[2, 1]])], expert=1)
    [(0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1)]
    """
    entries: list[tuple[int, int, int]] = []
    for source, theirs in enumerate(ids):
        entries += [(source, token, k) for token, k in (theirs == expert).nonzero().tolist()]
    return entries


def expert_offsets(counts: Sequence[int], alignment: int, group: int = 1) -> list[int]:
    """Return where each expert's rows begin: after the previous expert's rows, at a multiple of `alignment`.

    With a `group`, only the first of so many experts begins at a multiple.

    >>> expert_offsets([3, 0, 5], alignment=4)
    [0, 4, 4, 12]
    >>> expert_offsets([3, 0, 5, 2], alignment=4, group=2)
    [0, 3, 4, 9, 12]
    """
    offsets = [0]
    for number, count in enumerate(counts, 1):
        end = offsets[-1] + count
        offsets.append(round_up(end, alignment) if number % group == 0 else end)
    return offsets


@dataclass
class Plan:
    """The rows that one rank receives: (source, token, k) for each expert-major place, None in gaps."""

    entries: list[tuple[int, int, int] | None]
    counts: list[int]
    offsets: list[int]


def plan(ids: Sequence[torch.Tensor], rank: int, local_experts: int, alignment: int, group: int = 1) -> Plan:
    """Return the entry of every place on `rank`.

    >>> plan([torch.tensor([[0, 1]]), torch.tensor([[1, 3]])], rank=0, local_experts=2, alignment=2)
    Plan(entries=[(0, 0, 0), None, (0, 0, 1), (1, 0, 0)], counts=[1, 2], offsets=[0, 2, 4])
    """
    experts = range(rank * local_experts, (rank + 1) * local_experts)
    entries_by_expert = [expert_entries(ids, expert) for expert in experts]
    counts = [len(entries) for entries in entries_by_expert]
    offsets = expert_offsets(counts, alignment, group)
    places: list[tuple[int, int, int] | None] = [None] * offsets[-1]
    for entries, start in zip(entries_by_expert, offsets[:-1], strict=True):
        places[start : start + len(entries)] = entries
    return Plan(places, counts, offsets)


def dispatch(xs: Sequence[torch.Tensor], theirs: Plan, capacity: int) -> torch.Tensor:
    """Return `x[C, H]` of the rank whose plan is `theirs`; zeros in gaps and after the last row.

    >>> xs = [torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]])]
    >>> dispatch(xs, plan([torch.tensor([[0]]), torch.tensor([[0]])], 0, 1, 4), capacity=4)[:, 0].tolist()
    [1.0, 2.0, 0.0, 0.0]
    """
    x = xs[0].new_zeros(capacity, xs[0].shape[1])
    for place, entry in enumerate(theirs.entries):
        if entry is not None:
            source, token, _ = entry
            x[place] = xs[source][token]
    return x


def combine(
    rows: Sequence[torch.Tensor],
    plans: Sequence[Plan],
    weights: Sequence[torch.Tensor | None],
    source: int,
    tokens: int,
    wire: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `y[T', H]` of `source`, from the expert-major rows of all ranks.

    A rank multiplies its experts' rows of a token by their weights, if there are weights. It sums them in float32, in
    the order of k, and rounds once, to `wire` (by default the rows' dtype). The source sums the ranks' rows in float32,
    in rank order, and rounds once, to the rows' dtype.

    >>> plans = [plan([torch.tensor([[0, 1], [-1, 1]])], rank=0, local_experts=2, alignment=1)]
    >>> rows = torch.tensor([[10.0], [1.0], [2.0]])  # expert 0: token 0; expert 1: tokens 0 and 1
    >>> combine([rows], plans, [torch.tensor([[0.5, 1.0], [0.0, 3.0]])], source=0, tokens=3)[:, 0].tolist()
    [6.0, 6.0, 0.0]

    bfloat16 cannot hold a sum of 257; it crosses as 256.

    >>> rows, ids = torch.tensor([[255.0], [2.0]]), [torch.tensor([[0, 1]])]
    >>> combine([rows], [plan(ids, 0, 2, 1)], [None], source=0, tokens=1, wire=torch.bfloat16).tolist()
    [[256.0]]
    """
    own_weights = weights[source]
    y = torch.zeros(tokens, rows[0].shape[1])
    for theirs, out in zip(plans, rows, strict=True):
        sums: dict[int, torch.Tensor] = {}
        places = [(entry[1], entry[2], i) for i, entry in enumerate(theirs.entries) if entry and entry[0] == source]
        for token, k, place in sorted(places):
            weight = 1.0 if own_weights is None else own_weights[token, k]
            sums[token] = sums.get(token, torch.zeros_like(y[0])) + out[place].float() * weight
        for token, total in sums.items():
            y[token] += total.to(wire or out.dtype).float()
    return y.to(rows[0].dtype)


@dataclass
class TokenPlan:
    """The rows that one rank receives with layout `token`: (source, token) of each, and the token's choices there."""

    rows: list[tuple[int, int]]
    topk_idx: torch.Tensor  # [n, K] numbers of experts on the rank; -1 elsewhere
    weights: torch.Tensor  # [n, K]


def token_plan(
    ids: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rank: int, local_experts: int
) -> TokenPlan:
    """Return the rows of `rank`, in the order (source rank, token).

    >>> ids, weights = [torch.tensor([[0, 2], [3, 2]]), torch.tensor([[1, 1]])], [torch.ones(2, 2), torch.ones(1, 2)]
    >>> theirs = token_plan(ids, weights, rank=1, local_experts=2)
    >>> theirs.rows, theirs.topk_idx.tolist(), theirs.weights.tolist()
    ([(0, 0), (0, 1)], [[-1, 0], [1, 0]], [[0.0, 1.0], [1.0, 1.0]])
    """
    rows = [(source, token) for source, theirs in enumerate(ids) for token in rank_rows(theirs, rank, local_experts)]
    chosen = torch.stack([ids[source][token] for source, token in rows]) if rows else ids[0][:0]
    weighed = torch.stack([weights[source][token] for source, token in rows]) if rows else weights[0][:0]
    here = (chosen >= rank * local_experts) & (chosen < (rank + 1) * local_experts)
    return TokenPlan(rows, torch.where(here, chosen - rank * local_experts, -1), torch.where(here, weighed, 0.0))


def combine_sums(
    sums: Sequence[torch.Tensor], plans: Sequence[TokenPlan], source: int, tokens: int, wire: torch.dtype
) -> torch.Tensor:
    """Return `y[T', H]` of `source`, from a sum for each row of all ranks, rounded to `wire`, added in rank order.

    >>> plans = [TokenPlan([(0, 1)], torch.zeros(1, 1), torch.zeros(1, 1))] * 2
    >>> combine_sums([torch.ones(1, 2), torch.ones(1, 2)], plans, source=0, tokens=2, wire=torch.float32).tolist()
    [[0.0, 0.0], [2.0, 2.0]]
    """
    y = torch.zeros(tokens, sums[0].shape[1])
    for theirs, rows in zip(plans, sums, strict=True):
        for (origin, token), row in zip(theirs.rows, rows, strict=False):
            if origin == source:
                y[token] += row.to(wire).float()
    return y.to(sums[0].dtype)


def bytes_wire(ids: torch.Tensor, rank: int, ranks: int, spec: ExchangeSpec) -> int:
    """Return the bytes of rows that a dispatch sends from `rank`: a token goes once to each other rank that needs it.

    >>> spec = ExchangeSpec(tokens=4, hidden=8, experts=4, topk=2, dtype="float32")
    >>> bytes_wire(torch.tensor([[0, 2], [2, 3], [1, 0]]), rank=0, ranks=2, spec=spec)  # two rows of 32 bytes
    64

    The copy engine sends each token to each other rank.

    >>> from dataclasses import replace
    >>> bytes_wire(torch.tensor([[0, 2], [2, 3], [1, 0]]), rank=0, ranks=2, spec=replace(spec, transport="copy_engine"))
    96
    """
    if spec.by_copy_engine:
        return (ranks - 1) * len(ids) * spec.wire_row_bytes
    local = spec.local_experts(ranks)
    rows = sum(len(rank_rows(ids, peer, local)) for peer in range(ranks) if peer != rank)
    return rows * spec.wire_row_bytes
