"""Count the bytes that a step must move between ranks, by its spec and routing, whatever backend moves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import ROW_BYTES, ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.memory.layout import round_up
from raymoe.memory.world import World
from raymoe.workload.inputs import Draw
from raymoe.workload.progress import OpWork, StepWork


def rows_for(ids: torch.Tensor, ranks: int, experts: int) -> list[int]:
    """Return how many of these tokens each rank needs. A token counts once for a rank, even with several experts there.

    >>> rows_for(torch.tensor([[0, 1], [1, 2], [-1, 3]]), ranks=2, experts=4)
    [2, 2]
    """
    owner = torch.where(ids < 0, -1, ids // (experts // ranks))
    return [int((owner == rank).any(dim=-1).sum()) for rank in range(ranks)]


@dataclass(frozen=True)
class Traffic:
    """Bytes between ranks: `total` of all ranks, and `busiest`, the most through one rank's port in one direction."""

    total: float
    busiest: float
    sent: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """Bytes that each rank sends."""


@dataclass(frozen=True)
class ExchangeTraffic:
    """The traffic of an exchange. Combine sends rows the other way; `both` is one after the other."""

    dispatch: Traffic
    combine: Traffic
    both: Traffic

    @property
    def by_op(self) -> dict[str, Traffic]:
        """The traffic by the operation's name in result lines."""
        return {"dispatch": self.dispatch, "combine": self.combine, "exchange": self.both}

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[float]],
        row_bytes: int,
        combine_row_bytes: int | None = None,
        combine_rows: Sequence[Sequence[float]] | None = None,
    ) -> ExchangeTraffic:
        """Count the bytes when `rows[s][d]` rows go from rank s to rank d. Rows that stay on their rank do not count.

        A row has `row_bytes`, scales included, and in a combine `combine_row_bytes` (default: `row_bytes`). As many
        rows return as went, unless `combine_rows[s][d]` says how many rank d returns to rank s.

        >>> ExchangeTraffic.of([[5, 3], [1, 5]], row_bytes=10).both
        Traffic(total=80, busiest=40)
        >>> ExchangeTraffic.of([[5, 3], [1, 5]], row_bytes=5, combine_row_bytes=10)
        ExchangeTraffic(dispatch=Traffic(total=20, busiest=15), combine=Traffic(total=40, busiest=30), \
both=Traffic(total=60, busiest=35))
        >>> skewed = ExchangeTraffic.of([[5, 3], [1, 5]], row_bytes=10)
        >>> skewed.dispatch.sent, skewed.combine.sent
        ((30, 10), (10, 30))
        >>> ExchangeTraffic.of([[9, 9], [9, 9]], row_bytes=10, combine_rows=[[5, 3], [1, 5]]).both
        Traffic(total=220, busiest=120)
        """
        dispatch = _through_ports(rows, row_bytes)
        # Rows of a combine go the other way: a port receives what it would send in a dispatch of them.
        reverse = _through_ports(combine_rows or rows, row_bytes if combine_row_bytes is None else combine_row_bytes)
        combine = [(sent, received) for received, sent in reverse]
        both = [
            (sent + sent_back, received + received_back)
            for (sent, received), (sent_back, received_back) in zip(dispatch, combine, strict=True)
        ]
        return cls(
            *(
                Traffic(sum(sent for sent, _ in ports), max(map(max, ports)), tuple(sent for sent, _ in ports))
                for ports in (dispatch, combine, both)
            )
        )


def _through_ports(rows: Sequence[Sequence[float]], row_bytes: int) -> list[tuple[float, float]]:
    """Return the bytes that each rank sends, and those that it receives.

    >>> _through_ports([[5, 3], [1, 5]], row_bytes=10)
    [(30, 10), (10, 30)]
    """
    ranks = range(len(rows))
    return [
        (
            sum(rows[rank][peer] for peer in ranks if peer != rank) * row_bytes,
            sum(rows[peer][rank] for peer in ranks if peer != rank) * row_bytes,
        )
        for rank in ranks
    ]


