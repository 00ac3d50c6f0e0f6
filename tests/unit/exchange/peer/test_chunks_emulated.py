"""Exchanges beside a rail that carries chunks, on an emulator: rows that come late, and combines of some tokens.

With injected bugs, and failures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from raymoe.errors import PeerTimeout
from raymoe.exchange.backend import Tokens
from raymoe.exchange.peer.fused_chunks import RAIL_OP
from tests.emulator.build import Change, compiler
from tests.emulator.cases import FP8
from tests.emulator.machine import Emulator, EmulatorError
from tests.emulator.ranks import LONG_S, backend, narrow, small, spec_for, workspaces
from tests.unit.exchange.exchange_cases import Case, Result, apply_experts, batches, expert_major, result_of
from tests.unit.exchange.exchange_judge import judge_combine, judge_dispatch, judge_quantised

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")


@dataclass(frozen=True)
class Late:
    """An exchange of emulated ranks whose rows come in chunks of so many tokens."""

    chunk: int
    ranks: int = 2
    spec: Any = ()
    shape: Any = small
    routing: tuple[str, ...] = ("uniform", "skewed", "masked", "none", "repeated", "one")
    stamped: bool = True
    known: bool = False
    parts: int = 0
    """Tokens of each launch of a combine; 0: one launch for all."""
    changes: tuple[Change, ...] = ()
    pairs: bool = False
    kind: str = "chunks"

    def judged(self, seed: int) -> None:
        case = Case(
            self.ranks, spec_for("fused", **dict(self.spec)), "auto", self.routing, seed=seed, prefix=seed % 2 == 0
        )
        with Emulator(2 * self.ranks, 6_000_000, self.changes) as emulator:
            made = self.backends(emulator, case)
            for each in made:
                each.delay = (0, 10, 40)[(seed + each.world.rank) % 3]
            for step in range(len(self.routing)):
                self._step(emulator, case, made, step)

    def backends(self, emulator: Emulator, case: Case, timeout_s: float = LONG_S) -> list[Any]:
        spaces = workspaces(emulator, case.spec, stamped=self.stamped, timeout_s=timeout_s, ranks=self.ranks)
        made = [backend(self.kind, space, case.spec, self.shape) for space in spaces]
        words = torch.zeros(1 + -(-case.spec.tokens // self.chunk), dtype=torch.int64)
        for each in made:
            each.await_chunks(words, self.chunk)  # type: ignore[attr-defined]
        return made

    def _step(self, emulator: Emulator, case: Case, made: list[Any], step: int) -> None:
        spec, sent, gots, outs, ys = case.spec, batches(case, step), [], [], []
        for each, batch in zip(made, sent, strict=True):
            count = torch.tensor([batch.num_tokens], dtype=torch.int32) if case.prefix else None
            shape = spec.rows(self.ranks), spec.hidden
            dtype = getattr(torch, spec.output_dtype)
            outs.append(each.new(shape, dtype, "out") if spec.layout == "expert" else None)
            gots.append(each.dispatch(Tokens(batch.x, batch.ids, batch.weights, count), outs[-1]))
        emulator.run(seed=step)
        results: list[Result] = []
        for each, got in zip(made, gots, strict=True):
            each.check()
            assert each.machine_words[0] == 1 + step * (2 if self.known else 1)
            x = expert_major(got)
            if spec.output == "raw":
                scales = got.scales if got.index is None else got.scales.index_select(0, got.index)
                x = x.float() * scales.repeat_interleave(128, 1)[:, : spec.hidden]
            x = x.to(getattr(torch, spec.dtype))
            results.append(result_of(got, x, torch.zeros(1)))
            rows = each.place(apply_experts(each, got, x).to(x.dtype))
            ys.append(each.new((got.tokens, spec.hidden), rows.dtype, "y"))
            spoil_unsent_entries(got, sent, spec)
            self._combine(each, rows, got, case.weighted, ys[-1])
        emulator.run(seed=step)
        for result, y in zip(results, ys, strict=True):
            result.y = y.float().numpy().copy()
        self._judge(case, sent, results)
        if self.known:
            again = [each.new((spec.rows(self.ranks), spec.hidden), x.dtype, "known") for each in made]
            for each, batch, got, out in zip(made, sent, gots, again, strict=True):
                each.dispatch_known(-2 * batch.x, got, out)
            emulator.run(seed=step)
            for each, got, out, result in zip(made, gots, again, results, strict=True):
                each.check()
                for begin, expert in zip(got.expert_offsets.tolist(), got.expert_counts.tolist(), strict=False):
                    rows = slice(begin, begin + expert)
                    assert np.array_equal(out[rows].float().numpy(), -2 * result.x[rows])

    def _combine(self, each: Any, rows: torch.Tensor, got: Any, weighted: bool, y: torch.Tensor) -> None:
        if not self.parts:
            each.combine(rows, got, weighted, y)
            return
        for begin in range(0, each.spec.tokens, self.parts):
            each.combine_tokens(rows, got, weighted, y, (begin, min(begin + self.parts, each.spec.tokens)))

    def _judge(self, case: Case, sent: list[Any], results: list[Result]) -> None:
        if case.spec.dispatch_wire == FP8:
            judge_quantised(case, sent, results)
            return
        for rank, result in enumerate(results):
            judge_dispatch(case, sent, rank, result)
            judge_combine(case, sent[rank], result.y)


def spoil_unsent_entries(got: Any, sent: list[Any], spec: Any) -> None:
    """Give the entries of tokens that were not sent, which no kernel writes, a place that no memory has."""
    saved = got._saved
    entries = saved.metadata.view(saved.memory, "entry_places").view(len(sent), spec.tokens, spec.topk)
    for rank, batch in enumerate(sent):
        entries[rank, batch.num_tokens :] = 0x7FFFFFF0


RAW = {"wire": FP8, "output": "raw", "hidden": 272, "padding": "zero"}
RUNS = {
    "chunks of 7": Late(7),
    "chunks of 1": Late(1, 2, {"tokens": 5}),
    "chunks of all but one": Late(19, 3),
    "one rank": Late(6, 1),
    "eight ranks": Late(4, 8, {"tokens": 6, "experts": 16}, routing=("uniform", "masked")),
    "layout rank": Late(7, 3, {"layout": "rank"}),
    "alignment 1": Late(7, 2, {"alignment": 1}),
    "alignment 8, zeros": Late(6, 2, {"alignment": 8, "padding": "zero"}),
    "known routing": Late(7, 3, known=True),
    "known routing, layout rank": Late(7, 2, {"layout": "rank", "padding": "zero"}, known=True),
    "one warp": Late(9, 3, {"tokens": 40}, narrow, ("uniform", "skewed", "masked")),
    "grid of a GPU": Late(7, 2, shape=None, stamped=False),
    "combines of 7 tokens": Late(7, 3, parts=7),
    "combines of 1 token": Late(3, 2, {"tokens": 5}, parts=1),
    "combines of 16 tokens, one warp": Late(20, 3, {"tokens": 40}, narrow, ("uniform", "skewed", "masked"), parts=16),
    "combines by eight ranks": Late(4, 8, {"tokens": 6, "experts": 16}, routing=("uniform", "masked"), parts=4),
    "combines, grid of a GPU": Late(7, 2, shape=None, stamped=False, parts=8),
    "few SMs": Late(7, 3, kind="few chunks"),
    "few SMs, layout rank": Late(7, 2, {"layout": "rank"}, kind="few chunks"),
    "few SMs, known routing": Late(7, 3, known=True, kind="few chunks"),
    "few SMs, combines of 7 tokens": Late(7, 3, parts=7, kind="few chunks"),
    "few SMs, grid of a GPU": Late(7, 2, shape=None, stamped=False, parts=8, kind="few chunks"),
    "fp8": Late(4, 2, {"wire": FP8, "hidden": 264, "tokens": 9}),
    "fp8 raw": Late(7, 3, RAW),
    "fp8 raw, layout rank": Late(7, 2, RAW | {"layout": "rank"}),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_rows_that_come_late_arrive_as_the_plan_says(name: str, seed: int) -> None:
    RUNS[name].judged(seed)


def injected(file: str, old: str, new: str = "") -> tuple[Change, ...]:
    return (Change(file, old, new),)


LATE = Late(9, 2, {"tokens": 40}, narrow, ("uniform", "skewed", "masked"), stamped=False)
QUANTISED = Late(4, 2, RAW | {"tokens": 20}, narrow, ("uniform", "skewed", "masked"), stamped=False)
FEW = Late(9, 2, {"tokens": 40}, small, ("uniform", "skewed", "masked"), stamped=False, kind="few chunks")
PARTS = Late(20, 2, shape=small, routing=("uniform", "masked", "skewed"), parts=8)
MISTAKES: dict[str, tuple[Late, tuple[Change, ...]]] = {
    "senders do not wait": (LATE, injected("sending.cuh", "if (leads_ && !x_.there(token)) {", "if (false) {")),
    "the first row of a warp does not wait": (
        LATE,
        injected("sending.cuh", "if (CHUNKED && warp_ < tokens && !await_row(warp_)) {", "if (false) {"),
    ),
    "placement blocks do not wait": (
        LATE,
        injected("placing.cuh", "own_left && x_.there(token_of(next_own_));", "own_left;"),
    ),
    "warps that quantise do not wait": (
        QUANTISED,
        injected("quantised_sending.cuh", "more = more && x_.await_by_warp(token);", ""),
    ),
    "a wait for the first chunk": (
        LATE,
        injected("chunks.cuh", "p_.chunks + 1 + token / p_.chunk_tokens", "p_.chunks + 1"),
    ),
    "a wait for the chunk before": (
        LATE,
        injected(
            "chunks.cuh",
            "1 + token / p_.chunk_tokens;",
            "1 + (token < p_.chunk_tokens ? 0 : token / p_.chunk_tokens - 1);",
        ),
    ),
    "a wait for an earlier crossing": (
        LATE,
        injected("chunks.cuh", "return ptx::load_8(p_.chunks);", "return ptx::load_8(p_.chunks) - 1;"),
    ),
    "a word that is not acquired": (
        LATE,
        injected(
            "chunks.cuh",
            "ptx::load_acquire_sys(word(token)) >= crossing()",
            "ptx::load_relaxed_sys(word(token)) >= crossing()",
        ),
    ),
    "no proxy fence before a row is loaded": (LATE, injected("chunks.cuh", "ptx::fence_proxy_async();", "")),
    "the first row of a warp of a mixed block does not wait": (
        FEW,
        injected("sending.cuh", "if (CHUNKED && warp_ < tokens && !await_row(warp_)) {", "if (false) {"),
    ),
    "a combine of some tokens takes a source for longer than it is": (
        PARTS,
        injected("local_reduction.cuh", "min(sent_, p_.first_token)", "0u"),
    ),
    "a word too early": (
        LATE,
        injected("advance_chunk.cu", "p.words + 1 + p.chunk,", "p.words + 2 - 1 + (p.chunk + 1) % 5,"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_injected_bug_is_found(name: str) -> None:
    late, changes = MISTAKES[name]
    late.judged(0)
    for seed in range(8):
        try:
            replace(late, changes=changes).judged(seed)
        except (AssertionError, EmulatorError) as found:
            print(f"{name}: {found}")
            return
    raise AssertionError(f"{name}: no seed found it")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("late", [LATE, QUANTISED, FEW], ids=["rows", "fp8", "few SMs"])
@pytest.mark.parametrize("come", [0, 1, 2])
def test_a_chunk_that_never_comes_ends_in_time_with_the_name_of_the_operation(late: Late, come: int) -> None:
    case = Case(late.ranks, spec_for("fused", **dict(late.spec)), "auto", ("uniform", "uniform"), ragged=False)
    with Emulator(2 * late.ranks, 60_000_000) as emulator:
        made = late.backends(emulator, case, timeout_s=1e-3)
        made[1].late_chunks = come
        for each, batch in zip(made, batches(case, 0), strict=True):
            out = each.new(
                (case.spec.rows(late.ranks), case.spec.hidden), getattr(torch, case.spec.output_dtype), "out"
            )
            each.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
        emulator.run(seed=come)
        errors = [error_of(each.check) for each in made]
        assert all(isinstance(error, PeerTimeout) for error in errors)
        late_one = errors[1]
        assert isinstance(late_one, PeerTimeout)
        assert (late_one.op, late_one.expected, late_one.seen, late_one.epoch) == (RAIL_OP, 1, 0, 1)
        assert RAIL_OP in str(late_one)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("late", [LATE, QUANTISED], ids=["rows", "fp8"])
@pytest.mark.parametrize("aborted_from", [0, 1, 2])
def test_after_an_abort_of_the_rail_no_chunk_is_announced_and_all_ranks_fail_in_this_step(
    late: Late, aborted_from: int
) -> None:
    words, errors = aborted_step(late, aborted_from)
    assert words == [1] * aborted_from + [0] * (len(words) - aborted_from)
    assert all(isinstance(error, PeerTimeout) for error in errors)
    assert RAIL_OP in str(errors[1])


def test_if_the_word_of_the_abort_is_not_read_a_step_with_rows_that_did_not_come_seems_to_succeed() -> None:
    unread = injected("advance_chunk.cu", "ptx::load_relaxed_sys(p.aborted) == 0", "true")
    words, errors = aborted_step(replace(LATE, changes=unread), 1)
    assert words == [1] * len(words)
    assert errors == [None, None]


def aborted_step(late: Late, aborted_from: int) -> tuple[list[int], list[Exception | None]]:
    """Abort the rail of rank 1 in a dispatch. Return the words of its chunks, and what each rank raises."""
    case = Case(late.ranks, spec_for("fused", **dict(late.spec)), "auto", ("uniform", "uniform"), ragged=False)
    with Emulator(2 * late.ranks, 60_000_000, late.changes) as emulator:
        made = late.backends(emulator, case, timeout_s=1e-3)
        made[1].aborted_from = aborted_from
        for each, batch in zip(made, batches(case, 0), strict=True):
            rows, dtype = case.spec.rows(late.ranks), getattr(torch, case.spec.output_dtype)
            out = each.new((rows, case.spec.hidden), dtype, "out")
            each.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
        emulator.run(seed=aborted_from)
        return made[1].machine_words[1:].tolist(), [error_of(each.check) for each in made]


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the tests look at it
        return error
    return None
