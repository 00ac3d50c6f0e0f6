"""The interface of DeepEP's ElasticBuffer on CPU ranks: both layouts, handles, gradients, and what it lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.spec import ExchangeSpec
from raymoe.integrations import deep_ep
from raymoe.integrations.deep_ep import ElasticBuffer, EPHandle, _received
from raymoe.integrations.deep_ep_calls import DispatchOptions
from tests.unit.exchange import plan
from tests.unit.exchange.exchange_cases import Batch, Case, batches
from tests.unit.memory.test_world_of import groups

__all__ = ["groups"]  # a fixture
Groups = Callable[..., list[Any]]
SPEC = ExchangeSpec(tokens=7, hidden=16, experts=6, topk=3, dtype="float32")
ROUTINGS = ("uniform", "masked", "none", "uniform")
ALIGNMENT = 4


def case_of(ranks: int) -> Case:
    return Case(ranks, replace(SPEC, experts=2 * ranks, topk=min(3, 2 * ranks)), "auto", ROUTINGS, seed=5)


def sent_by(case: Case, step: int) -> list[Batch]:
    return batches(case, step)


def compact(rank: int, ranks: int, waits: bool) -> None:
    """Compare each field of a compact dispatch with the plan, and its combine with sums in rank order."""
    case = case_of(ranks)
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=7, hidden=16, explicitly_destroy=True)
    stats = torch.zeros(2, dtype=torch.int32)
    for step in range(len(ROUTINGS)):
        sent, tokens = sent_by(case, step), 7 + step % 2
        batch, before = sent[rank], stats.clone()
        ids, weights = [each.ids for each in sent], [each.weights for each in sent]
        plans = [plan.token_plan(ids, weights, each, 2) for each in range(ranks)]
        want = plans[rank]
        rows, local, its_weights, handle, event = buffer.dispatch(
            *(batch.x, batch.ids, batch.weights, stats, 2 * ranks, tokens),
            expert_alignment=ALIGNMENT,
            do_cpu_sync=waits,
            num_sms=24,
        )
        there = len(want.rows)
        assert isinstance(rows, torch.Tensor) and local is not None and its_weights is not None
        assert len(rows) == len(local) == len(its_weights) == (there if waits else ranks * tokens)
        expected = torch.stack([sent[source].x[token] for source, token in want.rows]) if there else rows[:0]
        assert torch.equal(rows[:there], expected)
        assert torch.equal(local[:there], want.topk_idx) and (local[there:] == -1).all()
        assert local.dtype == deep_ep.topk_idx_t and torch.equal(its_weights[:there], want.weights)
        counts = torch.tensor([int((want.topk_idx == expert).sum()) for expert in range(2)])
        aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        assert handle.num_recv_tokens_per_expert_list == (aligned.tolist() if waits else [])
        assert handle.num_recv_tokens == len(rows) and handle.num_sms == 24
        assert torch.equal(handle.psum_num_recv_tokens_per_expert, aligned.cumsum(0).int())
        assert torch.equal(stats - before, counts.int())
        ends = [sum(source <= each for source, _ in want.rows) for each in range(ranks)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank is not None
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
        numbers = [source * tokens + token for source, token in want.rows]
        assert handle.recv_src_metadata[:there, 0].tolist() == numbers
        assert event.event is None
        with event:  # nothing has to wait
            y, none, _ = buffer.combine(2 * rows, handle)
        sums = [2 * torch.stack([sent[s].x[t] for s, t in each.rows]) if each.rows else rows[:0] for each in plans]
        assert none is None and torch.equal(y, plan.combine_sums(sums, plans, rank, len(batch.x), torch.float32))
    buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_compact_layout_equals_the_plan(groups: Groups, ranks: int, waits: bool) -> None:
    groups(ranks, compact, ranks, waits)


def expanding(rank: int, ranks: int, waits: bool) -> None:
    case = case_of(ranks)
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=7, hidden=16)
    for step in range(len(ROUTINGS)):
        sent = sent_by(case, step)
        batch, ids = sent[rank], [each.ids for each in sent]
        plans = [plan.plan(ids, each, 2, ALIGNMENT) for each in range(ranks)]
        rows, none, its_weights, handle, _ = buffer.dispatch(
            *(batch.x, batch.ids, batch.weights),
            num_experts=2 * ranks,
            expert_alignment=ALIGNMENT,
            do_cpu_sync=waits,
            do_expand=True,
            do_zero_padding=True,
        )
        want, there = plans[rank], plans[rank].offsets[-1]
        most = -(-(ranks * 7 * min(case.spec.topk, 2) + 2 * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
        assert isinstance(rows, torch.Tensor) and its_weights is not None and none is None
        assert len(rows) == len(its_weights) == handle.num_expanded_tokens == (there if waits else most)
        assert torch.equal(rows[:there], plan.dispatch([each.x for each in sent], want, most)[:there])
        assert its_weights[:there].tolist() == [
            0.0 if entry is None else float(sent[entry[0]].weights[entry[1], entry[2]]) for entry in want.entries
        ]
        ends = [start + count for start, count in zip(want.offsets, want.counts, strict=False)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == want.counts
        aligned = [-(-count // ALIGNMENT) * ALIGNMENT for count in want.counts]
        assert handle.num_recv_tokens_per_expert_list == (aligned if waits else [])
        assert handle.psum_num_recv_tokens_per_scaleup_rank is None
        with pytest.raises(ConfigError, match="num_recv_tokens of a handle asked for in the expanding layout"):
            _ = handle.num_recv_tokens
        bias = (torch.ones_like(batch.x), 2 * torch.ones_like(batch.x))
        y, _, _ = buffer.combine(rows, handle, bias=bias)
        torch.testing.assert_close(y, batch.x * (batch.ids >= 0).sum(1, keepdim=True) + 3)
    buffer.check()
    with pytest.raises(ConfigError, match="destroy asked for; the buffer was made without explicitly_destroy=True"):
        buffer.destroy()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_expanding_layout_equals_the_plan(groups: Groups, ranks: int, waits: bool) -> None:
    groups(ranks, expanding, ranks, waits)


def with_handles(rank: int, expands: bool) -> None:
    """Dispatch other rows by a handle, and combine numbers beside rows: what backward passes do."""
    case = case_of(2)
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=7, hidden=16, explicitly_destroy=True)
    for step in range(len(ROUTINGS)):
        batch = sent_by(case, step)[rank]
        ids = batch.ids.clone()
        rows, local, weights, handle, _ = buffer.dispatch(batch.x, ids, batch.weights, num_experts=4, do_expand=expands)
        assert isinstance(rows, torch.Tensor) and weights is not None
        ids.fill_(-1)  # the handle has a copy
        moved, again, none, same, _ = buffer.dispatch(-3 * batch.x, handle=handle, do_expand=expands)
        assert same is handle and none is None and isinstance(moved, torch.Tensor) and torch.equal(moved, -3 * rows)
        assert again is None if local is None else torch.equal(local, again)  # type: ignore[arg-type]
        doubled = buffer.dispatch(batch.x, None, 2 * batch.weights, handle=handle, do_expand=expands)[2]
        assert doubled is not None and torch.equal(doubled, 2 * weights)
        y, entries, _ = buffer.combine(rows, handle, weights)
        there = batch.ids >= 0
        ranks = torch.stack([((batch.ids // 2) == each).any(1) for each in range(2)]).sum(0)
        times = there.sum(1) if expands else ranks
        torch.testing.assert_close(y, batch.x * times[:, None])
        assert entries is not None and torch.equal(entries, torch.where(there, batch.weights, 0.0))
        plain = buffer.dispatch(batch.x, batch.ids, num_experts=4, do_expand=expands)
        assert plain[2] is None
    buffer.destroy()


@pytest.mark.parametrize("expands", [True, False])
def test_handles_bring_other_rows_to_the_same_places(groups: Groups, expands: bool) -> None:
    groups(2, with_handles, expands)


def make_mistakes(_rank: int) -> list[str]:
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4, hidden=8, explicitly_destroy=True)
    other = ElasticBuffer(dist.group.WORLD, hidden=8)
    x, ids, weights = torch.ones(2, 8), torch.tensor([[0], [1]]), torch.ones(2, 1)
    rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, num_experts=2, num_sms=8)
    assert isinstance(rows, torch.Tensor)
    pair = x.to(torch.float8_e4m3fn), torch.ones(2, 1, dtype=torch.int32)
    calls: list[Callable[[], object]] = [
        lambda: buffer.dispatch(x, ids, weights),
        lambda: other.dispatch(x, ids, weights, num_experts=2),
        lambda: buffer.dispatch(x, ids, weights, num_experts=2, sms=8),
        lambda: buffer.dispatch(x, ids, handle=handle),
        lambda: buffer.dispatch(x, handle=handle, do_expand=True),
        lambda: buffer.dispatch(pair, ids, weights, num_experts=2),
        lambda: buffer.dispatch((pair[0], torch.ones(2, 1)), ids, weights, num_experts=2),
        lambda: buffer.dispatch(torch.ones(5, 8), ids.repeat(3, 1)[:5], torch.ones(5, 1), num_experts=2),
        lambda: buffer.dispatch(x, ids, weights, num_experts=1),
        lambda: buffer.combine(rows, handle, num_sms=16),
        lambda: other.combine(rows, handle),
        lambda: buffer.pp_send(x, 1),  # type: ignore[attr-defined]
        lambda: deep_ep.Buffer(dist.group.WORLD),
        lambda: ElasticBuffer(dist.group.WORLD, hiden=8),
        buffer.get_comm_stream,
        lambda: buffer.destroy() or buffer.dispatch(x, ids, weights, num_experts=2),  # type: ignore[func-returns-value]
    ]
    said = []
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    with pytest.raises(AttributeError, match="a handle of raymoe has no 'dst_buffer_slot_idx'"):
        _ = handle.dst_buffer_slot_idx
    return said


def test_what_it_lacks_is_one_sentence(groups: Groups) -> None:
    wanted = [
        "dispatch without a handle needs topk_idx and num_experts",
        "num_max_tokens_per_rank was given neither to the buffer nor to dispatch",
        "dispatch was given 'sms', which is none of its options",
        "dispatch with a handle takes no topk_idx and no do_cpu_sync",
        "do_expand is True, and it was False for the handle",
        "scales are torch.int32; rows as fp8 have float32 scales",
        "rows that cross as float8_e4m3; only fused and staged, on GPUs, carry them so",
        "x has 5 rows; this exchange was made for at most 4 tokens a rank",
        "1 experts on 2 ranks; every rank holds the same number of them",
        "num_sms is 16, and it was 8 for the handle",
        "the handle comes from another buffer",
        "pp_send of DeepEP's ElasticBuffer asked for; raymoe has its dispatch and combine alone",
        "deep_ep.Buffer, the interface of DeepEP V1, asked for",
        "ElasticBuffer was given 'hiden', which is none of its options",
        "the communication stream asked for on CPU ranks",
        "dispatch on a buffer that was destroyed",
    ]
    for said in groups(2, make_mistakes):
        for sentence, begin in zip(said, wanted, strict=True):
            assert begin in sentence and "\n" not in sentence


@pytest.mark.parametrize("col_major", [True, False])
def test_scales_have_the_strides_that_are_asked_for(col_major: bool) -> None:
    """Rows as fp8 need GPUs; what happens to the result of their dispatch does not."""
    scales = torch.arange(24.0).view(3, 8).T  # as a dispatch gives them, for 8 rows of 384
    values, counts = torch.zeros(8, 384), torch.tensor([5])
    got = Dispatched(values, torch.ones(8), torch.tensor([0, 5]), counts, None, 5, None, None, scales=scales)
    handle = EPHandle(True, 1, 1, 8, 0, torch.zeros(5, 1), got, None, 5, [5], None)  # type: ignore[arg-type]
    options = DispatchOptions(use_tma_aligned_col_major_sf=col_major)
    (rows, found), ids, weights, _ = _received(got, handle, True, options)
    assert rows.shape == (5, 384) and weights.shape == (5,) and ids is None
    assert torch.equal(found, scales[:5]) and found.stride() == ((1, 8) if col_major else (3, 1))
    assert got.x.numel() == 0, "a handle keeps no rows"


def sizes(_rank: int) -> None:
    group = dist.group.WORLD
    hint = ElasticBuffer.get_buffer_size_hint(group, 128, 512, num_topk=8, use_fp8_dispatch=False)
    buffer = ElasticBuffer(group, num_bytes=hint, num_max_tokens_per_rank=128, hidden=512, num_topk=8)
    assert buffer.num_bytes == hint and hint % (2 << 20) == 0
    assert ElasticBuffer.get_buffer_size_hint(group, 4096, 512) > hint
    assert (buffer.rank_idx, buffer.num_ranks) == (dist.get_rank(), 2)
    assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 2)
    assert buffer.get_theoretical_num_sms(64, 8) > 0 and buffer.get_theoretical_num_qps(24) <= buffer.num_allocated_qps
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
    ElasticBuffer.capture().current_stream_wait()


def test_a_buffer_answers_what_programs_ask_first(groups: Groups) -> None:
    groups(2, sizes)


def test_other_programs_import_it_by_its_name(tmp_path: Path) -> None:
    program = (
        "import raymoe.integrations.deep_ep; raymoe.integrations.deep_ep.install()\n"
        "import importlib.util, deep_ep\n"
        "from deep_ep import ElasticBuffer, EPHandle, EventOverlap, topk_idx_t\n"
        "print(deep_ep.ElasticBuffer is raymoe.integrations.deep_ep.ElasticBuffer, deep_ep.__version__)\n"
        "print(importlib.util.find_spec('deep_ep') is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "2.1.0+raymoe", "True"], done.stderr