def traffic_of(world: World, draws: Sequence[Draw], spec: ExchangeSpec) -> ExchangeTraffic:
    """Return the traffic of an average step, inside domains. `draws` are this rank's; all ranks call this together."""
    counts = [rows_for(draw.ids, world.size, spec.experts) for draw in draws]
    mean = [sum(to_peer) / len(counts) for to_peer in zip(*counts, strict=True)]
    tokens = sum(len(draw.ids) for draw in draws) / len(draws)
    answers: list[tuple[list[float], float]] = world.swap((mean, tokens), "traffic")  # type: ignore[assignment]
    needed = [to_peer for to_peer, _ in answers]
    if world.domains > 1:
        needed = rows_inside(needed, world.domain.size)
    sent = [[tokens] * world.size for _, tokens in answers] if spec.by_copy_engine else needed
    return ExchangeTraffic.of(sent, spec.wire_row_bytes, spec.combine_row_bytes, needed)


# Several domains: rows cross the network to the rank of their rail, which sends them on inside its domain.


def rows_inside(rows: Sequence[Sequence[float]], size: int) -> list[list[float]]:
    """Count rows by the ranks that send them inside domains of `size` ranks. `rows` counts those of each source.

    The rows of rank s for rank d come from the rank of d's domain that has the place of s.

    >>> rows_inside([[5, 1, 2, 3], [0, 5, 4, 1], [7, 0, 5, 0], [0, 0, 6, 5]], size=2)
    [[12, 1, 0, 0], [0, 5, 0, 0], [0, 0, 7, 3], [0, 0, 10, 6]]
    """
    ranks = range(len(rows))
    inside: list[list[float]] = [[0] * len(rows) for _ in ranks]
    for source in ranks:
        for rank in ranks:
            inside[rank // size * size + source % size][rank] += rows[source][rank]
    return inside


def bytes_between_domains(spec: ExchangeSpec, ranks: int, domains: int, device: str = "cpu") -> dict[str, int]:
    """Return the bytes that all ranks together send over the network in a step, by operation.

    Blocks have one size, whatever the routing (`hierarchical.py`, `hierarchical_gpu.py`). GPU ranks do
    not agree on an operation, their ids have 64 bits, and rows may cross as fp8, with their scales after the weights.
    The last word is the pass of a backward pass.

    >>> spec = ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2)
    >>> bytes_between_domains(spec, ranks=4, domains=2)
    {'dispatch': 4768, 'combine': 5280, 'exchange': 10048}
    >>> bytes_between_domains(spec, ranks=4, domains=2, device="cuda")
    {'dispatch': 4928, 'combine': 4224, 'exchange': 9152}
    >>> spec = ExchangeSpec(tokens=8, hidden=64, experts=4, topk=2, wire="float8_e4m3")
    >>> bytes_between_domains(spec, ranks=4, domains=2, device="cuda")["dispatch"]
    3008
    """
    blocks, on_gpus = ranks * (domains - 1), device == "cuda"
    agreement = 0 if on_gpus else AGREEMENT_BYTES
    entries = spec.tokens * spec.topk
    fp8 = spec.dispatch_wire == FP8
    scales = SCALE_BYTES * spec.tokens * spec.scales if fp8 else 0
    published = ENTRY_BYTES * entries
    if on_gpus:
        published = round_up(GPU_ENTRY_BYTES * entries + scales, ROW_BYTES) + Refusal.NBYTES
    dispatch = blocks * (agreement + spec.tokens * (spec.hidden if fp8 else spec.row_bytes) + published)
    status = Refusal.NBYTES if on_gpus else spec.combine_row_bytes
    combine = blocks * (agreement + spec.tokens * spec.combine_row_bytes + ranks // domains * status)
    return {"dispatch": dispatch, "combine": combine, "exchange": dispatch + combine}


def domain_keys(world: World, spec: ExchangeSpec, op: str) -> dict[str, int | None]:
    """Return the number of domains, and the bytes of an operation between them. Empty where there is one domain.

    None for operations that send nothing over the network by themselves.
    """
    if world.domains == 1:
        return {}
    sent = bytes_between_domains(spec, world.size, world.domains, world.device.type)
    return {"domains": world.domains, "bytes_net": sent.get(op)}


AGREEMENT_BYTES = 40  # five words, by which the ranks of a rail agree on an operation
ENTRY_BYTES = 8  # the id and the weight of a token's expert
GPU_ENTRY_BYTES = 12
SCALE_BYTES = 4


# The load of experts, and the work of a step for the progress that a rank reports.

_COUNTS_AT_ONCE = 8192  # counts in one message of the world's board


@dataclass(frozen=True)
class Load:
    """The rows of experts and ranks in the steps of a case."""

    by_expert: list[float]
    """Rows of each expert in an average step."""
    busiest_rows: int
    """The most rows that a rank receives in any step, with the gaps between its experts."""
    capacity: int
    """The rows for which a rank has memory."""

    def imbalance(self, of: slice = slice(None)) -> float:
        """Return the rows of the busiest of some experts, divided by the mean of all; 0 if no token has an expert.

        >>> load = Load([4, 0, 2, 2], busiest_rows=16, capacity=64)
        >>> load.imbalance(), load.imbalance(slice(2, 4)), Load([0, 0], 0, 64).imbalance()
        (2.0, 1.0, 0.0)
        """
        total = sum(self.by_expert)
        return max(self.by_expert[of]) * len(self.by_expert) / total if total else 0.0


def expert_load(world: World, draws: Sequence[Draw], spec: ExchangeSpec) -> Load:
    """Count the rows of each expert and of the busiest rank, over the tokens of all ranks.

    All ranks call this together. `draws` are this rank's, as many as the others have. A token counts once for each
    of its experts, and for the rows of a rank with layout `token` once in all.
    """
    everyone = entries_of_experts(world, draws, spec.experts)
    if spec.by_token:
        by_rank = _tokens_of_ranks(world, draws, spec.local_experts(world.size))
    else:
        by_rank = _aligned(everyone, spec.alignment).view(len(draws), world.size, -1).sum(dim=2)
    mean = (everyone.sum(dim=0) / len(draws)).tolist()
    return Load(mean, int(by_rank.max()), spec.rows(world.size))


def entries_of_experts(world: World, draws: Sequence[Draw], experts: int) -> torch.Tensor:
    """Return the entries of each expert in each draw, int64[draws, E], over the tokens of all ranks."""
    counts = torch.stack([torch.bincount(draw.ids[draw.ids >= 0], minlength=experts) for draw in draws])
    return _sum_of_ranks(world, counts.flatten()).view(len(draws), experts)


def _tokens_of_ranks(world: World, draws: Sequence[Draw], local: int) -> torch.Tensor:
    """Return the tokens of all ranks that each rank gets in each draw, int64[draws, ranks]."""
    ranks = torch.arange(world.size)
    counts = torch.stack(
        [(draw.ids.div(local, rounding_mode="floor")[:, :, None] == ranks).any(1).sum(0) for draw in draws]
    )
    return _sum_of_ranks(world, counts.flatten()).view(len(draws), world.size)


def _aligned(rows: torch.Tensor, alignment: int) -> torch.Tensor:
    return (rows + alignment - 1) // alignment * alignment


def _sum_of_ranks(world: World, counts: torch.Tensor) -> torch.Tensor:
    sums = []
    for start in range(0, len(counts), _COUNTS_AT_ONCE):
        answers: list[list[int]] = world.swap(counts[start : start + _COUNTS_AT_ONCE].tolist(), "expert load")  # type: ignore[assignment]
        sums.append(torch.tensor(answers).sum(dim=0))
    return torch.cat(sums)


def work_of(
    world: World,
    draws: Sequence[Draw],
    load: Load,
    traffic: ExchangeTraffic,
    ops: Iterable[tuple[str, Mapping[str, str | None]]],
) -> StepWork:
    """Return this rank's work of an average step. `ops` are those that it times, in order."""
    nothing = Traffic(0, 0, (0.0,) * world.size)
    timed = [
        OpWork(op, traffic.by_op.get(op, nothing).sent[world.rank], {key: text for key, text in how.items() if text})
        for op, how in ops
    ]
    tokens = sum(len(draw.ids) for draw in draws) / len(draws)
    local = len(load.by_expert) // world.size
    own_experts = slice(world.rank * local, (world.rank + 1) * local)
    total = sum(load.by_expert)
    rank_load = sum(load.by_expert[own_experts]) * world.size / total if total else 0.0
    return StepWork(tuple(timed), tokens, load.imbalance(own_experts), rank_load)
