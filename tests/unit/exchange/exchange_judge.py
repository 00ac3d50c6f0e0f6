"""Check the results of a case: exactly where rows are only moved, within a bound where they are summed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from raymoe.fp8 import FP8_BLOCK
from tests.unit.exchange import plan
from tests.unit.exchange.exchange_cases import BOUND, Batch, Case, Result, batches, oracle

LARGEST_E4M3 = 448.0


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
    theirs = plan.plan(ids, rank, local, case.spec.alignment, case.spec.expert_group)
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


def judge_combine(case: Case, batch: Batch, y: np.ndarray) -> None:
    want, scale = oracle(batch, case.weighted)
    assert y.shape == want.shape
    bound = max(BOUND[case.spec.dtype], BOUND[case.spec.combine_wire])
    assert np.all(np.abs(y - want) <= bound * scale + 1e-7 * (scale > 0))


QUANTISED_SLACK = 2.0**-20
"""Relative. A float32 quotient may be off by a few units. Near the middle between two 8-bit floats, either is right."""
HALF_A_STEP = {"bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25), "float32": (2.0**-24, 0.0)}
"""Rounding error of a dtype: relative, and absolute below the smallest normal number."""


def block_maxima(blocks: torch.Tensor) -> torch.Tensor:
    """Return each block's largest finite magnitude, from which its scale is made: 0, or at least a scale's minimum.

    >>> block_maxima(torch.tensor([[1.0, -torch.inf], [torch.nan, -2.0], [0.0, 0.0]])).tolist()
    [1.0, 2.0, 0.0]
    """
    finite = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(dim=-1)
    return torch.where(finite == 0, 0.0, finite.clamp(min=LARGEST_E4M3 * torch.finfo(torch.float32).tiny))


def odd_blocks(dtype: torch.dtype) -> torch.Tensor:
    """Return blocks of 128 elements that are hard to scale: a few extreme numbers, then zeros.

    There are more blocks than the kernels scale together: 15 for few tokens, 32 for many.
    """
    limits, nan, inf = torch.finfo(dtype), float("nan"), float("inf")
    least = limits.smallest_normal * limits.eps  # the smallest positive number
    heads = [
        *([0], [nan], [inf], [-inf, nan], [nan, 1], [2, -inf, nan, inf], [-inf, -3, 2]),
        *([least], [-least, inf], [limits.smallest_normal], [1e-37], [1e-36, -1e-37], [6e-36]),
        *([limits.max], [-limits.max, limits.max, inf], [limits.max, 1, least], [nan, inf, limits.max / 2]),
    ]
    blocks = torch.zeros(33, FP8_BLOCK, dtype=dtype)
    for block, head in enumerate(heads):
        blocks[block, 5 : 5 + 7 * len(head) : 7] = torch.tensor(head, dtype=torch.float64).to(dtype)
        blocks[-1 - block, -1] = blocks[block, 5]
    return blocks


def judge_odd_blocks(x: torch.Tensor, rows: torch.Tensor, found_scales: torch.Tensor | None) -> None:
    """Check a row of `odd_blocks` that crossed as float8_e4m3, bit by bit: values and scales, or dequantised rows."""
    blocks = x.float().view(-1, FP8_BLOCK)
    maxima = block_maxima(blocks)
    scales = torch.where(maxima == 0, 1.0, maxima / LARGEST_E4M3)
    assert scales.isfinite().all()
    assert (scales >= torch.finfo(torch.float32).tiny).all()
    values = (blocks * torch.where(maxima == 0, 1.0, LARGEST_E4M3 / maxima)[:, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    want = values.to(torch.float8_e4m3fn).float()
    if found_scales is None:
        want = (want * scales[:, None]).to(x.dtype).float()
        assert torch.equal(rows.isfinite(), ~x.isnan())
    else:
        assert torch.equal(found_scales.flatten(), scales)
    other = 999.0  # NaN equals nothing
    assert torch.equal(rows.float().view(want.shape).nan_to_num(nan=other), want.nan_to_num(nan=other))


def quantised(row: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the two values, mostly equal, that an element may have after it has crossed as float8_e4m3.

    >>> low, high = quantised(torch.tensor([448.0, 1.0, -0.3, 0.0]))  # a scale of 1; 3 bits of mantissa
    >>> low.tolist(), bool((low == high).all())
    ([448.0, 1.0, -0.3125, 0.0], True)
    """
    x = row.double()
    blocks = torch.nn.functional.pad(x, (0, -len(x) % FP8_BLOCK)).view(-1, FP8_BLOCK)
    largest = block_maxima(blocks)[:, None]
    scales = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
    ends = []
    for off in (1 - QUANTISED_SLACK, 1 + QUANTISED_SLACK):
        elements = (blocks / scales * off).clamp(-LARGEST_E4M3, LARGEST_E4M3)
        ends.append(((elements.float().to(torch.float8_e4m3fn).double() * scales).flatten()[: len(x)]).numpy())
    return ends[0], ends[1]


