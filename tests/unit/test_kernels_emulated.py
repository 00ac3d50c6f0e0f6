"""The kernels themselves, compiled for this CPU and run by an emulated machine: ranks, interleavings and memory are as
hostile as a seed makes them. What the machine may do is told in tests/emulator/."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from raymoe.device.copy import Spread
from raymoe.device.ring import Ring
from raymoe.exchange.spec import ExchangeSpec
from raymoe.job.errors import Aborted, DataRefused, PeerTimeout, RaymoeError
from tests.emulator.build import Change, compiler
from tests.emulator.copies import Mail, Message
from tests.emulator.machine import Emulator, EmulatorError
from tests.emulator.ranks import backend, narrow, small, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange_cases import Case

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

FP8 = "float8_e4m3"
ROUTINGS = ("uniform", "skewed", "masked", "none", "repeated", "one")
SHORT_S = 2e-4


@dataclass(frozen=True)
class Run:
    """A kind of backend, and what it is run with; fields of the spec by name."""

    kind: str
    ranks: int = 2
    shape: Any = small
    form: str = "whole"
    spec: dict[str, Any] = field(default_factory=dict)
    stamped: bool = True
    routings: tuple[str, ...] = ROUTINGS
    weighted: bool = True
    changes: tuple[Change, ...] = ()
    most_steps: int = 20_000_000

    def judged(self, seed: int) -> int:
        """All steps in the interleaving of a seed; how many switches it took."""
        case = Case(
            self.ranks,
            ExchangeSpec(**{"tokens": 20, "hidden": 64, "experts": 12, "topk": 3, **self.spec}),
            "auto",
            self.routings,
            seed=seed,
            prefix=seed % 2 == 0,
            wide_ids=seed % 3 != 0,
            weighted=self.weighted,
        )
        with Emulator(self.ranks, self.most_steps, self.changes) as emulator:
            spaces = workspaces(emulator, case.spec, stamped=self.stamped)
            steps = Steps(emulator, case, [backend(self.kind, space, case.spec, self.shape) for space in spaces])
            for step in range(len(self.routings)):
                steps.enqueue(step, self.form)
            emulator.run(seed)
            steps.judge()
            return emulator.steps


RUNS = {
    **{f"{kind} on {ranks}": Run(kind, ranks) for kind in ("fused", "staged", "few") for ranks in (1, 2, 3)},
    **{f"halves of {kind}": Run(kind, 3, form="halves") for kind in ("fused", "few")},
    **{f"narrow {kind}": Run(kind, 3, narrow, spec={"tokens": 40}) for kind in ("fused", "staged")},
    **{f"{kind}, grid of a GPU": Run(kind, shape=None, stamped=False) for kind in ("fused", "staged", "few")},
    **{f"{kind}, layout rank": Run(kind, 3, spec={"layout": "rank"}) for kind in ("fused", "staged")},
    **{f"{kind}, zeros in gaps": Run(kind, spec={"padding": "zero", "alignment": 8}) for kind in ("fused", "few")},
    **{f"{kind}, 16 of 16": Run(kind, spec={"topk": 16, "experts": 16}) for kind in ("fused", "few")},
    **{f"{kind}, 16 bytes": Run(kind, 3, spec={"hidden": 8, "alignment": 1}) for kind in ("fused", "staged", "few")},
    **{f"{kind}, 2000 bytes": Run(kind, spec={"hidden": 1000, "tokens": 9}) for kind in ("fused", "staged", "few")},
    **{f"{kind}, float32": Run(kind, spec={"hidden": 20, "dtype": "float32"}) for kind in ("fused", "few")},
    **{f"{kind}, float16": Run(kind, spec={"dtype": "float16"}, weighted=False) for kind in ("fused", "few")},
    **{
        f"fp8 to {dtype}": Run("fused", spec={"wire": FP8, "dtype": dtype, "hidden": 264, "tokens": 9})
        for dtype in ("bfloat16", "float16", "float32")
    },
    **{
        f"fp8 raw, layout {layout}": Run(
            "fused", 3, spec={"wire": FP8, "output": "raw", "layout": layout, "hidden": 272, "padding": "zero"}
        )
        for layout in ("expert", "rank")
    },
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_rows_go_where_the_plan_says_and_come_home_summed(run):
    for seed in range(4):
        run.judged(seed)


def test_a_seed_is_one_interleaving():
    run = replace(RUNS["fused on 2"], routings=("uniform", "skewed"))
    assert run.judged(5) == run.judged(5) != run.judged(6)


@pytest.mark.parametrize("kinds", [("fused", "staged"), ("few", "fused")])
def test_exchanges_of_one_workspace_take_turns(kinds):
    """Two specs, whose slots overlap, and one count of epochs."""
    specs = [ExchangeSpec(tokens, hidden, experts=8, topk=2) for tokens, hidden in ((12, 64), (20, 24))]
    for seed in range(3):
        cases = [Case(2, spec, "auto", ("uniform",) * 4, seed=seed + i) for i, spec in enumerate(specs)]
        with Emulator(2) as emulator:
            spaces = workspaces(emulator, *specs)
            both = [
                Steps(emulator, case, [backend(kind, space, case.spec, small) for space in spaces])
                for kind, case in zip(kinds, cases, strict=True)
            ]
            for step in range(4):
                for steps in both:
                    steps.enqueue(step)
            emulator.run(seed)
            for steps in both:
                steps.judge()


# ---- data that is refused -------------------------------------------------------------------------------------------


def _bad_id(rank, batch):
    if rank == 1:
        batch.ids[2, 1] = 77


def _too_many(rank, batch):
    if rank == 1:
        batch.num_tokens = len(batch.x) + 3


FAULTS = {
    "id": (_bad_id, {}, "rank 1 asked for expert 77 for its token 2"),
    "tokens": (_too_many, {}, "num_tokens is 23 on rank 1"),
    "capacity": (None, {"capacity": 64, "alignment": 1}, "120 rows, gaps included, came to rank 1; its capacity is 64"),
}


@pytest.mark.parametrize("kind", ["fused", "staged", "few"])
@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_refuse_the_same_step_and_the_next_one_works(kind, fault):
    change, fields, told = FAULTS[fault]
    spec = ExchangeSpec(**{"tokens": 20, "hidden": 64, "experts": 12, "topk": 3, **fields})
    routings = ("masked", "one" if fault == "capacity" else "uniform", "none", "masked")
    case = Case(2, spec, "auto", routings, ragged=False, prefix=fault == "tokens", seed=3)
    for seed in range(3):
        with Emulator(2) as emulator:
            spaces = workspaces(emulator, spec)
            steps = Steps(emulator, case, [backend(kind, space, spec, small) for space in spaces])
            steps.enqueue(0)
            steps.enqueue(1, change=change)
            emulator.run(seed)
            for rank, each in enumerate(steps.backends):
                with pytest.raises(DataRefused, match=told):
                    each.check()
                assert np.isnan(steps.results[1][rank].y).all()
            steps.enqueue(2)
            steps.enqueue(3)
            emulator.run(seed + 100)
            steps.judge(first=2)


# ---- peers that stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["deadline", "abort"])
@pytest.mark.parametrize("kind", ["fused", "staged", "few"])
def test_a_stopped_peer_ends_every_wait_and_nothing_more_is_stored(kind, end):
    spec = ExchangeSpec(tokens=20, hidden=64, experts=12, topk=3)
    case = Case(3, spec, "auto", ("uniform", "uniform", "uniform"), ragged=False)
    for seed in range(3):
        with Emulator(3) as emulator:
            spaces = workspaces(emulator, spec, timeout_s=SHORT_S if end == "deadline" else 60.0)
            steps = Steps(emulator, case, [backend(kind, space, spec, small) for space in spaces], frozenset({2}))
            steps.enqueue(0)
            if end == "abort":
                for space in spaces:
                    space.error.abort("rank 2 is gone")
            emulator.run(seed)
            for rank in (0, 1):
                with pytest.raises(PeerTimeout if end == "deadline" else Aborted, match="rank 2"):
                    steps.backends[rank].check()
                assert steps.results[0][rank].counts == [0] * 4
                assert np.isnan(steps.results[0][rank].y).all()
            before = [_told_to_others(space) for space in spaces]
            _enqueue_unchecked(steps, 1)
            emulator.run(seed)
            for space, then in zip(spaces, before, strict=True):
                for name, region in _told_to_others(space).items():
                    assert torch.equal(region, then[name]), f"{name} of rank {space.world.rank}"
            assert all(np.isnan(steps.results[1][rank].y).all() for rank in (0, 1))


def _told_to_others(space: Any) -> dict[str, torch.Tensor]:
    names = [each.region.name for each in space.heap.layout.placed if not each.region.name.startswith(("own", "gap"))]
    return {name: space.heap.tensor(name).clone() for name in names}


def _enqueue_unchecked(steps: Steps, step: int) -> None:
    """As a replay does, which nobody has looked at before."""
    for each in steps.backends:
        each.workspace.error.check = lambda: None
    steps.enqueue(step)


# ---- messages -------------------------------------------------------------------------------------------------------

MESSAGES = (
    *(Message(0), Message(1, 3, 3), Message(15, 0, 7), Message(16), Message(64, 16, 32), Message(1000, 5, 21)),
    *(Message(777, 2, 13), Message(33, 15, 0), Message(1024), Message(129, 1, 1)),
)
SPREADS = {
    "own blocks": Spread(2, Ring(3, 64)),
    "in turn": Spread(3, Ring(2, 32), in_turn=True),
    "one stage": Spread(1, Ring(1, 48), in_turn=True),
    "paced": Spread(2, Ring(4, 64), in_turn=True, gbps=2),
}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_messages_arrive_whole_before_they_are_announced(spread):
    for seed in range(3):
        with Emulator(2) as emulator:
            mail = Mail(emulator, MESSAGES, spread)
            mail.enqueue(4)
            emulator.run(seed)
            assert mail.seen == [4, 4] and all(error.record() is None for error in mail.errors)


def test_a_message_to_a_stopped_peer_fails_by_its_deadline():
    with Emulator(2) as emulator:
        mail = Mail(emulator, MESSAGES, SPREADS["in turn"], SHORT_S, frozenset({1}))
        mail.enqueue(2)
        emulator.run(0)
        assert isinstance(mail.errors[0].error(), PeerTimeout) and mail.seen == [0, 0]
        assert not any(mail.bytes(1, "target", number).any() for number in range(len(MESSAGES)))


# ---- bugs that are planted ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A bug, and where it shows."""

    kind: str
    changes: tuple[Change, ...]
    ranks: int = 3
    stamped: bool = False
    routings: tuple[str, ...] = ("uniform", "skewed", "masked", "uniform")
    shape: Any = narrow

    def run(self) -> Run:
        spec = {"tokens": 40}
        few_steps = 4_000_000  # a good run takes less than a million
        return Run(
            self.kind, self.ranks, self.shape, "whole", spec, self.stamped, self.routings, True, self.changes, few_steps
        )


