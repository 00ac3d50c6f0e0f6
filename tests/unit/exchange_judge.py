"""What the results of a case must be: exact where rows are only moved, within a bound where they are summed."""

from __future__ import annotations

import numpy as np

from raymoe.exchange import plan
from raymoe.exchange.spec import FP8_BLOCK
from tests.unit.exchange_cases import BOUND, Batch, Case, Result, batches, oracle


def judge(case: Case, results: list[list[Result]]) -> None:
    for step in range(len(case.routing)):
        sent = batches(case, step)
        for rank in range(case.ranks):
            judge_dispatch(case, sent, rank, results[rank][step])
            judge_combine(case, sent[rank], results[rank][step].y)
        judge_bytes(case, sent)


def judge_dispatch(case: Case, sent: list[Batch], rank: int, result: Result) -> None:
    local = case.spec.local_experts(case.ranks)
    ids = [batch.ids[: batch.num_tokens] for batch in sent]
    theirs = plan.plan(ids, rank, local, case.spec.alignment)
    assert (result.counts, result.offsets) == (theirs.counts, theirs.offsets)
    want = plan.dispatch([batch.x for batch in sent], theirs, case.spec.rows(case.ranks)).float().numpy()
    for place, entry in enumerate(theirs.entries):
        if entry is None:
            assert result.weights[place] == 0
            assert case.spec.padding == "any" or not result.x[place].any()
        else:
            source, token, k = entry
            assert np.array_equal(result.x[place], want[place])
            assert result.weights[place] == sent[source].weights[token, k]


def judge_combine(case: Case, batch: Batch, y: np.ndarray, bound: float | None = None) -> None:
    want, scale = oracle(batch, case.weighted)
    assert y.shape == want.shape
    most = BOUND[case.spec.dtype] if bound is None else bound
    assert np.all(np.abs(y - want) <= most * scale + 1e-7 * (scale > 0))


def judge_quantised(case: Case, sent: list[Batch], rank: int, result: Result) -> None:
    """Rows that crossed as fp8: the right rows, off by what 3 bits of mantissa and a block's smallest step are."""
    spec = case.spec
    ids = [batch.ids[: batch.num_tokens] for batch in sent]
    theirs = plan.plan(ids, rank, spec.local_experts(case.ranks), spec.alignment)
    assert (result.counts, result.offsets) == (theirs.counts, theirs.offsets)
    rounding = 2.0**-8 if spec.dtype == "bfloat16" else 2.0**-11
    for place, entry in enumerate(theirs.entries):
        if entry is not None:
            source, token, k = entry
            row = sent[source].x[token].float().numpy()
            largest = np.repeat([abs(row[i : i + FP8_BLOCK]).max() for i in range(0, len(row), FP8_BLOCK)], FP8_BLOCK)
            slack = np.abs(row) * (2.0**-4 + rounding) + largest[: len(row)] / 448 * 2.0**-9
            assert np.all(np.abs(result.x[place] - row) <= slack)
            assert result.weights[place] == sent[source].weights[token, k]


def judge_bytes(case: Case, sent: list[Batch]) -> None:
    """The plan counts each (token, other rank) once: counted here with sets."""
    local = case.spec.local_experts(case.ranks)
    crossing = set()
    for source, batch in enumerate(sent):
        for token, ids in enumerate(batch.ids[: batch.num_tokens].tolist()):
            crossing |= {(source, token, e // local) for e in ids if e >= 0 and e // local != source}
    for rank, batch in enumerate(sent):
        out = sum(source == rank for source, _, _ in crossing)
        mine = batch.ids[: batch.num_tokens]
        assert plan.bytes_wire(mine, rank, case.ranks, case.spec) == out * case.spec.row_bytes