def judge_quantised(case: Case, sent: list[Batch], results: list[Result]) -> None:
    """Check a step whose rows crossed as fp8: each row as near as 8 bits allow, and the sums of the experts' rows.

    An expert's row may cancel to zero, so the sums do not check the rows. Each row is checked by itself.
    """
    crossed: dict[tuple[int, int], np.ndarray] = {}
    for rank, result in enumerate(results):
        judge_quantised_rows(case, sent, rank, result, crossed)
    for source, (batch, result) in enumerate(zip(sent, results, strict=True)):
        seen = batch.x.clone()
        for token in range(batch.num_tokens):
            if (source, token) in crossed:
                seen[token] = torch.from_numpy(crossed[source, token])
        judge_combine(case, replace(batch, x=seen), result.y)


def judge_quantised_rows(
    case: Case, sent: list[Batch], rank: int, result: Result, crossed: dict[tuple[int, int], np.ndarray]
) -> None:
    """Check that every place holds the right row, equal on all ranks; `crossed` keeps rows by (source, token)."""
    spec = case.spec
    ids = [batch.ids[: batch.num_tokens] for batch in sent]
    theirs = plan.plan(ids, rank, spec.local_experts(case.ranks), spec.alignment, spec.expert_group)
    assert (result.counts, result.offsets) == (theirs.counts, theirs.offsets)
    relative, absolute = HALF_A_STEP[spec.dtype]
    for place, entry in enumerate(theirs.entries):
        if entry is None:
            continue
        source, token, k = entry
        row = result.x[place]
        if (source, token) not in crossed:
            near = [
                np.abs(row - end) <= np.abs(end) * (relative + QUANTISED_SLACK) + absolute
                for end in quantised(sent[source].x[token])
            ]
            assert np.all(near[0] | near[1])
        assert np.array_equal(row, crossed.setdefault((source, token), row))
        assert result.weights[place] == sent[source].weights[token, k]


def judge_bytes(case: Case, sent: list[Batch]) -> None:
    """Check that the plan counts each (token, other rank) once, by counting with sets."""
    local = case.spec.local_experts(case.ranks)
    crossing = set()
    for source, batch in enumerate(sent):
        for token, ids in enumerate(batch.ids[: batch.num_tokens].tolist()):
            crossing |= {(source, token, e // local) for e in ids if e >= 0 and e // local != source}
    for rank, batch in enumerate(sent):
        out = sum(source == rank for source, _, _ in crossing)
        own_ids = batch.ids[: batch.num_tokens]
        assert plan.bytes_wire(own_ids, rank, case.ranks, case.spec) == out * case.spec.row_bytes


def plan_needed(case: Case, sent: list[Batch]) -> list[int]:
    """Return the rows that each rank needs, gaps included."""
    spec, local = case.spec, case.spec.local_experts(case.ranks)
    ids = [batch.ids[: batch.num_tokens] for batch in sent]
    if spec.by_token:
        weights = [batch.weights for batch in sent]
        return [len(plan.token_plan(ids, weights, rank, local).rows) for rank in range(case.ranks)]
    return [plan.plan(ids, rank, local, spec.alignment).offsets[-1] for rank in range(case.ranks)]


def judge_needed(case: Case, answers: list[list[tuple[int, int, str]]]) -> None:
    """Judge what `rows_needed` of exchange_ranks.py returned on all ranks. Some steps fit, and some do not."""
    most, capacity, outcomes = [0] * case.ranks, case.spec.rows(case.ranks), set()
    for step in range(len(case.routing)):
        needed = plan_needed(case, batches(case, step))
        most = [max(pair) for pair in zip(most, needed, strict=True)]
        told = [(rank, rows) for rank, rows in enumerate(needed) if rows > capacity]
        outcomes.add(bool(told))
        for rank, answer in enumerate(answers):
            assert answer[step][:2] == (needed[rank], most[rank])
            says = (
                f"{told[0][1]} rows, gaps included, came to rank {told[0][0]}; its capacity is {capacity}: "
                if told
                else ""
            )
            assert answer[step][2] == (says + advice(max(needed)) if told else "")
    assert outcomes == {False, True}


def advice(rows_needed: int) -> str:
    """The end of a refusal because of the capacity, as a program that uses the library sees it."""
    return f"skip this step on all ranks, or take ExchangeSpec(capacity={rows_needed}) or more, or 'worst'"
