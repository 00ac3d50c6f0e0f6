"""Ranks that run the backward passes of different dispatches, or one more or less than others, on emulated kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raymoe.errors import DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Dispatched, Tokens
from tests.emulator.build import Change, compiler
from tests.emulator.machine import Emulator, EmulatorError
from tests.emulator.ranks import EmulatedBackend, backend, small, spec_for, workspaces
from tests.unit.exchange.exchange_cases import Case, batches

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

KINDS = ("fused", "staged", "copied", "ll")
RANKS, ODD = 3, 2
"""The rank ODD does something else than the others."""
SHORT_S = 1e-2
"""A timeout of virtual time."""
ROUTINGS = ("uniform", "skewed", "masked", "uniform")


@dataclass
class Ranks:
    """The backends of all ranks, and the results of two dispatches of unlike routing."""

    emulator: Emulator
    case: Case
    owners: list[EmulatedBackend]
    gots: list[list[Dispatched]]
    """[dispatch][rank]"""
    seed: int = 0

    @classmethod
    def of(cls, emulator: Emulator, kind: str, seed: int, layout: str = "expert") -> Ranks:
        case = Case(RANKS, spec_for(kind, layout=layout), "auto", ROUTINGS, ragged=False, seed=seed)
        spaces = workspaces(emulator, case.spec, timeout_s=SHORT_S)
        ranks = cls(emulator, case, [backend(kind, space, case.spec, small) for space in spaces], [], seed)
        ranks.gots = [[ranks.dispatch(owner, step) for owner in ranks.owners] for step in range(2)]
        ranks.run()
        return ranks

    def run(self) -> None:
        self.seed += 1
        self.emulator.run(self.seed)

    def tokens(self, owner: EmulatedBackend, step: int, factor: float = 1.0) -> Tokens:
        batch = batches(self.case, step)[owner.world.rank]
        return Tokens(factor * batch.x, batch.ids, batch.weights, None)

    def rows(self, owner: EmulatedBackend) -> torch.Tensor:
        made = owner.new((self.case.spec.rows(RANKS), self.case.spec.hidden), torch.bfloat16, "rows")
        return made.fill_(7.0)

    def dispatch(self, owner: EmulatedBackend, step: int) -> Dispatched:
        out = self.rows(owner) if self.case.spec.layout == "expert" else None
        return owner.dispatch(self.tokens(owner, step), out)

    def backward(self, owner: EmulatedBackend, step: int) -> torch.Tensor:
        """Dispatch half of the rows of a dispatch again, as the backend does in a backward pass. Return the rows."""
        forward, out, tokens = self.gots[step][owner.world.rank], self.rows(owner), self.tokens(owner, step, 0.5)
        if owner.keeps_places:
            owner.dispatch_known(tokens.x, forward, out)
            return out
        return owner.dispatch_again(tokens, out if self.case.spec.layout == "expert" else None, forward).x

    def combine(self, owner: EmulatedBackend, got: Dispatched, gradients: bool = False) -> torch.Tensor:
        y = owner.new((got.tokens, self.case.spec.hidden), torch.bfloat16, "y").fill_(7.0)
        if gradients:
            entries = owner.new((got.tokens, self.case.spec.topk), torch.float32, "entries")
            owner.combine_gradients(self.rows(owner), got.weights, got, y, entries)
        else:
            owner.combine(self.rows(owner), got, True, y)
        return y

    def check_backward(self, step: int) -> None:
        """Run a backward pass on all ranks, which must be right."""
        found = [self.backward(owner, step) for owner in self.owners]
        self.run()
        for owner, rows in zip(self.owners, found, strict=True):
            owner.check()
            self.judge(self.gots[step][owner.world.rank], rows)

    def judge(self, forward: Dispatched, rows: torch.Tensor) -> None:
        """Compare the rows of a backward pass with half of those of its dispatch."""
        if forward.index is not None:
            return  # rows are in slots, which later dispatches have overwritten
        begins, counts = forward.expert_offsets.tolist(), forward.expert_counts.tolist()
        for begin, count in zip(begins, counts, strict=False):
            here = slice(begin, begin + count)
            assert torch.equal(rows[here], (0.5 * forward.x[here].float()).bfloat16())


def _for_all(
    ranks: Ranks, usual: Callable[[EmulatedBackend], object], odd: Callable[[EmulatedBackend], object]
) -> list[Any]:
    found = [odd(owner) if owner.world.rank == ODD else usual(owner) for owner in ranks.owners]
    ranks.run()
    return found


def _refused(owners: Sequence[EmulatedBackend], said: str) -> None:
    for owner in owners:
        with pytest.raises(DataRefused, match=said):
            owner.check()
        owner.check()  # the error is raised once


def _another_order(kind: str, seed: int, how: str, changes: tuple[Change, ...] = (), layout: str = "expert") -> None:
    """Run the backward passes of two dispatches in another order on one rank. Then run good ones."""
    with Emulator(RANKS, 40_000_000, changes) as emulator:
        ranks = Ranks.of(emulator, kind, seed, layout)
        ranks.check_backward(1)
        if how == "site":
            for got in ranks.gots[0]:
                got.site = 4 if got is ranks.gots[0][ODD] else 3
        for first in (0, 1):
            odd = 0 if how == "site" else 1 - first
            found = _for_all(
                ranks,
                lambda owner, at=first: ranks.backward(owner, at),
                lambda owner, at=odd: ranks.backward(owner, at),
            )
            if how == "site" and first == 1:
                said = "rank 0 runs the backward pass of no call site and rank 2 of call site 4; all ranks run"
            elif how == "site":
                said = "rank 0 runs the backward pass of call site 3 and rank 2 of call site 4; all ranks run backward"
            else:
                said = (
                    f"rank 0 runs the backward pass of its dispatch {first + 1} and rank 2 of its dispatch {2 - first};"
                )
            _refused(ranks.owners, said)
            for owner, rows in zip(ranks.owners, found, strict=True):
                if layout == "rank" and not owner.keeps_places:
                    size, me = RANKS * ranks.case.spec.tokens, owner.build.slots.buffer_slots
                    assert rows[:size].isnan().all() or rows[me : me + size].isnan().all()
                else:
                    assert rows.isnan().all()
        for got in ranks.gots[0]:
            got.site = 0
        for step in (1, 0, 1):
            ranks.check_backward(step)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", ["order", "site"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_refuse_backward_passes_in_another_order(kind: str, how: str) -> None:
    for seed in range(2):
        _another_order(kind, seed, how)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["fused", "copied"])
def test_all_ranks_refuse_them_with_layout_rank(kind: str) -> None:
    _another_order(kind, 3, "order", layout="rank")


def _left_out(kind: str, seed: int, changes: tuple[Change, ...] = (), gradients: bool = False) -> None:
    """Let one rank leave its backward pass out and begin the next step. Then run good ones."""
    with Emulator(RANKS, 40_000_000, changes) as emulator:
        ranks = Ranks.of(emulator, kind, seed)
        found = _for_all(ranks, lambda owner: ranks.backward(owner, 1), lambda owner: ranks.dispatch(owner, 2))
        said = "rank 0 runs the backward pass of its dispatch 2 and rank 2 no backward pass; all ranks run the same"
        _refused(ranks.owners[:ODD], said)
        ranks.owners[ODD].check()
        assert all(rows.isnan().all() for rows in found[:ODD])
        if ranks.owners[ODD].keeps_places:  # else the others have sent rows, which it takes for those of a dispatch
            local = ranks.case.spec.local_experts(RANKS)
            own = ranks.tokens(ranks.owners[ODD], 2).topk_idx // local == ODD
            assert found[ODD].expert_counts.sum() == own.sum()
        ys = _for_all(
            ranks,
            lambda owner: ranks.combine(owner, ranks.gots[1][owner.world.rank], gradients),
            lambda owner: ranks.combine(owner, found[ODD]),
        )
        _refused(ranks.owners, "rank 0 combines its dispatch 2 and rank 2 its dispatch 3; all ranks combine the same")
        assert all(y.isnan().all() for y in ys)
        for step in (0, 1):
            ranks.check_backward(step)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_refuse_a_backward_pass_of_some(kind: str, gradients: bool) -> None:
    """Without timeouts: the ranks that run it at once, the other one in its next combine."""
    for seed in range(2):
        _left_out(kind, seed, gradients=gradients)


def _gradients_left_out(kind: str, seed: int, changes: tuple[Change, ...] = ()) -> None:
    """Let one rank combine where the others return gradients of weights, or the reverse. Then run good combines."""
    odd_carries = bool(seed % 2)
    with Emulator(RANKS, 40_000_000, changes) as emulator:
        ranks = Ranks.of(emulator, kind, seed)
        ys = _for_all(
            ranks,
            lambda owner: ranks.combine(owner, ranks.gots[1][owner.world.rank], not odd_carries),
            lambda owner: ranks.combine(owner, ranks.gots[1][ODD], odd_carries),
        )
        forms = ("weighted=True", "gradients") if odd_carries else ("gradients", "weighted=True")
        _refused(ranks.owners, f"rank 0 combines dispatch 2 with {forms[0]} and rank 2 with {forms[1]}; all ranks run")
        assert all(y.isnan().all() for y in ys)
        for gradients in (True, False, True):
            ys = [ranks.combine(owner, ranks.gots[1][owner.world.rank], gradients) for owner in ranks.owners]
            ranks.run()
            for owner, y in zip(ranks.owners, ys, strict=True):
                owner.check()
                assert y.isfinite().all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_refuse_gradients_of_some(kind: str) -> None:
    for seed in range(2):
        _gradients_left_out(kind, seed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_timeout_that_follows_from_a_refused_pass_names_it_as_its_cause(kind: str) -> None:
    """A rank leaves out the only operation of a backward pass. So it combines while the others wait in a dispatch."""
    with Emulator(RANKS, 40_000_000) as emulator:
        ranks = Ranks.of(emulator, kind, 1)

        def ahead(owner: EmulatedBackend) -> None:
            ranks.backward(owner, 1)
            ranks.dispatch(owner, 2)

        _for_all(ranks, ahead, lambda owner: ranks.combine(owner, ranks.dispatch(owner, 2)))
        for owner in ranks.owners[:ODD]:
            with pytest.raises(PeerTimeout, match=f"rank {ODD} in dispatch") as caught:
                owner.check()
            assert "rank 2 no backward pass; all ranks run the same backward passes" in str(caught.value.__cause__)
        with pytest.raises(PeerTimeout, match="in combine"):
            ranks.owners[ODD].check()


Judge = Callable[[str, int, tuple[Change, ...]], None]


def _orders(kind: str, seed: int, changes: tuple[Change, ...]) -> None:
    for how in ("order", "site"):
        _another_order(kind, seed, how, changes)


def _in_a_row(kind: str, seed: int, changes: tuple[Change, ...] = ()) -> None:
    """Enqueue several backward passes at once, so that a rank may be ahead of its peers."""
    with Emulator(RANKS, 40_000_000, changes) as emulator:
        ranks = Ranks.of(emulator, kind, seed)
        steps = (1, 0, 0, 1)
        found = [[ranks.backward(owner, step) for owner in ranks.owners] for step in steps]
        ranks.run()
        for step, each in zip(steps, found, strict=True):
            for owner, rows in zip(ranks.owners, each, strict=True):
                owner.check()
                ranks.judge(ranks.gots[step][owner.world.rank], rows)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_passes_in_a_row_are_right(kind: str) -> None:
    for seed in range(3):
        _in_a_row(kind, seed)


BEFORE_HEAD = "ptx::fence_acq_rel_sys();  // orders the counts and the pass before the head"
LEFT_OUT = Change("passes.cuh", "        send_pass(p, epoch, threadIdx.x);\n", "")
INJECTED_BUGS: dict[str, tuple[Judge, str, tuple[Change, ...]]] = {
    "a pass stored after the fence": (
        _orders,
        "fused",
        (
            LEFT_OUT,
            Change("passes.cuh", BEFORE_HEAD, "ptx::fence_acq_rel_sys(), send_pass(p, epoch, threadIdx.x);"),
        ),
    ),
    "no fence before the head": (_orders, "fused", (Change("passes.cuh", BEFORE_HEAD, "//"),)),
    "no barrier before the head": (
        _left_out,
        "staged",
        (Change("passes.cuh", "block_barrier();  // hands the stores of all", "//"),),
    ),
    "counts are not zero": (
        _left_out,
        "fused",
        (
            Change(
                "passes.cuh", "p.rank_of(i), epoch & 1, p.peers.rank, p.local_of(i)), 0)", "p.peers.rank, 0, 0, 0), 0)"
            ),
        ),
    ),
    "no comparison": (_orders, "staged", (Change("passes.cuh", "ptx::load_8(at) == pass_of(p);", "true;"),)),
    "placement blocks do not compare": (
        _orders,
        "fused",
        (Change("placement_blocks.cuh", " || (KNOWN && !all_run_this_pass(p, epoch))", ""),),
    ),
    "the last block out does not compare": (
        _orders,
        "fused",
        (Change("dispatch.cu", "if (!all_run_this_pass(p, epoch)) {", "if (false) {"),),
    ),
    "sites are not compared": (
        _orders,
        "fused",
        (Change("passes.cuh", "static_cast<u64>(p.site) << 32 | static_cast<u32>(", "static_cast<u32>("),),
    ),
    "the parity of the other epoch": (
        _orders,
        "fused",
        (Change("passes.cuh", "epoch & 1, threadIdx.x);", "~epoch & 1, threadIdx.x);"),),
    ),
    "one buffer of passes": (
        _in_a_row,
        "fused",
        (Change("dispatch.cuh", "passes[parity], source, 16", "passes[0], source, 16"),),
    ),
    "a counting block stores no pass": (
        _orders,
        "copied",
        (Change("routing.cuh", "send_pass(p_, epoch_, peer);", ""),),
    ),
    "no pass in counts": (
        _orders,
        "ll",
        (Change("words_ll.cuh", "static_cast<u64>(pass_half(expert)) << 32 | value", "value"),),
    ),
    "no site in counts": (_orders, "ll", (Change("words_ll.cuh", "expert == 0 ? pass >> 32 : 0", "0"),)),
    "counts are not compared": (
        _orders,
        "ll",
        (Change("words_ll.cuh", "same = ok && pass_in_counts", "same = true || pass_in_counts"),),
    ),
    "gradients say nothing in words with epochs": (
        _gradients_left_out,
        "ll",
        (Change("combine.cu", "{ send_status_ll(p, epoch, status(p)); }", "{}"),),
    ),
    "gradients wait for done words in any case": (
        _gradients_left_out,
        "ll",
        (Change("combine.cu", "if (!ok || refused) {", "if (!ok) {"),),
    ),
}


@pytest.mark.parametrize("bug", INJECTED_BUGS)
def test_an_injected_bug_is_found(bug: str) -> None:
    judge, kind, changes = INJECTED_BUGS[bug]
    for seed in range(60):
        try:
            judge(kind, seed, changes)
        except (EmulatorError, AssertionError, RaymoeError, pytest.fail.Exception):
            return
    pytest.fail("60 interleavings are all right with it")


def test_the_backward_pass_of_refused_data_places_no_row_and_is_not_refused_again() -> None:
    """A dispatch that was refused for its data has a number too: its backward pass runs, and places no row."""
    spec = spec_for("fused", capacity=64, alignment=1)
    case = Case(2, spec, "auto", ("one", "masked"), ragged=False, seed=3)
    with Emulator(2) as emulator:
        owners = [backend("fused", space, spec, small) for space in workspaces(emulator, spec, timeout_s=SHORT_S)]
        outs = [owner.new((spec.rows(2), spec.hidden), torch.bfloat16, "out") for owner in owners]
        sent = batches(case, 0)
        gots = [
            owner.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
            for owner, batch, out in zip(owners, sent, outs, strict=True)
        ]
        for owner, batch, got, out in zip(owners, sent, gots, outs, strict=True):
            owner.dispatch_known(batch.x, got, out)
        emulator.run(1)
        for owner in owners:
            owner.check()
