"""Plan which expert slot of which rank holds which expert, so that ranks get even loads.

Experts with much load have copies, which share it evenly. The plan is greedy and a pure function of its arguments:
ranks that know the load compute the same one. Two steps make a plan from nothing:

1. **Copies.** Each further slot goes to the expert whose copies have the largest load.
2. **Packing.** Copies go to ranks, the largest first, each to the rank with the least load. Then the busiest rank swaps
   copies with others, or drops them, while that takes load off it.

With a placement that exists, a plan moves as little as it can: it changes one slot after the other until the busiest
rank is nearly as good as that of a plan from nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from raymoe.errors import ConfigError

EMPTY = -1
TOLERANCE = 0.01
"""The share by which the busiest rank of a plan that keeps a placement may have more than that of one from nothing."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The expert of each slot of each rank.

    >>> placement = plan_placement(torch.tensor([6, 1, 1, 2]), ranks=2, slots=3)
    >>> placement.experts.tolist()
    [[0, 1, 3], [0, 2, 3]]
    >>> placement.rank_loads(torch.tensor([6, 1, 1, 2])), placement.imbalance(torch.tensor([6, 1, 1, 2]))
    ([5.0, 5.0], 1.0)
    """

    experts: torch.Tensor
    """int32[ranks, slots] on the CPU; -1: the slot is empty."""

    def __post_init__(self) -> None:
        experts = self.experts
        if experts.dim() != 2 or experts.is_floating_point() or experts.device.type != "cpu":
            raise ConfigError(
                f"a placement of {experts.dtype} {list(experts.shape)} on {experts.device}; it is integers "
                "[ranks, slots] on the CPU"
            )

    def copies(self, experts: int) -> list[int]:
        """Return the number of slots that hold each expert."""
        ids = self.experts.flatten().long()
        return torch.bincount(ids[ids >= 0], minlength=experts).tolist()

    def rank_loads(self, load: torch.Tensor) -> list[float]:
        """Return the load of each rank, if copies share the load of their expert evenly."""
        return _Plan(self.experts.tolist(), load.tolist()).loads()

    def imbalance(self, load: torch.Tensor) -> float:
        """Return the load of the busiest rank over the mean load of ranks; 1 if even, 0 without load."""
        loads = self.rank_loads(load)
        return max(loads) * len(loads) / total if (total := sum(loads)) else 0.0

    def moves_from(self, previous: Placement) -> list[tuple[int, int, int]]:
        """Return (rank, slot, expert) for each slot whose weights its rank did not hold in any slot before."""
        before = [set(held) for held in previous.experts.tolist()]
        before += [set()] * (len(self.experts) - len(before))
        return [
            (rank, slot, expert)
            for rank, held in enumerate(self.experts.tolist())
            for slot, expert in enumerate(held)
            if expert != EMPTY and expert not in before[rank]
        ]


def plan_placement(load: torch.Tensor, *, ranks: int, slots: int, previous: Placement | None = None) -> Placement:
    """Place experts with this `load`, int64[E], into `slots` slots of each of `ranks` ranks, with few moves.

    E and the number of ranks are any; each expert has a slot at least, and at most one on a rank. With `previous` the
    busiest rank has at most 1 % more load than in a plan from nothing, and no more slots change than that would change.
    A placement of other ranks or slots is taken as far as it fits.

    >>> first = plan_placement(torch.tensor([5, 4, 3, 2, 1]), ranks=2, slots=3)
    >>> first.experts.tolist(), first.rank_loads(torch.tensor([5, 4, 3, 2, 1]))
    ([[1, 0, 4], [2, 0, 3]], [7.5, 7.5])
    >>> plan_placement(torch.tensor([5, 9, 3, 1, 2]), ranks=2, slots=3, previous=first).moves_from(first)
    [(0, 2, 3), (1, 2, 4)]
    """
    shares = _checked(load, ranks, slots)
    fresh = _Plan([[EMPTY] * slots for _ in range(ranks)], shares)
    fresh.pack(_copies(shares, ranks, slots))
    fresh.even_out()
    if previous is None:
        return fresh.placement()
    before = _cut(previous, ranks, slots, len(shares))
    renamed = fresh.renamed(before)
    kept = _Plan([list(held) for held in before], shares)
    if kept.change(busiest=fresh.busiest() * (1 + TOLERANCE)):
        few, many = (plan.placement() for plan in (kept, renamed))
        old = Placement(torch.tensor(before, dtype=torch.int32, device="cpu"))
        if len(few.moves_from(old)) <= len(many.moves_from(old)):
            return few
    return renamed.placement()


def _checked(load: torch.Tensor, ranks: int, slots: int) -> list[int]:
    if load.dim() != 1 or load.is_floating_point() or load.numel() == 0:
        raise ConfigError(f"load is {load.dtype} {list(load.shape)}; it is the entries of each expert, int64[E]")
    loads: list[int] = load.tolist()
    if min(loads) < 0:
        raise ConfigError(f"expert {loads.index(min(loads))} has load {min(loads)}; loads are 0 or more")
    if ranks < 1 or slots < 1 or ranks * slots < len(loads):
        raise ConfigError(
            f"{len(loads)} experts in {slots} slots on each of {ranks} ranks; every expert needs a slot: "
            f"{-(-len(loads) // max(1, ranks))} slots do"
        )
    return loads


def _cut(previous: Placement, ranks: int, slots: int, experts: int) -> list[list[int]]:
    """Return what a placement of any size leaves in slots: an expert at most once on a rank."""
    if int(previous.experts.max()) >= experts:
        raise ConfigError(f"the previous placement has expert {int(previous.experts.max())}, and load has {experts}")
    table = [[EMPTY] * slots for _ in range(ranks)]
    for held, kept in zip(previous.experts.tolist(), table, strict=False):
        for slot, expert in enumerate(held[:slots]):
            if expert >= 0 and expert not in kept:
                kept[slot] = expert
    return table


def _copies(shares: Sequence[int], ranks: int, slots: int) -> list[int]:
    """Return the number of copies of each expert: further slots go to the largest load of a copy.

    >>> _copies([6, 1, 1, 2], ranks=2, slots=3), _copies([0, 0], ranks=4, slots=1)
    ([2, 1, 1, 2], [1, 1])
    """
    copies = [1] * len(shares)
    for _ in range(ranks * slots - len(shares)):
        open_experts = [expert for expert, count in enumerate(copies) if count < ranks and shares[expert]]
        if not open_experts:
            break
        copies[max(open_experts, key=lambda expert: (shares[expert] / copies[expert], -expert))] += 1
    return copies


@dataclass(frozen=True)
class _Change:
    """Experts that slots get, and the load of the busiest rank among those whose load this changes."""

    busiest: float
    slots: tuple[tuple[int, int, int], ...]  # (rank, slot, expert)

    def gain(self, before: float) -> float:
        """Return how much load it takes off the busiest rank, for each expert that moves."""
        moves = sum(expert != EMPTY for _, _, expert in self.slots)
        return (before - self.busiest) / max(1, moves)


class _Plan:
    """A table of slots that changes until it is a placement."""

    def __init__(self, table: list[list[int]], shares: Sequence[int]) -> None:
        self.table, self.shares = table, shares
        self.holders: list[set[int]] = [set() for _ in shares]
        """The ranks that hold each expert."""
        for rank, held in enumerate(table):
            for expert in held:
                if expert != EMPTY:
                    self.holders[expert].add(rank)

    def placement(self) -> Placement:
        return Placement(torch.tensor(self.table, dtype=torch.int32, device="cpu"))

    def share(self, expert: int, more: int = 0) -> float:
        """Return the load of each copy of an expert, if it had `more` copies."""
        return 0.0 if expert == EMPTY else self.shares[expert] / (len(self.holders[expert]) + more)

    def loads(self) -> list[float]:
        return [sum(self.share(expert) for expert in held) for held in self.table]

    def busiest(self) -> float:
        return max(self.loads())

    def put(self, rank: int, slot: int, expert: int) -> None:
        """Let a slot hold an expert, or none."""
        old = self.table[rank][slot]
        if old != EMPTY:
            self.holders[old].discard(rank)
        self.table[rank][slot] = expert
        if expert != EMPTY:
            self.holders[expert].add(rank)

    # From nothing.

    def pack(self, copies: Sequence[int]) -> None:
        """Put the copies of all experts into empty slots, the largest first. A copy that fits nowhere is left out."""
        size = [share / count for share, count in zip(self.shares, copies, strict=True)]
        loads = [0.0] * len(self.table)
        for expert in sorted(range(len(size)), key=lambda expert: (-size[expert], expert)):
            free = [rank for rank, held in enumerate(self.table) if EMPTY in held]
            for rank in sorted(free, key=lambda rank: (loads[rank], rank))[: copies[expert]]:
                self.put(rank, self.table[rank].index(EMPTY), expert)
                loads[rank] += size[expert]

    def even_out(self) -> None:
        """Swap copies of the busiest rank while that takes load off it; where none does, add or drop a copy."""
        for _ in range(8 * sum(map(len, self.table))):
            loads = self.loads()
            changes = [*self._swaps(loads)] or [*self._further_copies(loads), *self._fewer_copies(loads)]
            if not changes:
                return
            self._apply(min(changes, key=lambda change: change.busiest))

    def _swaps(self, loads: list[float]) -> Iterator[_Change]:
        """Give the swaps, and moves into empty slots, after which neither rank has the load of the busiest one."""
        top = max(loads)
        busy = loads.index(top)
        for slot, expert in enumerate(self.table[busy]):
            given = self.share(expert)
            if not given:
                continue
            for rank, held in enumerate(self.table):
                if rank in self.holders[expert]:
                    continue
                for place, other in enumerate(held):
                    taken = self.share(other)
                    after = max(top - given + taken, loads[rank] + given - taken)
                    if after < top * (1 - 1e-9) and (other == EMPTY or busy not in self.holders[other]):
                        yield _Change(after, ((busy, slot, other), (rank, place, expert)))

    def _apply(self, change: _Change) -> None:
        for rank, slot, _ in change.slots:
            self.put(rank, slot, EMPTY)
        for rank, slot, expert in change.slots:
            self.put(rank, slot, expert)

    # From a placement.

    def change(self, busiest: float) -> bool:
        """Change one slot or two at a time until no rank has more than `busiest`; whether that was reached."""
        self._add_missing()
        for _ in range(2 * sum(map(len, self.table))):
            loads = self.loads()
            if (top := max(loads)) <= busiest:
                return True
            changes = [*self._swaps(loads), *self._further_copies(loads), *self._fewer_copies(loads)]
            if not changes:
                return False
            # The first that suffices; else what gains most for each expert that moves.
            enough = [change for change in changes if change.busiest <= busiest]
            self._apply(max(enough or changes, key=lambda change: change.gain(top)))
        return False

    def _add_missing(self) -> None:
        """Give each expert a slot: an empty one, else that of the smallest copy among experts with several."""
        missing = [expert for expert, holders in enumerate(self.holders) if not holders]
        for expert in sorted(missing, key=lambda expert: (-self.shares[expert], expert)):
            loads = self.loads()
            places = [
                (self.share(held), loads[rank], rank, slot)
                for rank, row in enumerate(self.table)
                for slot, held in enumerate(row)
                if held == EMPTY or len(self.holders[held]) > 1
            ]
            _, _, rank, slot = min(places)
            self.put(rank, slot, expert)

    def _further_copies(self, loads: list[float]) -> Iterator[_Change]:
        """Give the copies of the busiest rank's experts in empty slots, or in the place of a copy of another expert."""
        top = max(loads)
        for expert in self.table[loads.index(top)]:
            if not self.share(expert):
                continue
            for rank, held in enumerate(self.table):
                if rank in self.holders[expert]:
                    continue
                for slot, other in enumerate(held):
                    if other == EMPTY or len(self.holders[other]) > 1:
                        after = self._after_copy(loads, expert, rank, other)
                        if after < top * (1 - 1e-9):
                            yield _Change(after, ((rank, slot, expert),))

    def _fewer_copies(self, loads: list[float]) -> Iterator[_Change]:
        """Give the copies that the busiest rank can drop, because the other ranks that hold them have less load."""
        top = max(loads)
        busy = loads.index(top)
        for slot, expert in enumerate(self.table[busy]):
            others = self.holders[expert] - {busy} if self.share(expert) else ()
            if others:
                more = self.share(expert, -1) - self.share(expert)
                after = max(top - self.share(expert), *(loads[rank] + more for rank in others))
                if after < top * (1 - 1e-9):
                    yield _Change(after, ((busy, slot, EMPTY),))

    def _after_copy(self, loads: list[float], expert: int, rank: int, other: int) -> float:
        """Return the largest load among the ranks that change if `rank` holds `expert` instead of `other`."""
        share = self.share(expert, 1)
        less = self.share(expert) - share
        more = 0.0 if other == EMPTY else self.share(other, -1) - self.share(other)
        changed = {rank: loads[rank] + share - self.share(other)}
        for holder in self.holders[expert]:
            changed[holder] = loads[holder] - less
        for holder in self.holders[other] - {rank} if other != EMPTY else ():
            changed[holder] = changed.get(holder, loads[holder]) + more
        return max(changed.values())

    def renamed(self, before: list[list[int]]) -> _Plan:
        """Give the ranks' tables to those ranks, and in the slots, that hold most of them already."""
        ranks = range(len(self.table))
        pairs = itertools.product(ranks, ranks)
        alike = [(-len({*self.table[mine]} & {*before[theirs]} - {EMPTY}), mine, theirs) for mine, theirs in pairs]
        table: list[list[int]] = [[] for _ in ranks]
        taken: set[int] = set()
        for _, mine, theirs in sorted(alike):
            if mine not in taken and not table[theirs]:
                taken.add(mine)
                table[theirs] = _in_slots(self.table[mine], before[theirs])
        return _Plan(table, self.shares)


def _in_slots(experts: list[int], before: list[int]) -> list[int]:
    """Put experts into the slots that they had, and the others into the rest.

    >>> _in_slots([4, 7, -1], before=[9, -1, 4])
    [7, -1, 4]
    """
    others = [expert for expert in experts if expert not in before or expert == EMPTY]
    return [held if held in experts and held != EMPTY else others.pop(0) for held in before]