def _planted(kind: str, file: str, old: str, new: str = "", **fields: Any) -> Planted:
    return Planted(kind, (Change(file, old, new),), **fields)


SYSTEM_FENCE = "ptx::fence_acq_rel_sys();  // orders"
SEND_STAGES = "wait_stages_read(stages_ - ahead_);"
PLANTED = {
    "rows announced without a wait": _planted("fused", "sending.cuh", "ptx::bulk_wait<YOUNGER>();"),
    "rows announced when they are read": _planted(
        "fused", "sending.cuh", "ptx::bulk_wait<YOUNGER>();", "ptx::bulk_wait_read<YOUNGER>();"
    ),
    "no fence before a lane's word": _planted("fused", "sending.cuh", f"{SYSTEM_FENCE} the rows, whose", "//"),
    "no fence before the last word": _planted("fused", "sending.cuh", f"{SYSTEM_FENCE} the rows before", "//"),
    "no fence before the head words": _planted("fused", "routing.cuh", "ptx::fence_acq_rel_sys();"),
    "the end does not wait for writes": _planted("fused", "ring.cuh", "ptx::bulk_wait<0>();", "settle();"),
    "a stage is loaded too early": _planted("fused", "ring.cuh", SEND_STAGES, "wait_stages_read(stages_);"),
    "no proxy fence before a slot is loaded": _planted(
        "fused", "placing.cuh", "ptx::fence_proxy_async();  // orders the word", "//"
    ),
    "a word is not acquired": _planted("fused", "sync.cuh", "load_acquire_sys(word)", "load_relaxed_sys(word)"),
    "one half of the slots, at the sender": _planted("fused", "sending.cuh", "half_(epoch & 1)", "half_(0)"),
    "one half of the slots": Planted(
        "fused",
        (
            Change("sending.cuh", "half_(epoch & 1)", "half_(0)"),
            Change("placing.cuh", "half_(epoch & 1)", "half_(0)"),
        ),
        stamped=True,
    ),
    "one half of the sums": Planted(
        "fused",
        (
            Change("reducing.cuh", "half_(epoch & 1)", "half_(0)"),
            Change("combine.cu", "p.slot_at(me, epoch & 1, rank, token)", "p.slot_at(me, 0, rank, token)"),
        ),
    ),
    "nothing to send, nothing said": _planted(
        "fused",
        "sending.cuh",
        "    say_done(p, epoch, sender);",
        "    if (n != 0) say_done(p, epoch, sender);",
        routings=("none", "uniform"),
        ranks=2,
    ),
    "sums announced when they are read": _planted(
        "fused", "reducing.cuh", "ptx::bulk_wait<1>();", "ptx::bulk_wait_read<1>();"
    ),
    "no fence before a sum's word": _planted("fused", "reducing.cuh", f"{SYSTEM_FENCE} the pieces, whose", "//"),
    "no fence before the last word of sums": _planted("fused", "reducing.cuh", f"{SYSTEM_FENCE} the pieces before", "//"),
    "no fence before a sum leaves its stage": _planted(
        "fused", "reducing.cuh", "ptx::fence_proxy_async_shared();  // orders this thread's stores", "//"
    ),
    "no fence before a stamp leaves": _planted(
        "fused", "sending.cuh", "ptx::fence_proxy_async_shared();  // orders the stamp", "//", stamped=True
    ),
    "a sum's stage is overwritten too early": _planted("fused", "reducing.cuh", "ptx::bulk_wait_read<1>();"),
    "no barrier before the last block's ticket": _planted(
        "fused", "dispatch.cu", "    __syncthreads();  // orders what this block's threads did", "//"
    ),
    "rows are stored, not released": _planted(
        "staged", "sending.cuh", f"{SYSTEM_FENCE} the rows before", "//", shape=small
    ),
    "lines of the epoch before": _planted("few", "lines.cuh", "value.high == epoch)", "value.high + 2 >= epoch)"),
    "one half of the lines": Planted(
        "few", (Change("dispatch_few.cu", "p.few_rows[half]", "p.few_rows[0]"),), routings=("uniform",) * 6
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_found(planted):
    run = planted.run()
    for seed in range(24):
        try:
            run.judged(seed)
        except (EmulatorError, AssertionError, RaymoeError):
            return
    pytest.fail("24 interleavings are all right with it")


def test_epochs_counted_by_the_other_operation_are_found():
    spec = ExchangeSpec(tokens=40, hidden=64, experts=12, topk=3)
    case = Case(3, spec, "auto", ("uniform",) * 6, ragged=False)
    found = 0
    for seed in range(12):
        with Emulator(3) as emulator:
            spaces = workspaces(emulator, spec)
            steps = Steps(emulator, case, [backend("fused", space, spec, narrow) for space in spaces])
            for each in steps.backends:
                each._combine_base = replace(each._combine_base, operation=each.workspace.own("dispatch"))
            for step in range(6):
                steps.enqueue(step)
            try:
                emulator.run(seed)
                steps.judge()
            except (EmulatorError, AssertionError, RaymoeError):
                found += 1
    assert found


COPYING = {
    "signalled when the bytes are read": Change("ring.cuh", "ptx::bulk_wait<0>();", "settle();"),
    "a lane told before its stores have arrived": Change("copy.cu", "ptx::bulk_wait<LATE>();", ""),
    "a credit that is not waited for": Change("lanes.cuh", "credit + lane.lag >= epoch", "credit + lane.lag + 1 >= epoch"),
    "no proxy fence behind a credit": Change("copy.cu", "        ptx::fence_proxy_async();", ""),
    "hands that do not wait for one another": Change(
        "copy.cu", "ptx::barrier_of_warps(1, HANDS);  // orders the stores", "//"
    ),
    "a byte too many": Change("unaligned.cuh", "thread < span.bytes - tail", "thread <= span.bytes - tail"),
}


@pytest.mark.parametrize("change", COPYING.values(), ids=COPYING)
def test_a_bug_planted_in_a_copy_is_found(change):
    for seed in range(24):
        with Emulator(2, 4_000_000, (change,)) as emulator:
            mail = Mail(emulator, MESSAGES, SPREADS["in turn"])
            mail.enqueue(3)
            try:
                emulator.run(seed)
                assert mail.seen == [3, 3]
            except (EmulatorError, AssertionError):
                return
    pytest.fail("24 interleavings are all right with it")


# ---- what the machine says ------------------------------------------------------------------------------------------

SAID = {
    "a store beside memory": (
        Change("places.cuh", "p.out_weights + place * 4ull, static", "p.out_weights + (place + 999) * 4ull, static"),
        "dispatch on rank .*stores 4 bytes of .*where nothing is",
    ),
    "a plain store beside a region": (Change("placing.cuh", "p.got->tokens[threadIdx.x] =", "p.got[-1].tokens[0] ="), ""),
    "words not aligned": (Change("sync.cuh", "load_relaxed_gpu(last)", "load_relaxed_gpu((u64*)((u8*)last + 4))"), ""),
    "a wait that never ends": (
        Change("ring.cuh", "ptx::barrier_expect(barrier, chunk.bytes);", "ptx::barrier_expect(barrier, chunk.bytes + 16);"),
        "no end after .*waits for the bytes of the barrier at",
    ),
    "a barrier that some leave out": (
        Change("dispatch.cu", "    __syncthreads();\n    const u64 epoch", "    if (threadIdx.x) __syncthreads();\n    const u64 epoch"),
        "",
    ),
}
